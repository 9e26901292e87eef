"""Calls a vision tower, and brings its output into one form. `parts/towers.py` says which models can be a tower."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Protocol, TypeAlias

import torch
from torch import nn
from transformers import AutoModel, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput
from transformers.utils import ModelOutput

from ..configuration_xattn import XAttnConfig
from ..utils import memoized
from ..utils.architectures import layers_width
from ..utils.custom_code import build_part
from ..utils.distributed import has_units
from ..utils.tensor_checks import type_name
from ..utils.towers import CHANNELS_LAST, ONE_ROW, own_class


# Argument of transformers' towers that resize their learned position embeddings only if it is set.
FLAG = "interpolate_pos_encoding"
# Towers with learned position embeddings that cannot resize them.
FIXED_SIZE_TYPES = ("aimv2_vision_model",)
POSITION_EMBEDDINGS = ("position_embedding", "position_embeddings")
MASK_TOKEN = "mask_token"
UNSIZED = 224  # height and width of a blank image, if the configuration does not have the size of images
NO_HIDDEN_STATE = "a vision model whose output has `last_hidden_state`, got a {}, whose output has"
PASS_ITS_BASE = "Pass the `base_model` of a model with a head, and the vision part of a model for text and images."


class UnusableOutput(ValueError):
    """The output of a vision model cannot be used as features of each image."""


Ratios: TypeAlias = dict[str, torch.Tensor | None]  # the arguments of a call from which an arrangement is made


class Arrangement(Protocol):
    """What a tower needs in addition to the pixels `(R, n, ...)` of a call, if it does not read whole images.

    `of` makes an arrangement from the arguments of a call, and raises a `ValueError` if these or the images do not fit
    the tower. `blank` makes one black image for the tower from pixels `(1, 1, channels, height, width)`.
    """

    @classmethod
    def of(cls, config: XAttnConfig, name: str, images: torch.Tensor, ratios: Ratios) -> Arrangement: ...

    @classmethod
    def blank(cls, config: PreTrainedConfig, pixels: torch.Tensor) -> tuple[torch.Tensor, Arrangement]: ...

    @property
    def kinds(self) -> torch.Tensor: ...  # `(R, n)`, 0 for no image; images of different kinds are not equal

    def each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Arrangement: ...  # applies it to all tensors

    def __iter__(self) -> Iterator[torch.Tensor]: ...

    def _asdict(self) -> dict[str, torch.Tensor]: ...  # the keys are the names of the tower's arguments

    def run(self, tower: PreTrainedModel, pixels: torch.Tensor, returns: dict[str, bool]) -> BaseModelOutput: ...

    def connect(
        self, connector: nn.Module, features: torch.Tensor, positions: torch.Tensor | None, skips_padding: bool
    ) -> torch.Tensor: ...  # `(R, n, tokens of an image, context_size)`

    def token_mask(self, image_mask: torch.Tensor | None, tokens: int) -> torch.Tensor:
        """Returns which image tokens are no padding, `(batch, num_images * tokens)`.

        `image_mask` `(batch, num_images)` is False for padding images. `tokens` is the number of tokens of an image.
        """


# Arrangements by the `model_type` of the tower. `parts/tiles.py` fills this table. All other towers read whole images.
ARRANGEMENTS: dict[str, type[Arrangement]] = {}


@memoized
def takes_keyword(tower_class: type[PreTrainedModel], name: str) -> bool:
    """Whether the `forward` of a tower takes a keyword argument, by name or among `**kwargs`."""
    parameters = inspect.signature(tower_class.forward).parameters
    return name in parameters or any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())


def check_not_trained(tower: PreTrainedModel) -> None:
    """Raises a `ValueError` in training if the tower has trainable weights, which cannot learn from earlier outputs."""
    if not (tower.training and torch.is_grad_enabled()) or torch.compiler.is_compiling():
        return
    trainable = [name for name, weight in tower.named_parameters() if weight.requires_grad]
    if trainable:
        raise ValueError(
            "Expected a frozen vision tower with `vision_features`, which its weights do not change, got one with "
            f"{len(trainable)} trainable weights ({trainable[0]}, ...). Freeze it with `hf_xattn.freeze(model)`, or "
            "pass `pixel_values`."
        )


def build_tower(config: PreTrainedConfig) -> PreTrainedModel:
    """Builds a vision tower with random weights, from a configuration that `parts/towers.py` accepts."""
    own = own_class(config)
    return build_part(AutoModel, config) if own is None else own._from_config(config)


def run_tower(
    tower: PreTrainedModel,
    pixel_values: torch.Tensor,
    tiles: Arrangement | None,
    layers: int | list[int] | tuple[int, ...] | None = None,
    **returns: bool | None,
) -> BaseModelOutput:
    """Runs a tower on pixels `(R, num_images, ...)`.

    If the tower reads whole images, the `last_hidden_state` of the result has `R * num_images` rows, and a feature map
    has its channels on axis 1, whatever the tower itself returns. If the tower trains, it depends on all weights.

    Args:
        tower (`PreTrainedModel`): The vision tower.
        pixel_values (`torch.Tensor`): The pixels.
        tiles ([`Arrangement`], *optional*): None for a tower that reads whole images.
        layers (`int` or `list[int]`, *optional*): `vision_feature_layer`, see [`XAttnConfig`]. The `last_hidden_state`
            of the result then holds the hidden states of these layers, joined along the width.
        returns: `output_hidden_states` and `output_attentions`. Default to the values in the tower's configuration.

    Raises:
        ValueError: for images of a size that the tower does not support, or an output without `last_hidden_state` or
            with another number of rows.
    """
    returns["return_dict"] = None if tower.config.return_dict else True
    taken = {}
    for name, value in returns.items():
        if value is not None and takes_keyword(type(tower), name):
            taken[name] = value
    if tiles is not None:
        output = tiles.run(tower, pixel_values, taken)
    else:
        if layers is not None and (torch.compiler.is_compiling() or takes_keyword(type(tower), "output_hidden_states")):
            taken["output_hidden_states"] = True
        output = _read_whole_images(tower, pixel_values, taken)
        if layers is not None:
            asked = returns.get("output_hidden_states")
            keeps_states = bool(tower.config.output_hidden_states if asked is None else asked)
            output = _with_features_of(layers, output, layers_width(tower.config), keeps_states)
        _by_image(tower, output, pixel_values.shape[:2].numel())
    if tower.training and torch.is_grad_enabled():
        output.last_hidden_state = _states_for_all_weights(tower, output)
    return output


def _with_features_of(
    layers: int | list[int] | tuple[int, ...], output: BaseModelOutput, width: int | None, keeps_states: bool
) -> BaseModelOutput:
    """Replaces the `last_hidden_state` of an output by the hidden states of `layers`."""
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
    if last.requires_grad:  # DDP waits for the gradient of every trainable weight, also of those after these layers
        features = features + last.flatten()[:0].sum().to(features.dtype)
    output.last_hidden_state = features
    if not keeps_states:
        output.hidden_states = None
    return output


def _read_whole_images(tower: PreTrainedModel, pixel_values: torch.Tensor, taken: dict[str, bool]) -> BaseModelOutput:
    pixels = pixel_values.flatten(0, 1).to(tower.dtype)
    if torch.compiler.is_compiling():
        return tower(pixel_values=pixels, **taken)
    shape = tuple(pixel_values.shape)
    if shape[-2:] != image_size_of(tower.config) and (only := only_image_size(tower)) is not None:
        raise ValueError(
            f"Expected `pixel_values` with images of {only} (height, width), the only size that the vision tower "
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
        raise UnusableOutput(f"Expected {NO_HIDDEN_STATE.format(type(tower).__name__)} {got}")
    return output


def _by_image(tower: PreTrainedModel, output: BaseModelOutput, images: int) -> None:
    """Brings `last_hidden_state` into the shape `(images, tokens, width)` or `(images, channels, height, width)`."""
    features = output.last_hidden_state
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


def blank_image(
    config: PreTrainedConfig, device: torch.device, dtype: torch.dtype
) -> tuple[torch.Tensor, Arrangement | None]:
    """Makes the pixels of one black image in one row, with their arrangement."""
    size = image_size_of(config) or (UNSIZED, UNSIZED)
    pixels = torch.zeros(1, 1, getattr(config, "num_channels", 3), *size, device=device, dtype=dtype)
    arrangement = ARRANGEMENTS.get(config.model_type)
    return (pixels, None) if arrangement is None else arrangement.blank(config, pixels)


def only_image_size(tower: PreTrainedModel) -> tuple[int, int] | None:
    """Returns the height and width of the only size of images that a tower reads; None if it reads several sizes.

    A tower with one learned position embedding for each patch reads only the size that it was made for. SigLIP would
    accept a slightly larger image without an error, and ignore its border.
    """
    size = image_size_of(tower.config)
    if size is None or not (_has_flag(type(tower)) or tower.config.model_type in FIXED_SIZE_TYPES):
        return None
    learned = any(
        module._parameters.get(name) is not None or module._modules.get(name) is not None
        for module in tower.modules()
        for name in POSITION_EMBEDDINGS
    )
    return size if learned else None


def image_size_of(config: PreTrainedConfig) -> tuple[int, int] | None:
    size = getattr(config, "image_size", None)
    if isinstance(size, int):
        return size, size
    return None if size is None else (size[0], size[1])


@memoized
def _has_flag(tower_class: type[PreTrainedModel]) -> bool:
    return FLAG in inspect.signature(tower_class.forward).parameters


def _states_for_all_weights(tower: nn.Module, output: BaseModelOutput) -> torch.Tensor:
    """Returns the `last_hidden_state` of a tower that trains, so that it depends on all weights of the tower.

    DDP waits for the gradient of every trainable weight. But some weights are used only after the last hidden state,
    and would get no gradient: CLIP's last norm, the poolers of ViT and BEiT, and the heads of SigLIP and AIMv2. The
    mask token of DINOv2 gets none, either.
    """
    states = output.last_hidden_state
    assert states is not None
    for each in (output.get("pooler_output"), *_mask_tokens(tower)):
        if each is not None and each.requires_grad:
            # The sum over no elements is zero, even if a value is infinite.
            states = states + each.flatten()[:0].sum().to(states.dtype)
    return states


def _mask_tokens(tower: nn.Module) -> list[nn.Parameter]:
    """Returns the embeddings of masked patches, which no call of this package uses.

    Returns none under FSDP, which does not wait for them, and may hold only a part of each.
    """
    if has_units(tower):
        return []
    return [weight for name, weight in tower.named_parameters() if name.rpartition(".")[2] == MASK_TOKEN]
