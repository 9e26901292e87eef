"""The perceiver resampler: turns any number of image tokens into a fixed, smaller number.

Learned latents attend to the image tokens and to the latents (Flamingo, Alayrac et al., 2022, appendix A.1.1). Each
layer is `latents + attention(latents, [tokens; latents])`, then `latents + MLP(latents)`. A LayerNorm follows the last
layer. No projection has a bias. With `num_image_positions`, the tokens of each image first get a learned vector for its
place among the row's images (flamingo-pytorch's `media_pos_emb`, OpenFlamingo's `media_time_embs`).
"""

from __future__ import annotations

import torch
from torch import nn
from transformers import initialization as init
from transformers.activations import ACT2FN

from ..configuration_xattn import PerceiverConfig, XAttnConfig
from ..utils.first_values import ValuesComeLater
from ..utils.parts import CONNECTORS
from ..utils.projection import ImageLinear


class PerceiverAttention(nn.Module):
    """Attention with the latents as queries, and the image tokens and the latents as keys and values."""

    def __init__(self, config: PerceiverConfig):
        super().__init__()
        width, inner = config.hidden_size, config.num_attention_heads * config.head_dim
        self.head_dim = config.head_dim
        self.context_norm = nn.LayerNorm(width, config.norm_eps)
        self.latents_norm = nn.LayerNorm(width, config.norm_eps)
        self.q_proj = nn.Linear(width, inner, bias=False)
        self.k_proj = ImageLinear(width, inner, bias=False)
        self.v_proj = ImageLinear(width, inner, bias=False)
        self.o_proj = nn.Linear(inner, width, bias=False)
        self.q_norm = nn.LayerNorm(config.head_dim, config.norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = nn.LayerNorm(config.head_dim, config.norm_eps) if config.qk_norm else nn.Identity()

    def forward(self, context: torch.Tensor, latents: torch.Tensor) -> torch.Tensor:
        latents = self.latents_norm(latents)
        both = torch.cat([self.context_norm(context), latents], dim=1)
        query, key, value = (
            states.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for states in (self.q_proj(latents), self.k_proj(both), self.v_proj(both))
        )
        output = nn.functional.scaled_dot_product_attention(self.q_norm(query), self.k_norm(key), value)
        return self.o_proj(output.transpose(1, 2).flatten(2))


class PerceiverMLP(nn.Module):
    """`down(act(up(norm(x))))`."""

    def __init__(self, config: PerceiverConfig):
        super().__init__()
        self.norm = nn.LayerNorm(config.hidden_size, config.norm_eps)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.act_fn = ACT2FN[config.hidden_act]
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, latents: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.up_proj(self.norm(latents))))


class PerceiverLayer(nn.Module):
    def __init__(self, config: PerceiverConfig):
        super().__init__()
        self.attn = PerceiverAttention(config)
        self.mlp = PerceiverMLP(config)

    def forward(self, context: torch.Tensor, latents: torch.Tensor) -> torch.Tensor:
        latents = latents + self.attn(context, latents)
        return latents + self.mlp(latents)


class PerceiverResampler(nn.Module):
    """Maps the tokens of each image to `num_latents` tokens."""

    reads_positions = True

    def __init__(self, config: PerceiverConfig):
        super().__init__()
        self.latents = nn.Parameter(torch.randn(config.num_latents, config.hidden_size))
        self.image_positions = (
            nn.Parameter(torch.randn(config.num_image_positions, config.hidden_size))
            if config.num_image_positions
            else None
        )
        self.layers = nn.ModuleList([PerceiverLayer(config) for _ in range(config.num_hidden_layers)])
        self.norm = nn.LayerNorm(config.hidden_size, config.norm_eps)

    def write_first_values(self) -> None:
        init.normal_(self.latents, mean=0.0, std=1.0)
        if self.image_positions is not None:
            init.normal_(self.image_positions, mean=0.0, std=1.0)

    def forward(self, features: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
        """`(..., tokens, width)` to `(..., num_latents, width)`.

        `positions`: of each image among the images of its row, from 0, with the first axes of `features`. None: each is
        the first of its row. Read only with `num_image_positions`.
        """
        if self.image_positions is not None:
            if positions is None:
                positions = torch.zeros((), dtype=torch.long, device=features.device)
            added = self.image_positions.to(features.dtype)[positions.to(self.image_positions.device)]
            features = features + added.reshape(*positions.shape, *[1] * (features.dim() - 1 - positions.dim()), -1)
        context = features.flatten(0, -3)
        latents = self.latents.to(features.dtype).expand(context.shape[0], -1, -1)
        for layer in self.layers:
            latents = layer(context, latents)
        return self.norm(latents).unflatten(0, features.shape[:-2])


def perceiver(config: XAttnConfig) -> list[nn.Module]:
    assert config.perceiver_config is not None
    with ValuesComeLater():
        return [PerceiverResampler(config.perceiver_config)]


CONNECTORS.register("perceiver", perceiver)
