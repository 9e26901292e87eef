"""What a frozen vision tower has returned for the images of a data set, so that every epoch reads it from files.

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
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from ..checkpoints.model_identity import tower_identity
from ..data.pictures import digest_of
from ..images.tower import run_tower
from ..modeling_xattn import XAttnForConditionalGeneration, XAttnModel
from ..parts.tiles import Tiles
from ..processing.samples import lay_out
from ..processing_xattn import TILE_INPUTS, XAttnProcessor
from ..utils.tensor_checks import type_name
from .freezing import body_of


if TYPE_CHECKING:
    from transformers import PreTrainedModel

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


def tower_of(model: XAttnModel | XAttnForConditionalGeneration) -> PreTrainedModel:
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


def read_shard(path: Path) -> tuple[Maker, list[str]]:
    """Returns who has made a shard, and the names of its tensors.

    The name of an image's features is the SHA-256 of its file. Images that were cut into tiles also have tensors with a
    longer name, such as their aspect ratio.

    Raises a `ValueError` if the file is damaged or is not a shard.
    """
    try:
        with safe_open(str(path), framework="pt") as file:
            metadata, names = file.metadata() or {}, list(file.keys())
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is damaged, or not a file of `hf-xattn encode-features`: {error}. {AGAIN}") from error
    if metadata.get("format") != FORMAT:
        raise ValueError(f"{path} is not a file of `hf-xattn encode-features`. Take it out of the folder.")
    return Maker(*(metadata.get(field, "") for field in Maker._fields)), names


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
    2 image(s) encoded, 0 known, ... bytes: features
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
        self._shards: dict[str, Path] = {}
        self._files: dict[Path, Any] = {}
        makers: dict[Maker, Path] = {}
        for path in sorted(self.folder.glob(SHARDS)):
            maker, names = read_shard(path)
            makers[maker] = path
            self._shards.update((name, path) for name in names if "." not in name)
            self._tiled = any("." in name for name in names)
        if not makers:
            raise ValueError(
                f"Expected {folder} to be a folder with vision features, got none there. `hf-xattn encode-features` "
                "writes them."
            )
        if len(makers) > 1:
            raise ValueError(
                f"Expected {folder} to hold features of one vision tower and one image processor, got several: of "
                f"{', '.join(path.name for path in makers.values())}. Remove the files of the others."
            )
        self.maker = next(iter(makers))

    def check_tower(self, model: XAttnModel | XAttnForConditionalGeneration) -> None:
        """Raises a `ValueError` if another vision tower has made these features. Reads all weights of the tower."""
        tower = tower_of(model)
        identity = tower_identity(model.config, tower)
        if identity != self.maker.tower:
            raise ValueError(
                f"Expected `model` with the vision tower that has made the features in {self.folder}, in "
                f"{self.maker.dtype}, got another tower, other weights or another dtype ({tower.dtype}): "
                f"{identity[:12]}, not {self.maker.tower[:12]}. Load it in this dtype, or encode the images into a new "
                "folder."
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


def tower_output(body: XAttnModel, inputs: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, Tiles | None]:
    """Returns the output of the tower of an [`XAttnModel`] for images, and their tiles.

    The tower does not run if the inputs hold `vision_features`, which are its stored outputs.

    Args:
        inputs (`dict`): image inputs of the processor, each `(images, 1, ...)`.

    Returns:
        The output `(images, tokens, width)`, or `(images, 1, tiles, tokens, width)` with tiles. The tiles are None if
        the tower has none.
    """
    tower = body.vision_tower
    assert tower is not None
    inputs = {name: value.to(tower.device) for name, value in inputs.items()}
    tiles = Tiles(*(inputs[name] for name in TILE_INPUTS)) if TILE_INPUTS[0] in inputs else None
    if "vision_features" in inputs:  # `VisionFeatures.reader` has looked them up
        output = inputs["vision_features"]
        return (output[:, 0] if tiles is None else output), tiles
    output = run_tower(tower, inputs["pixel_values"], tiles, body.config.vision_feature_layer)[0]
    if tiles is None and output.dim() == 4:  # convolutional towers: (images, channels, height, width)
        output = output.flatten(2).transpose(1, 2)
    return output, tiles
