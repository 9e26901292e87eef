"""Runs a vision tower once over pictures, and writes its outputs to a folder that [`VisionFeatures`] reads.

Each of several processes takes its share of the pictures and writes files of its own. A file gets its name when it is
complete. So a run, also with another number of processes, encodes the pictures that no complete file holds.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch.utils.data import DataLoader
from tqdm.auto import tqdm

from ..images.vision import Tiles, run_tower
from ..processing_xattn import TILE_INPUTS, XAttnProcessor
from ..utils.whole_folder import replace_file
from .vision_features import FORMAT, SHARDS, Maker, maker_of, read_shard, tower_of


PARTIAL = "rank-{:05d}.partial"  # the file that a process is writing
SHARD_BYTES = 2**28

# Groups of pictures with the model's inputs; the pictures that cannot be read, with the reasons.
_Batch = tuple[list[tuple[list[str], dict[str, torch.Tensor]]], dict[str, str]]


class EncodedPictures(NamedTuple):
    """What one process has done with its share of the pictures."""

    new: int  # pictures that were encoded
    known: int  # pictures whose features the folder held already
    nbytes: int  # of the files that were written
    problems: dict[str, str]  # pictures that cannot be read, by the SHA-256 of the file, each with the reason


@torch.no_grad()
def encode_pictures(
    model: Any,
    processor: XAttnProcessor,
    pictures: Mapping[str, Path],
    folder: str | Path,
    *,
    batch_size: int = 8,
    workers: int = 0,
    shard_bytes: int = SHARD_BYTES,
    rank: int = 0,
    world_size: int = 1,
) -> EncodedPictures:
    """Writes the vision tower's outputs for the pictures that a folder does not hold yet.

    `pictures` are those of `training_data.pictures_by_content`, the same in all processes (`world_size`), which share
    them. Each process has `workers` that read pictures. A file is complete when it has `shard_bytes`.

    Raises:
        TypeError: for a model without blocks.
        ValueError: for a model without a vision tower, or a folder with other files or with features of another tower.
    """
    folder, tower = Path(folder), tower_of(model)
    maker = maker_of(model, processor)
    known = _known(folder, maker)
    folder.mkdir(parents=True, exist_ok=True)
    share = sorted(pictures)[rank::world_size]
    missing = [digest for digest in share if digest not in known]
    writer = _Writer(folder, maker, rank, shard_bytes)
    problems: dict[str, str] = {}
    loader: Any = DataLoader(
        missing,  # type: ignore[arg-type]  # a list is a data set too
        batch_size=batch_size,
        num_workers=workers,
        collate_fn=functools.partial(_read, processor, {digest: pictures[digest] for digest in missing}),
    )
    was_training = tower.training
    tower.eval()
    try:
        for groups, unreadable in tqdm(loader, desc="Encoding", disable=rank > 0, leave=False):
            problems.update(unreadable)
            for digests, inputs in groups:
                for digest, tensors in zip(digests, _outputs(tower, inputs)):
                    writer.add(digest, tensors)
        writer.close()
    finally:
        tower.train(was_training)
    new = len(missing) - len(problems)
    return EncodedPictures(new, len(share) - len(missing), writer.nbytes, problems)


def _known(folder: Path, maker: Maker) -> set[str]:
    """Returns the pictures whose features a folder holds. Removes damaged files."""
    known: set[str] = set()
    if not folder.exists():
        return known
    others = [path.name for path in folder.iterdir() if not path.match(SHARDS) and not path.match("rank-*.partial")]
    if others:
        raise ValueError(
            f"Expected {folder} to be new, empty, or a folder of vision features, got {sorted(others)[:3]} in it."
        )
    for path in sorted(folder.glob(SHARDS)):
        shard = read_shard(path)
        if shard is None:
            path.unlink(missing_ok=True)
            continue
        for field, ours in maker._asdict().items():
            theirs = getattr(shard.maker, field)
            if ours != theirs:
                what = "vision tower" if field == "tower" else field.replace("_", " ")
                raise ValueError(
                    f"Expected {folder} to hold features of this model, got features of another {what} in {path.name}: "
                    f"{theirs[:12]} instead of {ours[:12]}. Choose a new folder."
                )
        known.update(shard.digests)
    return known


def _read(processor: XAttnProcessor, pictures: Mapping[str, Path], digests: list[str]) -> _Batch:
    """Reads a batch of pictures: one group if all have the same size, otherwise a group for each."""
    try:
        return [(digests, dict(processor(images=[[pictures[digest]] for digest in digests])))], {}
    except (OSError, TypeError, ValueError) as error:
        if len(digests) == 1:
            return [], {digests[0]: str(error)}
    groups, problems = [], {}
    for digest in digests:
        group, unreadable = _read(processor, pictures, [digest])
        groups.extend(group)
        problems.update(unreadable)
    return groups, problems


def _outputs(tower: Any, inputs: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """What the tower returns for each picture of `(pictures, 1, ...)`, by the end of its name in a file."""
    inputs = {name: value.to(tower.device) for name, value in inputs.items()}
    tiles = Tiles(*(inputs[name] for name in TILE_INPUTS)) if TILE_INPUTS[0] in inputs else None
    output = run_tower(tower, inputs["pixel_values"], tiles).last_hidden_state
    assert output is not None
    if tiles is None:
        return [{"": _owned(each)} for each in output]
    outputs = []
    for features, ids, mask in zip(output[:, 0], tiles.aspect_ratio_ids[:, 0], tiles.aspect_ratio_mask[:, 0]):
        real = features[mask != 0]  # no text sees padding tiles
        named = {"": real, f".{TILE_INPUTS[0]}": ids, f".{TILE_INPUTS[1]}": mask}
        outputs.append({end: _owned(tensor) for end, tensor in named.items()})
    return outputs


def _owned(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to("cpu", copy=True, memory_format=torch.contiguous_format)


class _Writer:
    """Writes features to files of about `shard_bytes`."""

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
        """Writes the rest, and removes what a killed run has left of its last file."""
        if self._digests:
            self._write()
        self._partial.unlink(missing_ok=True)

    def _write(self) -> None:
        save_file(self._tensors, str(self._partial), self._metadata)
        self.nbytes += self._partial.stat().st_size
        # The pictures decide the name: no other process has the same.
        name = hashlib.sha256("".join(sorted(self._digests)).encode()).hexdigest()[:16]
        replace_file(self._partial, self._folder / SHARDS.replace("*", name))
        self._digests, self._tensors, self._size = [], {}, 0


__all__ = ["EncodedPictures", "encode_pictures"]
