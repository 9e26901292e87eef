"""Stores what a frozen vision tower returns for the images of a data set, so that every epoch reads it from files.

The stored features are in safetensors files, called shards. The SHA-256 of an image's file is the key of its features,
so training neither decodes the image nor runs the image processor.

Features of another vision tower often have the right shape, but they are noise for this model. Each shard therefore
holds the identity of its tower (configuration, weights, dtype) and of its image processor, and features of others are
refused.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch.utils.data import DataLoader
from tqdm.auto import tqdm

from ..checkpoints.model_identity import tower_identity
from ..data.loading import Rows
from ..data.pictures import digest_of, picture_of, picture_parts
from ..images.tower import run_tower
from ..parts.tiles import Tiles
from ..processing.samples import lay_out
from ..processing_xattn import TILE_INPUTS, XAttnProcessor
from ..utils.tensor_checks import type_name
from ..utils.whole_folder import replace_file
from .freezing import body_of


FORMAT = "hf_xattn vision features 1"
SHARDS = "features-*.safetensors"  # complete shards; a shard has another name while it is written
AGAIN = "Remove it, and run `hf-xattn encode-features` again, which encodes its images anew."


class Maker(NamedTuple):
    """What the features in a folder depend on besides the images: the tower, the image processor and the dtype.

    The tower and the image processor are given by hashes.
    """

    tower: str
    image_processor: str
    dtype: str


def tower_of(model: Any) -> Any:
    """Returns the vision tower of a model. Raises a `ValueError` for a model without one, or with a sharded one."""
    body = body_of(model)
    if body.vision_tower is None:
        raise ValueError("Expected `model` to have a vision tower, got one without (`config.vision_config` is None).")
    if any(hasattr(weight, "_local_tensor") for weight in body.vision_tower.parameters()):
        raise ValueError(
            "Expected `model` to hold the whole vision tower, got a sharded one. Do this before the model is sharded."
        )
    return body.vision_tower


def image_processor_identity(processor: XAttnProcessor) -> str:
    """Returns a hash of the class and the settings of the image processor."""
    images: Any = processor.image_processor
    dropped = ("image_processor_type", "processor_class", "auto_map")
    settings = {
        name: value
        for name, value in json.loads(images.to_json_string()).items()
        if value is not None and name not in dropped and not name.startswith("_")
    }
    facts = f"{type(images).__name__} {json.dumps(settings, sort_keys=True)}"
    return hashlib.sha256(facts.encode()).hexdigest()


class Shard(NamedTuple):
    maker: Maker
    digests: list[str]  # SHA-256 of the images
    tiled: bool  # whether the images were cut into tiles; the shard then holds their aspect ratios, too


def read_shard(path: Path) -> Shard:
    """Returns the header of a shard. Raises a `ValueError` if the file is damaged or is not a shard."""
    try:
        with safe_open(str(path), framework="pt") as file:
            metadata, names = file.metadata() or {}, list(file.keys())
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is damaged, or not a file of `hf-xattn encode-features`: {error}. {AGAIN}") from error
    if metadata.get("format") != FORMAT:
        raise ValueError(f"{path} is not a file of `hf-xattn encode-features`. Take it out of the folder.")
    maker = Maker(*(metadata.get(field, "") for field in Maker._fields))
    digests = [name for name in names if "." not in name]
    return Shard(maker, digests, len(digests) < len(names))


class VisionFeatures:
    """The stored outputs of a frozen vision tower for the images of a data set, from `hf-xattn encode-features`.

    `XAttnDataCollator(processor, features=VisionFeatures(folder, model))` makes batches with `vision_features` instead
    of `pixel_values`. The rows must name their images by path.

    The weights of the tower are compared only here, when the object is made. Make a new object after you have trained
    the tower. In training mode, the model refuses `vision_features` while its tower has trainable weights.

    Args:
        folder (`str` or `Path`): the folder that `hf-xattn encode-features` has written.
        model ([`XAttnForConditionalGeneration`] or [`XAttnModel`]): the model to train, before it is sharded.

    Raises:
        TypeError: for a model without blocks.
        ValueError: for a folder without features or with damaged files, and for features of a tower with another
            configuration, other weights or another dtype.

    Example:

    ```python
    >>> import hf_xattn
    >>> from transformers import AutoModelForImageTextToText, AutoProcessor

    >>> hf_xattn.main(["encode-features", "seeing", "--data", "pictures", "--output", "features"])
    2 picture(s) encoded, 0 known, ... bytes: features
    0
    >>> model = AutoModelForImageTextToText.from_pretrained("seeing")
    >>> features = hf_xattn.VisionFeatures("features", model)
    >>> collator = hf_xattn.XAttnDataCollator(AutoProcessor.from_pretrained("seeing"), features=features)
    >>> "vision_features" in collator([hf_xattn.load_rows("pictures")[0]])
    True
    ```
    """

    def __init__(self, folder: str | Path, model: Any):
        tower_of(model)  # the model is checked before the folder is read
        self._read(folder)
        self.check_tower(model)

    @classmethod
    def before_weights(cls, folder: str | Path) -> VisionFeatures:
        """Opens a folder before the model is loaded. Call [`check_tower`] when the model is there."""
        features = cls.__new__(cls)
        features._read(folder)
        return features

    def _read(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise ValueError(f"Expected `folder` to be a folder with vision features, got {folder}, which is none.")
        self._shards: dict[str, Path] = {}
        self._files: dict[Path, Any] = {}
        makers: dict[Maker, Path] = {}
        for path in sorted(self.folder.glob(SHARDS)):
            shard = read_shard(path)
            makers[shard.maker] = path
            self._shards.update(dict.fromkeys(shard.digests, path))
            self._tiled = shard.tiled
        if not makers:
            told = "which holds none. `hf-xattn encode-features` writes them."
            raise ValueError(f"Expected `folder` to hold vision features, got {folder}, {told}")
        if len(makers) > 1:
            raise ValueError(
                f"Expected {folder} to hold features of one vision tower and one image processor, got several: of "
                f"{', '.join(path.name for path in makers.values())}. Remove the files of the others."
            )
        self.maker = next(iter(makers))

    def check_tower(self, model: Any) -> None:
        """Raises a `ValueError` if another vision tower has made these features. Reads all weights of the tower."""
        tower = tower_of(model)
        identity = tower_identity(model.config, tower)
        if identity == self.maker.tower:
            return
        if str(tower.dtype) != self.maker.dtype:
            raise ValueError(
                f"Expected `model` with a vision tower in {self.maker.dtype}, which has made the features in "
                f"{self.folder}, got one in {tower.dtype}. Load it in this dtype, or encode the images anew."
            )
        raise ValueError(
            f"Expected `model` with the vision tower that has made the features in {self.folder}, got another tower, "
            f"or other weights: {identity[:12]}, not {self.maker.tower[:12]}. Encode the images into a new folder."
        )

    def reader(self, processor: XAttnProcessor) -> XAttnProcessor:
        """Returns a copy of a processor that looks up stored features instead of preparing images.

        Raises a `ValueError` if the features were made with another image processor.
        """
        if image_processor_identity(processor) != self.maker.image_processor:
            raise ValueError(
                f"Expected `processor` with the image processor that has made the features in {self.folder}, got "
                "another one, or other settings. Encode the images into a new folder."
            )
        reader = copy.copy(processor)
        reader._look_up = self._look_up
        return reader

    def digests(self) -> Iterable[str]:
        """Returns the SHA-256 of the file of each image."""
        return self._shards.keys()

    def __len__(self) -> int:
        """Number of different images."""
        return len(self._shards)

    def __repr__(self) -> str:
        return f"VisionFeatures({str(self.folder)!r}, {len(self)} images)"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_files": {}}  # each process opens the files itself

    def _look_up(self, samples: list[list[Any]]) -> dict[str, torch.Tensor]:
        """Returns the features of the images of each text, in the layout that the model takes."""
        digests = [self._digest_of(image) for sample in samples for image in sample]
        if not digests:
            return {}
        features = [self._features(digest) for digest in digests]
        tensors = {}
        if self._tiled:
            for name in TILE_INPUTS:
                tensors[name] = torch.stack([self._tensor(digest, name) for digest in digests])
            masks = tensors[TILE_INPUTS[1]]
            whole = [each.new_zeros(mask.shape[0], *each.shape[1:]) for each, mask in zip(features, masks)]
            for tiles, each, mask in zip(whole, features, masks):  # padding tiles stay zero: no text sees them
                tiles[mask != 0] = each
            features = whole
        shapes = {tuple(each.shape) for each in features}
        if len(shapes) > 1:
            raise ValueError(
                f"Expected features of the same shape for all images of a batch, got {sorted(shapes)}. Set `do_resize` "
                "or `size` of the image processor, and encode the images again."
            )
        return lay_out({"vision_features": torch.stack(features), **tensors}, samples)

    def _digest_of(self, image: Any) -> str:
        """The SHA-256 of an image's file."""
        shown = "in the row" if isinstance(image, bytes) else f"{image!s:.500}"  # a longer text is an image in base64
        try:
            digest = digest_of(image)
        except (OSError, TypeError, ValueError) as error:
            raise ValueError(
                f"Expected the images of the rows to be files, because `features` are found by the files' content, got "
                f"{type_name(image)} {shown!r}: {error!s:.80}"
            ) from error
        if digest not in self._shards:
            raise ValueError(
                f"{self.folder} holds no features of the image {shown}. Run `hf-xattn encode-features` again with "
                "the same `--output`: it adds the images that are missing."
            )
        return digest

    def _features(self, digest: str) -> torch.Tensor:
        """Returns the tower's output for an image: `(tokens, width)`, or `(tiles, tokens, width)` with tiles.

        Raises a `ValueError` if the stored tensor has other axes, another dtype, or NaN or infinite values.
        """
        features, axes = self._tensor(digest), 3 if self._tiled else 2
        if features.ndim != axes or not features.numel() or str(features.dtype) != self.maker.dtype:
            raise self._damaged(
                digest,
                f"features of {axes} axes in {self.maker.dtype}, got {features.dtype} of shape {tuple(features.shape)}",
            )
        if not bool(torch.isfinite(features).all()):
            raise self._damaged(digest, "finite features, got NaN or infinite values")
        return features

    def _tensor(self, digest: str, name: str | None = None) -> torch.Tensor:
        path = self._shards[digest]
        try:
            if path not in self._files:
                self._files[path] = safe_open(str(path), framework="pt")
            return self._files[path].get_tensor(digest if name is None else f"{digest}.{name}")
        except (SafetensorError, OSError) as error:
            raise self._damaged(digest, f"a tensor that can be read ({error})") from error

    def _damaged(self, digest: str, expected: str) -> ValueError:
        return ValueError(
            f"{self._shards[digest]} is damaged: expected {expected}, for the image {digest[:12]}. {AGAIN}"
        )


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
    model: Any,
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

    All processes read the same rows, and each encodes its share of the images. A call that was stopped can be repeated:
    it continues with the images that no complete file of the folder holds.

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
    loader: Any = DataLoader(
        range(len(rows)),  # type: ignore[arg-type]  # a range is a data set too
        batch_size=batch_size,
        num_workers=workers,
        collate_fn=_PictureReader(processor, rows, held, batch_size, rank, world_size),
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
    """Reads the images of a batch of rows, if they have no features yet and belong to the share of this process."""

    def __init__(self, processor: XAttnProcessor, rows: Rows, held: set[str], size: int, rank: int, world_size: int):
        self.processor, self.rows, self.held, self.size = processor, rows, held, size
        self.rank, self.world_size = rank, world_size
        self._read = set[str]()  # images that this worker has read

    def __call__(self, indices: list[int]) -> _Batch:
        batch = _Batch([], set(), {})
        pictures: dict[str, Any] = {}
        for index in indices:
            try:
                own = [each for each in map(picture_of, picture_parts(self.rows.read(index))) if self._is_own(each)]
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

    def _is_own(self, picture: Any) -> bool:
        """Whether this process encodes an image. The image's name decides, so that no file is read for this."""
        if self.world_size == 1:
            return True
        name = picture if isinstance(picture, bytes) else str(picture).encode()
        return int.from_bytes(hashlib.sha256(name).digest()[:8], "big") % self.world_size == self.rank

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


def tower_output(body: Any, inputs: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, Tiles | None]:
    """Returns the output of the tower of an [`XAttnModel`] for images, and their tiles.

    The tower does not run if the inputs hold `vision_features`, which are its stored outputs.

    Args:
        inputs (`dict`): image inputs of the processor, each `(images, 1, ...)`.

    Returns:
        The output `(images, tokens, width)`, or `(images, 1, tiles, tokens, width)` with tiles. The tiles are None if
        the tower has none.
    """
    inputs = {name: value.to(body.vision_tower.device) for name, value in inputs.items()}
    tiles = Tiles(*(inputs[name] for name in TILE_INPUTS)) if TILE_INPUTS[0] in inputs else None
    if "vision_features" in inputs:  # `VisionFeatures.reader` has looked them up
        output = inputs["vision_features"]
        return (output[:, 0] if tiles is None else output), tiles
    output = run_tower(body.vision_tower, inputs["pixel_values"], tiles, body.config.vision_feature_layer)[0]
    if tiles is None and output.dim() == 4:  # convolutional towers: (images, channels, height, width)
        output = output.flatten(2).transpose(1, 2)
    return output, tiles


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
