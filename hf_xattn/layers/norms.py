"""Norms that compute in float32 and have float32 weights, in a model of any dtype.

bfloat16 would round small updates of the weights to zero.
"""

from __future__ import annotations

import torch
from torch import nn


class CrossAttentionRMSNorm(nn.Module):
    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size, dtype=at_least_float32()))
        self.eps = eps

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        dtype = torch.promote_types(hidden_states.dtype, torch.float32)
        normed = nn.functional.rms_norm(hidden_states.to(dtype), self.weight.shape, self.weight.to(dtype), self.eps)
        return normed.to(hidden_states.dtype)

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, eps={self.eps}"


class CrossAttentionKeyNorm(CrossAttentionRMSNorm):
    """RMSNorm of the keys, whose weight multiplies the queries in place of the keys.

    `q . (w * norm(k))` equals `(w * q) . norm(k)`. An image usually has more tokens than the text, so weighting the
    queries saves a product over all image tokens. In training it also saves the copy of the keys that the gradient of
    this product would need. A position encoding changes the keys after their norm, so that the two products differ.
    Keys with a position encoding therefore have a plain norm.
    """

    def normalize(self, key: torch.Tensor) -> torch.Tensor:
        """The normalized keys, not yet multiplied by the weight."""
        dtype = torch.promote_types(key.dtype, torch.float32)
        return nn.functional.rms_norm(key.to(dtype), self.weight.shape, eps=self.eps).to(key.dtype)

    def forward(self, query: torch.Tensor) -> torch.Tensor:
        """The queries, multiplied by the weight of the key norm."""
        return query * self.weight.to(query.dtype)


class CrossAttentionLayerNorm(nn.Module):
    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size, dtype=at_least_float32()))
        self.bias = nn.Parameter(torch.zeros(size, dtype=at_least_float32()))
        self.eps = eps

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        dtype = torch.promote_types(hidden_states.dtype, torch.float32)
        normed = nn.functional.layer_norm(
            hidden_states.to(dtype), self.weight.shape, self.weight.to(dtype), self.bias.to(dtype), self.eps
        )
        return normed.to(hidden_states.dtype)

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, eps={self.eps}"


NORMS: dict[str, type[CrossAttentionRMSNorm] | type[CrossAttentionLayerNorm]] = {
    "rmsnorm": CrossAttentionRMSNorm,
    "layernorm": CrossAttentionLayerNorm,
}


def at_least_float32() -> torch.dtype:
    """float32, or float64 if that is torch's default dtype (gradient checks)."""
    return torch.promote_types(torch.get_default_dtype(), torch.float32)
