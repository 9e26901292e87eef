"""Calls a vision tower and interprets its output."""

from __future__ import annotations

import torch
from transformers import AutoModel, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput
from transformers.utils import ModelOutput

from ..utils.architectures import layers_width
from ..utils.custom_code import build_part
from ..utils.tensor_checks import type_name
from ..utils.towers import CHANNELS_LAST, ONE_ROW, own_class
from .tower import (
    ARRANGEMENTS,
    PASS_ITS_BASE,
    Arrangement,
    check_tower_config,
    image_size_of,
    no_hidden_state,
    only_image_size,
    takes_keyword,
)


UNSIZED = 224  # pixels of a side of a blank image, where the configuration says no size


class UnusableOutput(ValueError):
    """A vision model returns nothing that could be features of each picture."""


def build_tower(config: PreTrainedConfig) -> PreTrainedModel:
    """Builds a vision tower with random weights. Raises a `ValueError` for a model that is not a vision tower."""
    check_tower_config("vision_config", config)
    own = own_class(config)
    return build_part(AutoModel, config) if own is None else own._from_config(config)


def run_tower(
    tower: PreTrainedModel,
    pixel_values: torch.Tensor,
    tiles: Arrangement | None,
    layers: int | list[int] | tuple[int, ...] | None = None,
    **returns: bool | None,
) -> BaseModelOutput:
    """Runs a tower on `(R, num_images, ...)` pixels.

    The `last_hidden_state` of towers of whole images has `R * num_images` rows, and the channels of a map of features
    on axis 1, also where the tower's own does not.

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
    if tiles is not None:
        return tiles.run(tower, pixel_values, taken)
    if layers is not None and (torch.compiler.is_compiling() or takes_keyword(type(tower), "output_hidden_states")):
        taken["output_hidden_states"] = True
    output = _read_whole_images(tower, pixel_values, taken)
    if layers is not None:
        keeps_states = bool(asked.get("output_hidden_states", tower.config.output_hidden_states))
        output = _with_features_of(layers, output, layers_width(tower.config), keeps_states)
    return _by_image(tower, output, pixel_values)


def _with_features_of(
    layers: int | list[int] | tuple[int, ...], output: BaseModelOutput, width: int | None, keeps_states: bool
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


def token_mask_of(tiles: Arrangement | None, image_mask: torch.Tensor | None, tokens: int) -> torch.Tensor | None:
    """Which image tokens are real, `(batch, num_images * tokens)`, or None if all are. `tokens`: of one image."""
    if tiles is not None:
        return tiles.token_mask(image_mask, tokens)
    return None if image_mask is None else image_mask.repeat_interleave(tokens, dim=1)


def blank_image(
    config: PreTrainedConfig, device: torch.device, dtype: torch.dtype
) -> tuple[torch.Tensor, Arrangement | None]:
    """Makes one black image for one row."""
    size = image_size_of(config) or (UNSIZED, UNSIZED)
    pixels = torch.zeros(1, 1, getattr(config, "num_channels", 3), *size, device=device, dtype=dtype)
    arrangement = ARRANGEMENTS.get(config.model_type)
    return (pixels, None) if arrangement is None else arrangement.blank(config, pixels)
