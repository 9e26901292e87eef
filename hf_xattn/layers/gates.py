"""Gates: the factor of a branch of a block, before the branch is added to the text.

The gate `"tanh"` is a weight of the block itself, `attn_gate` or `mlp_gate`. Any other gate is a module of this name.
"""

from __future__ import annotations

import torch
from torch import nn

from ..configuration_xattn import CrossAttentionConfig
from ..utils.parts import GATES
from .norms import at_least_float32


Gate = nn.Parameter | nn.Module | None


def tanh_gate(config: CrossAttentionConfig) -> nn.Parameter:
    # The gate has one dimension, because FSDP cannot shard a scalar.
    shape = (1,) if config.gate_granularity == "scalar" else (config.hidden_size,)
    return nn.Parameter(torch.full(shape, float(config.gate_init), dtype=at_least_float32()))


def no_gate(config: CrossAttentionConfig) -> None:
    return None


class TokenGate(nn.Module):
    """Lets each text token decide how much of a branch it takes: `sigmoid(score) * update`.

        score = 64 / hidden_size * rms_norm(hidden_states) @ weight + bias

    Without it, the attention weights of a text token add up to 1 even if the token has nothing to do with the image. A
    fresh gate is the same for all tokens, `sigmoid(gate_init)`. Because of the factor `64 / hidden_size`, a step of
    Adam moves the score in a wide model as far as in a narrow one.
    """

    def __init__(self, config: CrossAttentionConfig):
        super().__init__()
        # The weight is a vector, because weight decay spares vectors (see `parameter_groups`).
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
    """Returns what a branch adds to the text: `tanh(gate) * update`, or the output of a gate that is a module.

    Args:
        update (`torch.Tensor`): `(batch, text_len, hidden_size)`, the result of the branch.
        gate: The gate of the branch, or None.
        hidden_states (`torch.Tensor`): The text in front of the branch, of the same shape.

    Returns:
        `torch.Tensor`: what is added, of the same shape, in the dtype of the text.
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
