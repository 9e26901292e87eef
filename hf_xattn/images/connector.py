"""The connector: maps the features of the vision tower to image tokens, which the K/V projections read."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.modeling_utils import local_torch_dtype

from ..configuration_xattn import XAttnConfig
from ..utils.architectures import vision_feature_size
from ..utils.parts import CONNECTORS, ValuesComeLater
from ..utils.projection import ImageLinear, to_dtype_of
from ..utils.tensor_checks import is_quantized


def identity(config: XAttnConfig) -> list[nn.Module]:
    return []


def linear(config: XAttnConfig) -> list[nn.Module]:
    with ValuesComeLater():
        return [ImageLinear(*_sizes(config), bias=config.connector_bias)]


def mlp(config: XAttnConfig) -> list[nn.Module]:
    features, context = _sizes(config)
    with ValuesComeLater():
        return [
            ImageLinear(features, context, bias=config.connector_bias),
            ACT2FN[config.connector_hidden_act],
            ImageLinear(context, context, bias=config.connector_bias),
        ]


for _connector in (identity, linear, mlp):
    CONNECTORS.register(_connector.__name__, _connector)


class XAttnConnector(PreTrainedModel):
    """Maps features `(..., tokens, vision_hidden_size)` to image tokens `(..., tokens, context_size)`.

    The connector `"identity"` returns the features, `"linear"` is one linear layer, and `"mlp"` is two of them with an
    activation in between. Others are registered: those of `parts/`, and your own (see `utils/parts.py`). The connector
    is a `PreTrainedModel` so that its own `_init_weights` initialises it inside any model (see
    [`GatedCrossAttentionBlock`]).
    """

    config_class = XAttnConfig
    main_input_name = "features"
    # The connector uses none of these kernels. But it gets the configuration of the whole model, which may name any.
    _supports_sdpa = _supports_flash_attn = _supports_flex_attn = True

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        return True  # the connector has no experts, but transformers sets the decoder's choice on every part

    def __init__(self, config: XAttnConfig):
        super().__init__(config)
        made = CONNECTORS.make(config.connector_type, config)
        self.layers = nn.ModuleList([made] if isinstance(made, nn.Module) else made)
        # What numbers the images of a row, if a layer reads these numbers (see [`Numbering`])
        self.numbering: Any = next((layer.numbering for layer in self.layers if hasattr(layer, "numbering")), None)
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        name = self.config.connector_type
        if CONNECTORS.write_first_values(name, next(iter(self.layers), None), module, self.config):
            return
        if isinstance(module, nn.Linear):
            init.normal_(module.weight, mean=0.0, std=module.in_features**-0.5)
            if module.bias is not None:
                init.zeros_(module.bias)
        elif isinstance(module, nn.LayerNorm):
            init.ones_(module.weight)
            init.zeros_(module.bias)
        elif (write_first_values := getattr(module, "write_first_values", None)) is not None:
            write_first_values()

    def forward(self, features: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
        """Returns the image tokens of features.

        `positions` has the number of each image among the images of its row, for layers with `reads_positions`.
        """
        for module in self.modules():
            if isinstance(module, nn.Linear):  # may be float32, for training, beside a frozen tower in half precision
                features = to_dtype_of(module, features)
                break
        images = features.shape[:-2]
        for layer in self.layers:
            features = layer(features, positions) if getattr(layer, "reads_positions", False) else layer(features)
        width = self.config.cross_attention_config.context_size
        if features.shape[:-2] != images or features.shape[-1] != width:  # a connector of the user may return that
            raise ValueError(
                f"Expected the connector {self.config.connector_type!r} to return image tokens {(*images, 'tokens')}, "
                f"each of width {width} (`context_size`), got shape {tuple(features.shape)}."
            )
        return features


def _sizes(config: XAttnConfig) -> tuple[int, int]:
    return vision_feature_size(config), config.cross_attention_config.context_size


def check_square(config: XAttnConfig, pictures: torch.Tensor) -> None:
    """Raises a `ValueError` if the connector needs square images, and `pictures` `(..., height, width)` are not square.

    `pictures` are pixels or feature maps.
    """
    height, width = pictures.shape[-2:]
    if height != width and CONNECTORS.needs_square(config.connector_type):
        raise ValueError(
            f"Expected square images for `connector_type={config.connector_type!r}`, got a height of {height} and a "
            f"width of {width}. Have the image processor crop or resize to a square, or use 'mlp'."
        )


def new_connector(config: XAttnConfig, tower: PreTrainedModel) -> XAttnConnector:
    """Makes a connector, initialised, on the device and in the dtype of a vision tower."""
    weight = next(tower.parameters())
    if weight.is_meta:
        return XAttnConnector(config)
    connector: Any
    with local_torch_dtype(tower.dtype if is_quantized(weight) else weight.dtype):
        connector = XAttnConnector(config)
    return connector.to(weight.device)
