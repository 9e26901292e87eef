"""Vision features to K/V source."""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.activations import ACT2FN

from .configuration_xattn import XAttnConfig
from .perceiver import PerceiverResampler
from .projection import ImageLinear
from .sizes import vision_hidden_size


class XAttnConnector(PreTrainedModel):
    """Maps `(..., tokens, vision_hidden_size)` to `(..., tokens, context_size)`: not at all, by one layer, by two with an
    activation, or by a perceiver resampler to fewer tokens.

    A `PreTrainedModel`, so that it is initialised by its own rule wherever it sits (see [`GatedCrossAttentionBlock`]).

    Args:
        config ([`XAttnConfig`]): `connector_type` and sizes.
    """

    config_class = XAttnConfig
    main_input_name = "features"
    # No attention here, but the configuration is the whole model's, whichever kernels it names.
    _supports_sdpa = _supports_flash_attn = _supports_flex_attn = True

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        return True  # no experts here, but a decoder's choice reaches every part's configuration

    def __init__(self, config: XAttnConfig):
        super().__init__(config)
        assert config.vision_config is not None  # without a tower there is nothing to connect
        features, context = vision_hidden_size(config.vision_config), config.cross_attention_config.context_size
        bias = config.connector_bias
        if config.connector_type == "identity":
            self.layers = nn.ModuleList()
        elif config.connector_type == "perceiver":
            assert config.perceiver_config is not None
            self.layers = nn.ModuleList([PerceiverResampler(config.perceiver_config)])
        elif config.connector_type == "linear":
            self.layers = nn.ModuleList([ImageLinear(features, context, bias=bias)])
        else:
            act = ACT2FN[config.connector_hidden_act]
            self.layers = nn.ModuleList(
                [ImageLinear(features, context, bias=bias), act, ImageLinear(context, context, bias=bias)]
            )
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            init.normal_(module.weight, mean=0.0, std=module.in_features**-0.5)
            if module.bias is not None:
                init.zeros_(module.bias)
        elif isinstance(module, nn.LayerNorm):
            init.ones_(module.weight)
            init.zeros_(module.bias)
        elif isinstance(module, PerceiverResampler):
            init.normal_(module.latents, mean=0.0, std=1.0)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            features = layer(features)
        return features
