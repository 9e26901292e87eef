"""Gates: what a branch of a block is multiplied by before it is added to the text.

`"tanh"` is a weight of the block itself, `attn_gate` or `mlp_gate`. Any other gate is a module under that name.
"""

from __future__ import annotations

import torch
from torch import nn

from ..configuration_xattn import CrossAttentionConfig
from ..utils.parts import GATES
from .norms import at_least_float32


Gate = nn.Parameter | nn.Module | None


def tanh_gate(config: CrossAttentionConfig) -> nn.Parameter:
    # Never 0-d: FSDP cannot shard a scalar.
    shape = (1,) if config.gate_granularity == "scalar" else (config.hidden_size,)
    return nn.Parameter(torch.full(shape, float(config.gate_init), dtype=at_least_float32()))


def no_gate(config: CrossAttentionConfig) -> None:
    return None


class TokenGate(nn.Module):
    """Each text token decides how much of a branch it takes: `sigmoid(score) * update`.

        score = 64 / hidden_size * rms_norm(hidden_states) @ weight + bias

    Attention alone spreads a weight of 1 over the image tokens, also for text that does not concern the image. A fresh
    gate is the same for all tokens, `sigmoid(gate_init)`. With the factor, a step of Adam moves the score of a wide
    model as far as that of a narrow one.
    """

    def __init__(self, config: CrossAttentionConfig):
        super().__init__()
        # A vector, because weight decay leaves vectors alone.
        self.weight = nn.Parameter(torch.zeros(config.hidden_size))
        self.bias = nn.Parameter(torch.full((1,), float(config.gate_init)))
        self.zero_init = config.zero_init

    def forward(self, update: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        normed = hidden_states * torch.rsqrt(hidden_states.pow(2).mean(dim=-1, keepdim=True) + 1e-6)
        score = nn.functional.linear(normed, self.weight[None] * (64 / hidden_states.shape[-1]), self.bias)
        return torch.sigmoid(score) * update


GATES.register("tanh", tanh_gate)
GATES.register("token", TokenGate)
GATES.register("none", no_gate)


def new_gate(config: CrossAttentionConfig) -> Gate:
    gate: Gate = GATES.make(config.gate, config)
    return gate.to(at_least_float32()) if isinstance(gate, nn.Module) else gate


def gated(update: torch.Tensor, gate: Gate, hidden_states: torch.Tensor) -> torch.Tensor:
    """What a branch adds to the text: `tanh(gate) * update`, in the gate's dtype, or what a gate's module returns.

    Args:
        update (`torch.Tensor`): `(batch, text_len, hidden_size)`, of the branch.
        hidden_states (`torch.Tensor`): the same shape; the text in front of the branch.

    Returns:
        `torch.Tensor`: the same shape, in the dtype of the text.
    """
    if gate is None:
        return update.to(hidden_states.dtype)
    if isinstance(gate, nn.Module):
        return _gated_by_module(update, gate, hidden_states)
    return (torch.tanh(gate) * update).to(hidden_states.dtype)


def _gated_by_module(update: torch.Tensor, gate: nn.Module, hidden_states: torch.Tensor) -> torch.Tensor:
    weight = next((weight for weight in gate.parameters() if weight.is_floating_point()), update)
    output = gate(update.to(weight.dtype), hidden_states.to(weight.dtype))
    if not isinstance(output, torch.Tensor) or output.shape != hidden_states.shape:
        got = tuple(output.shape) if isinstance(output, torch.Tensor) else type(output).__name__
        raise ValueError(
            f"Expected the gate {type(gate).__name__} to return a tensor (batch, text_len, hidden_size) "
            f"{tuple(hidden_states.shape)}, got {got}."
        )
    return output.to(hidden_states.dtype)
