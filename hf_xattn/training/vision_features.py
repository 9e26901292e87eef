"""Reads what a frozen vision tower has returned for the pictures of a data set, so that it need not run in every epoch.

`hf-xattn encode --features` has written these outputs, the input of the connector, to safetensors files (shards). A
picture is found by the SHA-256 of its file, so training neither decodes it nor runs the image processor.

Each shard carries the identity of the tower (configuration, weights and their dtype) and of the image processor.
Features of another tower have the right shape, but they are noise for this model, so they are refused.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit
from urllib.request import url2pathname

import torch
from safetensors import SafetensorError, safe_open

from ..checkpoints.model_identity import tower_identity
from ..processing.samples import lay_out
from ..processing_xattn import TILE_INPUTS, XAttnProcessor
from ..utils.checkpoint_files import check_path, sha256_of
from ..utils.tensor_checks import type_name
from .freezing import body_of


FORMAT = "hf_xattn vision features 1"
SHARDS = "features-*.safetensors"  # a file that is being written has another name


class Maker(NamedTuple):
    """What the features of a folder depend on, besides the pictures."""

    tower: str  # its identity
    image_processor: str  # its identity
    dtype: str  # of the tower


def tower_of(model: Any) -> Any:
    """Returns the vision tower of a model. Raises a `ValueError` for a model without one, or with a sharded one."""
    body = body_of(model)
    if body.vision_tower is None:
        raise ValueError("Expected `model` to have a vision tower, got one without (`config.vision_config` is None).")
    if any(hasattr(weight, "_local_tensor") for weight in body.vision_tower.parameters()):
        raise ValueError(
            "Expected `model` to hold the whole vision tower, got one whose weights are sharded over processes. Do "
            "this before the model is sharded."
        )
    return body.vision_tower


def image_processor_identity(processor: XAttnProcessor) -> str:
    """Returns the SHA-256 of the class and the settings of an image processor."""
    images: Any = processor.image_processor
    dropped = ("image_processor_type", "processor_class", "auto_map")
    settings = {
        name: value
        for name, value in json.loads(images.to_json_string()).items()
        if value is not None and name not in dropped and not name.startswith("_")
    }
    facts = f"{type(images).__name__} {json.dumps(settings, sort_keys=True)}"
    return hashlib.sha256(facts.encode()).hexdigest()


def maker_of(model: Any, processor: XAttnProcessor) -> Maker:
    """Returns what the features of a model and a processor depend on. Reads all weights of the tower."""
    tower = tower_of(model)
    return Maker(tower_identity(model.config, tower), image_processor_identity(processor), str(tower.dtype))


class Shard(NamedTuple):
    """The header of a file."""

    maker: Maker
    digests: list[str]  # SHA-256 of the pictures
    tiled: bool  # whether the pictures were cut into tiles. Then aspect ratios stand beside the features


def read_shard(path: Path) -> Shard | None:
    """Returns the header of a shard; None for a file that is damaged or no shard."""
    try:
        with safe_open(str(path), framework="pt") as file:
            metadata, names = file.metadata() or {}, list(file.keys())
    except (SafetensorError, OSError):
        return None
    if metadata.get("format") != FORMAT:
        return None
    maker = Maker(*(metadata.get(field, "") for field in Maker._fields))
    digests = [name for name in names if "." not in name]
    return Shard(maker, digests, len(digests) < len(names))


class VisionFeatures:
    """What a frozen vision tower has returned for the pictures of a data set: a folder of `hf-xattn encode --features`.

    `XAttnDataCollator(processor, features=VisionFeatures(folder, model))` makes batches with `vision_features` in place
    of `pixel_values`. The rows name their pictures by path.

    The weights are compared here, once. Make a new object after the tower was trained. In training mode, the model
    refuses `vision_features` as long as its tower has trainable weights.

    Args:
        folder (`str` or `Path`): the folder.
        model ([`XAttnForConditionalGeneration`] or [`XAttnModel`]): the model to train, before it is sharded.

    Raises:
        TypeError: for a folder that is no path, or a model without blocks.
        ValueError: for a folder without features, with damaged files, or whose features another tower has made: another
            configuration, other weights or another dtype.
    """

    def __init__(self, folder: str | Path, model: Any):
        tower_of(model)  # the model is checked before the folder is read
        self._read(folder)
        self.check_tower(model)

    @classmethod
    def before_weights(cls, folder: str | Path) -> VisionFeatures:
        """Opens a folder before the model is loaded. [`check_tower`] must follow."""
        features = cls.__new__(cls)
        features._read(folder)
        return features

    def _read(self, folder: str | Path) -> None:
        check_path("folder", folder)
        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise ValueError(
                f"Expected `folder` to be a folder with vision features, got {folder}, which is no folder."
            )
        self._shards: dict[str, Path] = {}
        self._files: dict[Path, Any] = {}
        self._digests: dict[str, tuple[tuple[int, int], str]] = {}
        makers: dict[Maker, Path] = {}
        for path in sorted(self.folder.glob(SHARDS)):
            shard = read_shard(path)
            if shard is None:
                raise ValueError(f"{path} is damaged. Run `hf-xattn encode --features` again, which writes it anew.")
            makers[shard.maker] = path
            self._shards.update(dict.fromkeys(shard.digests, path))
            self._tiled = shard.tiled
        if not makers:
            raise ValueError(
                f"Expected `folder` to hold vision features, got {folder}, which holds none. `hf-xattn encode "
                "--features` writes them."
            )
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
                f"{self.folder}, got one in {tower.dtype}. Load the model in this dtype, or encode the pictures again, "
                "into a new folder."
            )
        raise ValueError(
            f"Expected `model` with the vision tower that has made the features in {self.folder}, got another tower, "
            f"or other weights: the identity of its tower is {identity[:12]}, that of the features is "
            f"{self.maker.tower[:12]}. Encode the pictures again, into a new folder."
        )

    def reader(self, processor: XAttnProcessor) -> XAttnProcessor:
        """Returns a copy of a processor that looks images up here. Refuses another image processor."""
        if image_processor_identity(processor) != self.maker.image_processor:
            raise ValueError(
                f"Expected `processor` with the image processor that has made the features in {self.folder}, got "
                "another one, or other settings. Encode the pictures again, into a new folder."
            )
        reader = copy.copy(processor)
        reader._look_up = self._look_up
        return reader

    def __len__(self) -> int:
        """Number of different pictures."""
        return len(self._shards)

    def __repr__(self) -> str:
        return f"VisionFeatures({str(self.folder)!r}, {len(self)} pictures)"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_files": {}}  # each process opens its own

    def _look_up(self, samples: list[list[Any]]) -> dict[str, torch.Tensor]:
        """The features of the images of each text, as the model takes them."""
        digests = [self._digest_of(image) for sample in samples for image in sample]
        if not digests:
            return {}
        features = [self._features(digest) for digest in digests]
        tensors = {}
        if self._tiled:
            for name in TILE_INPUTS:
                tensors[name] = torch.stack([self._tensor(digest, name) for digest in digests])
            features = [_with_padding_tiles(each, mask) for each, mask in zip(features, tensors[TILE_INPUTS[1]])]
        shapes = {tuple(each.shape) for each in features}
        if len(shapes) > 1:
            raise ValueError(
                f"Expected features of the same shape for all images of a batch, got {sorted(shapes)}. Set `do_resize` "
                "or `size` of the image processor, and encode the pictures again."
            )
        return lay_out({"vision_features": torch.stack(features), **tensors}, samples)

    def _digest_of(self, image: Any) -> str:
        """The SHA-256 of a picture's file, which is read again only if it has changed."""
        if not isinstance(image, (str, Path)):
            raise TypeError(
                "Expected the images of the rows to be files, because `features` are found by the files' content, got "
                f"{type_name(image)}. Write paths into the rows."
            )
        text = str(image)
        path = Path(url2pathname(urlsplit(text).path)) if text.startswith("file://") else Path(image)
        if not os.path.isfile(path):  # unlike `Path.is_file`, this takes texts of any length
            raise ValueError(
                "Expected the images of the rows to be files, because `features` are found by the files' content, got "
                f"{text if len(text) <= 80 else text[:80] + '...'!r}, which is no file."
            )
        status = os.stat(path)
        state = (status.st_mtime_ns, status.st_size)
        known = self._digests.get(str(path))
        if known is None or known[0] != state:
            known = self._digests[str(path)] = (state, sha256_of(path))
        if known[1] not in self._shards:
            raise ValueError(
                f"{self.folder} holds no features of the picture {path}. Run `hf-xattn encode --features` again with "
                "the same `--output`: it adds the pictures that are missing."
            )
        return known[1]

    def _features(self, digest: str) -> torch.Tensor:
        """The tower's output for a picture: `(tokens, width)`, or `(tiles, tokens, width)`. Refuses anything else."""
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
            f"{self._shards[digest]} is damaged: expected {expected}, for the picture {digest[:12]}. Remove the file "
            "and run `hf-xattn encode --features` again, which writes it anew."
        )


def _with_padding_tiles(features: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """`(tiles, tokens, width)` of the real tiles to `(max_num_tiles, tokens, width)`. No text sees the others."""
    whole = features.new_zeros(mask.shape[0], *features.shape[1:])
    whole[mask != 0] = features
    return whole


__all__ = ["VisionFeatures"]
