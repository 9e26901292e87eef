"""Writes what a frozen vision tower returns for the images of a data set: `hf-xattn encode-features`.

Each process encodes its share of the images and writes shards of its own, which `vision_features.py` reads.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch.utils.data import DataLoader
from tqdm.auto import tqdm

from ..checkpoints.model_identity import tower_identity
from ..data.loading import Rows
from ..data.pictures import digest_of, picture_of, picture_parts
from ..modeling_xattn import XAttnForConditionalGeneration, XAttnModel
from ..processing_xattn import TILE_INPUTS, XAttnProcessor
from ..utils.whole_folder import replace_file
from .freezing import body_of
from .vision_features import FORMAT, SHARDS, Maker, VisionFeatures, image_processor_identity, tower_of, tower_output


PARTIAL = "rank-{:05d}.partial"  # name of a shard while a process writes it
SHARD_BYTES = 2**28


class EncodedPictures(NamedTuple):
    """What one process has done with its share of the images."""

    new: int  # images that were encoded
    known: int  # images whose features the folder held already
    nbytes: int  # size of the files that were written
    problems: dict[str, str]  # rows and images that cannot be read, each with the reason


@torch.no_grad()
def encode_pictures(
    model: XAttnModel | XAttnForConditionalGeneration,
    processor: XAttnProcessor,
    rows: Rows,
    folder: str | Path,
    *,
    batch_size: int = 8,
    workers: int = 0,
    shard_bytes: int = SHARD_BYTES,
    rank: int = 0,
    world_size: int = 1,
) -> EncodedPictures:
    """Writes the vision tower's outputs for the images of rows into a folder. Images that it holds are skipped.

    Each process reads its share of the rows. A call that was stopped can be repeated: it continues with the images that
    no complete file of the folder holds.

    Args:
        model ([`XAttnForConditionalGeneration`] or [`XAttnModel`]): a model with a vision tower.
        processor ([`XAttnProcessor`]): prepares the images.
        rows ([`Rows`]): the rows whose images are encoded.
        folder (`str` or `Path`): where the files are written. It is made if it does not exist.
        batch_size (`int`, defaults to 8): rows, and images, at a time.
        workers (`int`, defaults to 0): worker processes that read images.
        shard_bytes (`int`, defaults to 256 MiB): size of a file.
        rank (`int`, defaults to 0), world_size (`int`, defaults to 1): number of this process, and of all processes.

    Returns:
        [`EncodedPictures`]: what this process has done.

    Raises:
        TypeError: for a model without blocks.
        ValueError: for a model without a vision tower, and for a folder with damaged files or with features of another
            tower.
    """
    folder, tower = Path(folder), tower_of(model)
    identities = tower_identity(model.config, tower), image_processor_identity(processor)
    maker = Maker(*identities, str(tower.dtype))
    held = _known(folder, maker)
    folder.mkdir(parents=True, exist_ok=True)
    writer = _Writer(folder, maker, rank, shard_bytes)
    new, known, problems = set[str](), set[str](), dict[str, str]()
    # Rows that follow one another often share an image, which then is encoded once.
    own = range(len(rows) * rank // world_size, len(rows) * (rank + 1) // world_size)
    loader: Any = DataLoader(
        own,  # type: ignore[arg-type]  # a range is a data set too
        batch_size=batch_size,
        num_workers=workers,
        collate_fn=_PictureReader(processor, rows, held, batch_size),
    )
    was_training = tower.training
    tower.eval()
    try:
        for batch in tqdm(loader, desc="Encoding", disable=rank > 0, leave=False):
            problems.update(batch.problems)
            known |= batch.known
            for digests, inputs in batch.groups:
                if new.issuperset(digests):  # another worker has read these images before
                    continue
                for digest, tensors in zip(digests, _outputs(body_of(model), inputs)):
                    if digest not in new:
                        writer.add(digest, tensors)
                        new.add(digest)
        writer.close()
    finally:
        tower.train(was_training)
    return EncodedPictures(len(new), len(known), writer.nbytes, problems)


class _Batch(NamedTuple):
    groups: list[tuple[list[str], dict[str, torch.Tensor]]]  # digests of images, with the model's inputs
    known: set[str]  # images whose features the folder holds
    problems: dict[str, str]


class _PictureReader:
    """Reads the images of a batch of rows, if they have no features yet."""

    def __init__(self, processor: XAttnProcessor, rows: Rows, held: set[str], size: int):
        self.processor, self.rows, self.held, self.size = processor, rows, held, size
        self._read = set[str]()  # images that this worker has read

    def __call__(self, indices: list[int]) -> _Batch:
        batch = _Batch([], set(), {})
        pictures: dict[str, Any] = {}
        for index in indices:
            try:
                own = map(picture_of, picture_parts(self.rows.read(index)))
                digests = {digest_of(picture): picture for picture in own}
            except (OSError, TypeError, ValueError) as error:
                batch.problems[self.rows.where(index)] = str(error)
                continue
            batch.known.update(digests.keys() & self.held)
            pictures |= {name: each for name, each in digests.items() if name not in self.held | self._read}
        self._read.update(pictures)
        names = list(pictures)
        for start in range(0, len(names), self.size):
            self._add(names[start : start + self.size], pictures, batch)
        return batch

    def _add(self, digests: list[str], pictures: Mapping[str, Any], batch: _Batch) -> None:
        """Prepares images. They are one group if all have the same size, and otherwise one group each."""
        try:
            images = [[pictures[digest]] for digest in digests]
            batch.groups.append((digests, dict(self.processor(images=images))))
        except (OSError, TypeError, ValueError) as error:
            if len(digests) > 1:
                for digest in digests:
                    self._add([digest], pictures, batch)
            else:
                picture = pictures[digests[0]]
                batch.problems[digests[0] if isinstance(picture, bytes) else str(picture)] = str(error)


def _known(folder: Path, maker: Maker) -> set[str]:
    """Returns the images whose features a folder holds. Raises a `ValueError` for features of another tower."""
    if not any(folder.glob(SHARDS)):
        return set()
    held = VisionFeatures.before_weights(folder)
    for field, theirs, ours in zip(Maker._fields, held.maker, maker):
        if ours != theirs:
            what = "vision tower" if field == "tower" else field.replace("_", " ")
            raise ValueError(
                f"Expected {folder} to hold features of this model, got features of another {what}: {theirs[:12]} "
                f"instead of {ours[:12]}. Choose a new folder."
            )
    return set(held.digests())


def _outputs(body: Any, inputs: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """Returns what is stored for each image. The keys are added to the image's name in the file."""
    output, tiles = tower_output(body, inputs)
    if tiles is None:
        return [{"": _owned(each)} for each in output]
    outputs = []
    for features, ids, mask in zip(output[:, 0], tiles.aspect_ratio_ids[:, 0], tiles.aspect_ratio_mask[:, 0]):
        real = features[mask != 0]  # padding tiles are not stored: no text sees them
        named = {"": real, f".{TILE_INPUTS[0]}": ids, f".{TILE_INPUTS[1]}": mask}
        outputs.append({end: _owned(tensor) for end, tensor in named.items()})
    return outputs


def _owned(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to("cpu", copy=True, memory_format=torch.contiguous_format)


class _Writer:
    """Writes features to files. A file gets its final name only when it is complete."""

    def __init__(self, folder: Path, maker: Maker, rank: int, shard_bytes: int):
        self.nbytes = 0
        self._folder = folder
        self._metadata = {"format": FORMAT, **maker._asdict()}
        self._partial = folder / PARTIAL.format(rank)
        self._shard_bytes = shard_bytes
        self._digests: list[str] = []
        self._tensors: dict[str, torch.Tensor] = {}
        self._size = 0

    def add(self, digest: str, tensors: dict[str, torch.Tensor]) -> None:
        self._digests.append(digest)
        for end, tensor in tensors.items():
            self._tensors[digest + end] = tensor
            self._size += tensor.nbytes
        if self._size >= self._shard_bytes:
            self._write()

    def close(self) -> None:
        """Writes the rest, and removes the unfinished file of a run that was killed."""
        if self._digests:
            self._write()
        self._partial.unlink(missing_ok=True)

    def _write(self) -> None:
        save_file(self._tensors, str(self._partial), self._metadata)
        self.nbytes += self._partial.stat().st_size
        # The name is a hash of the images in the file, so no other process writes the same name.
        name = hashlib.sha256("".join(sorted(self._digests)).encode()).hexdigest()[:16]
        replace_file(self._partial, self._folder / SHARDS.replace("*", name))
        self._digests, self._tensors, self._size = [], {}, 0


__all__ = ["EncodedPictures", "VisionFeatures", "encode_pictures"]
