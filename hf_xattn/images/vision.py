"""Calls a vision tower and interprets its output.

Most towers take whole images. Mllama's tower takes tiles: a large image is cut into up to `max_num_tiles` squares, and
their arrangement (the aspect ratio) is another argument. An image with fewer tiles is padded, and no text may see the
tokens of padding tiles.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from transformers import AutoModel, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput
from transformers.utils import ModelOutput

from ..utils.architectures import TILED_VISION_TYPES, layers_width
from ..utils.custom_code import build_part
from ..utils.tensor_checks import check_floating, check_integers, has_values, type_name
from ..utils.towers import CHANNELS_LAST, ONE_ROW, own_class
from .tower import PASS_ITS_BASE, check_tower_config, image_size_of, no_hidden_state, only_image_size, takes_keyword


UNSIZED = 224  # pixels of a side of a blank image, where the configuration says no size


class UnusableOutput(ValueError):
    """A vision model returns nothing that could be features of each picture."""


class Tiles(NamedTuple):
    """What a tiled tower needs in addition to the pixels."""

    aspect_ratio_ids: torch.Tensor  # (batch, num_images), 0 = no image
    aspect_ratio_mask: torch.Tensor  # (batch, num_images, max_num_tiles), 1 = a tile, 0 = padding


def build_tower(config: PreTrainedConfig) -> PreTrainedModel:
    """Builds a vision tower with random weights. Raises a `ValueError` for a model that is not a vision tower."""
    check_tower_config("vision_config", config)
    own = own_class(config)
    return build_part(AutoModel, config) if own is None else own._from_config(config)


def is_tiled(config: PreTrainedConfig) -> bool:
    """Whether a vision tower takes tiles."""
    return config.model_type in TILED_VISION_TYPES


def check_pixels(
    config: PreTrainedConfig,
    pixel_values: torch.Tensor,
    aspect_ratio_ids: torch.Tensor | None,
    aspect_ratio_mask: torch.Tensor | None,
) -> tuple[torch.Tensor, Tiles | None]:
    """Returns the pixels with the images on axis 1, and the tiles.

    Raises:
        TypeError: for pixels that are not floating point.
        ValueError: for a wrong rank or size, or for aspect ratios that the tower does not take, or that are missing.
    """
    shape = tuple(pixel_values.shape)
    check_floating("pixel_values", pixel_values, remedy=": run the image processor first")
    if is_tiled(config):
        _check_pixels_of_tiles(config, pixel_values)
    tiles = _check_tiles(config, "pixel_values", shape, aspect_ratio_ids, aspect_ratio_mask)
    if tiles is None:
        if pixel_values.dim() == 4:
            pixel_values = pixel_values[:, None]
        if pixel_values.dim() != 5:
            raise ValueError(
                "Expected `pixel_values` of shape (batch, num_images, channels, height, width) or (batch, channels, "
                f"height, width), got {shape}."
            )
    channels = getattr(config, "num_channels", None)
    if channels is not None and pixel_values.shape[-3] != channels:
        raise ValueError(
            f"Expected `pixel_values` with {channels} channels, got {pixel_values.shape[-3]} channels (shape {shape})."
        )
    if 0 in shape:
        raise ValueError(f"Expected `pixel_values` with at least one image, got no image: the shape is {shape}.")
    return pixel_values, tiles


def check_features(
    config: PreTrainedConfig,
    width: int,
    vision_features: torch.Tensor,
    aspect_ratio_ids: torch.Tensor | None,
    aspect_ratio_mask: torch.Tensor | None,
) -> tuple[torch.Tensor, Tiles | None]:
    """[`check_pixels`] for a tower's features, which have a width instead of a size."""
    check_floating("vision_features", vision_features)
    shape = tuple(vision_features.shape)
    if is_tiled(config):
        tiles = getattr(config, "max_num_tiles", None)
        fits = len(shape) == 5 and shape[2] == tiles and shape[-1] == width
        expected = f"(batch, num_images, max_num_tiles={tiles}, tokens, width={width})"
    else:
        if len(shape) == 3:
            vision_features = vision_features[:, None]
        fits = (len(shape) in (3, 4) and shape[-1] == width) or (len(shape) == 5 and shape[2] == width)
        expected = f"(batch, num_images, tokens, width={width}) or (batch, tokens, width={width})"
        expected += f", or (batch, num_images, width={width}, height, width) of a convolutional tower"
    if not fits:
        raise ValueError(
            f"Expected `vision_features` of shape {expected}, the `last_hidden_state` of the vision tower, got {shape}."
        )
    if 0 in shape:
        raise ValueError(f"Expected `vision_features` with at least one image, got no image: the shape is {shape}.")
    return vision_features, _check_tiles(config, "vision_features", shape, aspect_ratio_ids, aspect_ratio_mask)


def _check_pixels_of_tiles(config: Any, pixel_values: torch.Tensor) -> None:
    shape, tiles = tuple(pixel_values.shape), config.max_num_tiles
    if pixel_values.dim() != 6 or pixel_values.shape[2] != tiles:
        raise ValueError(
            f"Expected `pixel_values` of shape (batch, num_images, max_num_tiles={tiles}, channels, height, width) for "
            f"a {config.model_type}, got {shape}. The image processor of the checkpoint makes such pixels."
        )
    if (size := image_size_of(config)) != shape[-2:]:
        raise ValueError(
            f"Expected `pixel_values` with tiles of {size} (height, width) for a {config.model_type}, got shape "
            f"{shape}."
        )


def _check_tiles(
    config: PreTrainedConfig,
    images: str,
    shape: tuple[int, ...],
    aspect_ratio_ids: torch.Tensor | None,
    aspect_ratio_mask: torch.Tensor | None,
) -> Tiles | None:
    """Checks the aspect ratios of the argument `images` of this shape. Returns None for a tower without tiles."""
    if not is_tiled(config):
        for name, value in (("aspect_ratio_ids", aspect_ratio_ids), ("aspect_ratio_mask", aspect_ratio_mask)):
            if value is not None:
                raise ValueError(
                    f"Expected no `{name}`, because the vision tower ({config.model_type}) takes no tiles."
                )
        return None
    for name, value, expected in (
        ("aspect_ratio_ids", aspect_ratio_ids, shape[:2]),
        ("aspect_ratio_mask", aspect_ratio_mask, shape[:3]),
    ):
        if value is None:
            raise ValueError(f"`{name}` is required with `{images}`, because the vision tower takes tiles, got None.")
        if tuple(value.shape) != expected:
            raise ValueError(f"Expected `{name}` of shape {expected}, got {tuple(value.shape)}.")
    assert aspect_ratio_ids is not None and aspect_ratio_mask is not None
    check_integers("aspect_ratio_ids", aspect_ratio_ids)
    return Tiles(aspect_ratio_ids, aspect_ratio_mask)


def run_tower(
    tower: PreTrainedModel,
    pixel_values: torch.Tensor,
    tiles: Tiles | None,
    layers: int | list[int] | None = None,
    **returns: bool | None,
) -> BaseModelOutput:
    """Runs a tower on `(R, num_images, ...)` pixels.

    The `last_hidden_state` of towers without tiles has `R * num_images` rows, and the channels of a map of features on
    axis 1, also where the tower's own does not.

    Args:
        layers (`int` or `list[int]`, *optional*): `vision_feature_layer`, see [`XAttnConfig`]: the output has their
            hidden states, joined, as its `last_hidden_state`.
        returns: `output_hidden_states`, `output_attentions`. None: as in the tower's configuration.

    Raises:
        ValueError: for images of a size that the tower does not support, or an output without `last_hidden_state` or
            with another number of rows.
    """
    asked = {name: value for name, value in returns.items() if value is not None}
    if not tower.config.return_dict:
        asked["return_dict"] = True
    taken = {name: value for name, value in asked.items() if takes_keyword(type(tower), name)}
    if layers is not None:
        if torch.compiler.is_compiling() or takes_keyword(type(tower), "output_hidden_states"):
            taken["output_hidden_states"] = True
        output = _read_whole_images(tower, pixel_values, taken)
        keeps_states = bool(asked.get("output_hidden_states", tower.config.output_hidden_states))
        output = _with_features_of(layers, output, layers_width(tower.config), keeps_states)
        return _by_image(tower, output, pixel_values)
    if tiles is None:
        return _by_image(tower, _read_whole_images(tower, pixel_values, taken), pixel_values)
    output = tower(pixel_values=pixel_values.to(tower.dtype), **tiles._asdict(), **taken)
    # transformers records no layers of this tower: older releases return its last hidden state in their place.
    return BaseModelOutput(last_hidden_state=output.last_hidden_state)


def _with_features_of(
    layers: int | list[int], output: BaseModelOutput, width: int | None, keeps_states: bool
) -> BaseModelOutput:
    """Puts the hidden states of layers of a tower in the place of its last one."""
    states, last = getattr(output, "hidden_states", None), output.last_hidden_state
    assert last is not None
    expected = "Expected `vision_feature_layer` with a vision tower that returns `hidden_states`"
    if not states:
        raise ValueError(f"{expected}, got {layers!r} with one that does not. Leave it out.")
    chosen = [states[each] for each in ([layers] if isinstance(layers, int) else layers)]
    shapes = [tuple(each.shape) for each in chosen]
    if len(set(shapes)) > 1 or len(shapes[0]) != 3 or shapes[0][-1] != width:
        raise ValueError(f"{expected} (images, tokens, width={width}), got {layers!r}, whose shapes are {shapes}.")
    features = torch.cat(chosen, dim=-1)
    if last.requires_grad:  # DDP waits for the gradient of every weight that learns, also of those behind these layers
        features = features + last.flatten()[:0].sum().to(features.dtype)
    output.last_hidden_state = features
    if not keeps_states:
        output.hidden_states = None
    return output


def connect(
    connector: torch.nn.Module,
    features: torch.Tensor,
    images: tuple[int, int],
    tiled: bool,
    drop_first: bool = False,
    positions: torch.Tensor | None = None,
    real_tiles: torch.Tensor | None = None,
) -> torch.Tensor:
    """Maps a tower's `last_hidden_state` to `(R, num_images, tokens of an image, context_size)`.

    Args:
        images (`tuple[int, int]`): R and num_images.
        drop_first (`bool`): drop the tower's first token, the class token.
        positions (`torch.LongTensor`, *optional*): `(R, num_images)`, see [`XAttnConnector`].
        real_tiles (`torch.LongTensor`, *optional*): numbers of the tiles that pass the connector, among those of all
            images; the others give zeros. None: all of them.
    """
    if tiled and real_tiles is not None:
        of_tiles = {}
        if positions is not None:
            of_tiles = {"positions": positions.flatten().repeat_interleave(features.shape[2])[real_tiles]}
        connected = connector(features.flatten(0, 2)[real_tiles], **of_tiles)
        padded = connected.new_zeros(features.shape[:3].numel(), *connected.shape[1:])
        padded[real_tiles] = connected
        return padded.unflatten(0, features.shape[:3]).flatten(2, 3)
    places = {} if positions is None else {"positions": positions if tiled else positions.flatten()}
    if tiled:
        return connector(features, **places).flatten(2, 3)  # the tokens of one tile stay together
    if features.dim() == 4:  # convolutional towers: (batch, channels, height, width)
        features = features.flatten(2).transpose(1, 2)
    return connector(features[:, 1:] if drop_first else features, **places).unflatten(0, images)


def _read_whole_images(tower: PreTrainedModel, pixel_values: torch.Tensor, taken: dict[str, bool]) -> BaseModelOutput:
    pixels = pixel_values.flatten(0, 1).to(tower.dtype)
    if torch.compiler.is_compiling():
        return tower(pixel_values=pixels, **taken)
    shape, size = tuple(pixel_values.shape), only_image_size(tower)
    if size is not None and shape[-2:] != size:
        raise ValueError(
            f"Expected `pixel_values` with images of {size} (height, width), the only size that the vision tower "
            f"({tower.config.model_type}) supports, got shape {shape}. The image processor of its checkpoint resizes "
            "images."
        )
    try:
        output = tower(pixel_values=pixels, **taken)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError) as error:
        weight = next(tower.parameters())
        if pixel_values.device != weight.device and not weight.is_meta:
            raise ValueError(
                f"Expected `pixel_values` on {weight.device}, the device of the vision tower, got them on "
                f"{pixel_values.device}."
            ) from error
        if shape[-2:] == image_size_of(tower.config):
            raise
        raise ValueError(
            f"The vision tower ({tower.config.model_type}) cannot read `pixel_values` of shape {shape}: {error}"
        ) from error
    if getattr(output, "last_hidden_state", None) is None:
        got = (
            f"{list(output.keys())}. {PASS_ITS_BASE}"
            if isinstance(output, ModelOutput)
            else f"type {type_name(output)}."
        )
        raise UnusableOutput(f"Expected {no_hidden_state(type(tower))} {got}")
    return output


def _by_image(tower: PreTrainedModel, output: BaseModelOutput, pixel_values: torch.Tensor) -> BaseModelOutput:
    """Gives `last_hidden_state` the shape `(images, tokens, width)` or `(images, width, height, width of the map)`."""
    features, images = output.last_hidden_state, pixel_values.shape[:2].numel()
    assert features is not None
    if tower.config.model_type in CHANNELS_LAST and features.dim() == 4:
        features = output.last_hidden_state = features.permute(0, 3, 1, 2)
    if tower.config.model_type in ONE_ROW and features.dim() == 3 and len(features) == 1:
        features = output.last_hidden_state = features.unflatten(1, (images, -1))[0]
    if features.dim() not in (3, 4) or len(features) != images:
        raise UnusableOutput(
            f"Expected a vision tower whose `last_hidden_state` is (images, tokens, width) or (images, channels, "
            f"height, width), got a {type(tower).__name__}, which returns {tuple(features.shape)} for {images} images."
        )
    return output


def token_mask_of(tiles: Tiles | None, image_mask: torch.Tensor | None, tokens: int) -> torch.Tensor | None:
    """Which image tokens are real, `(batch, num_images * tokens)`, or None if all are. `tokens`: of one image."""
    if tiles is None:
        return None if image_mask is None else image_mask.repeat_interleave(tokens, dim=1)
    mask = tiles.aspect_ratio_mask != 0
    if image_mask is not None:
        mask = mask & image_mask[..., None]
    return mask.flatten(1).repeat_interleave(tokens // mask.shape[2], dim=1)


def real_tiles_of(tiles: Tiles | None) -> torch.Tensor | None:
    """Numbers of the tiles that are no padding, among those of all images; None if all or none are, or without tiles.

    The tower itself gets padding tiles too. transformers' Mllama lets the patches of real tiles attend to them: without
    them an image would have other features.
    """
    if tiles is None or not has_values(tiles.aspect_ratio_mask):
        return None
    mask = tiles.aspect_ratio_mask.flatten()
    found = mask.nonzero()[:, 0]
    return found if 0 < len(found) < len(mask) else None


def blank_image(
    config: PreTrainedConfig, device: torch.device, dtype: torch.dtype
) -> tuple[torch.Tensor, Tiles | None]:
    """Makes one black image for one row."""
    size = image_size_of(config) or (UNSIZED, UNSIZED)
    pixels = torch.zeros(1, 1, getattr(config, "num_channels", 3), *size, device=device, dtype=dtype)
    if not is_tiled(config):
        return pixels, None
    count = config.max_num_tiles
    mask = torch.ones(1, 1, count, dtype=torch.long, device=device)
    ids = torch.ones(1, 1, dtype=torch.long, device=device)
    return pixels[:, :, None].expand(-1, -1, count, -1, -1, -1), Tiles(ids, mask)
