"""The block on vLLM, with the same formula and the same weight names as in `layers/block.py`.

Two things differ from that block. The queries of a step are the tokens of many requests in one row, and keys and values
are in the engine's paged cache. The compiler sees the block as one operator, because the images that a token sees
differ from step to step, and compiled code would fix them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.activations import ACT2FN
from vllm.distributed.parallel_state import get_tensor_model_parallel_world_size
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention import CrossAttention
from vllm.model_executor.layers.linear import ColumnParallelLinear, RowParallelLinear
from vllm.utils.torch_utils import direct_register_custom_op

from ..configuration_xattn import CrossAttentionConfig
from ..layers.gates import TokenGate
from ..layers.norms import NORMS, CrossAttentionKeyNorm, CrossAttentionRMSNorm
from .steps import Masked, Step


# Key of the [`Step`] in the engine's context of a forward.
STEP = "hf_xattn_step"
_LIBRARY = torch.library.Library("hf_xattn", "FRAGMENT")


class Attention(nn.Module):
    """Cross-attention of one rank. Under tensor parallelism, a rank has some of the heads.

    Args:
        config ([`CrossAttentionConfig`]): configuration of the block.
        cache_config: vLLM's configuration of its cache.
        prefix (`str`): name of this module in the engine.
    """

    def __init__(self, config: CrossAttentionConfig, cache_config: Any, prefix: str):
        super().__init__()
        ranks = get_tensor_model_parallel_world_size()
        if config.num_key_value_heads % ranks:
            raise ValueError(
                f"Expected `tensor_parallel_size` to divide `num_key_value_heads` ({config.num_key_value_heads}) of "
                f"the blocks, got {ranks}."
            )
        self.num_heads, self.num_kv_heads = config.num_attention_heads // ranks, config.num_key_value_heads // ranks
        self.head_dim, self.scale = config.head_dim, config.head_dim**-0.5
        bias, width = config.attention_bias, config.head_dim
        heads, kv_heads = config.num_attention_heads * width, config.num_key_value_heads * width
        self.q_proj = ColumnParallelLinear(config.hidden_size, heads, bias=bias, prefix=f"{prefix}.q_proj")
        self.k_proj = ColumnParallelLinear(config.context_size, kv_heads, bias=bias, prefix=f"{prefix}.k_proj")
        self.v_proj = ColumnParallelLinear(config.context_size, kv_heads, bias=bias, prefix=f"{prefix}.v_proj")
        self.o_proj = RowParallelLinear(heads, config.hidden_size, bias=bias, prefix=f"{prefix}.o_proj")
        self.q_norm = CrossAttentionRMSNorm(width, config.qk_norm_eps) if config.qk_norm else None
        self.k_norm = CrossAttentionKeyNorm(width, config.qk_norm_eps) if config.qk_norm else None
        # Quiet softmax adds exp(0) to the denominator. For vLLM, this is a sink with the score 0.
        self.quiet = config.quiet_softmax
        sinks = {"sinks": torch.zeros(self.num_heads)} if self.quiet else {}
        self.kernel = CrossAttention(
            self.num_heads,
            width,
            self.scale,
            num_kv_heads=self.num_kv_heads,
            cache_config=cache_config,
            prefix=f"{prefix}.kernel",
            **sinks,
        )

    def forward(self, hidden_states: torch.Tensor, step: Step) -> torch.Tensor:
        """Computes attention for the tokens of a step, `(tokens, hidden_size)`. Returns the same shape."""
        query = self.q_proj(hidden_states)[0].unflatten(-1, (self.num_heads, self.head_dim))
        if self.q_norm is not None and self.k_norm is not None:
            wide = query.to(torch.promote_types(query.dtype, torch.float32))
            query = self.k_norm(self.q_norm(wide)).to(query.dtype)
        key = value = None
        if step.states is not None:
            key, value = self._project(step.states)
        stored = (key, value)
        if step.stored is not None and key is not None and value is not None:
            stored = key[step.stored], value[step.stored]
        output = self.kernel(query.flatten(1), *(each if each is None else each.flatten(1) for each in stored))
        for masked in step.masked:
            assert key is not None and value is not None
            output[masked.text] = self._attend(query, key, value, masked)
        # A product with the mask would not do: the kernel may leave NaN for tokens that see nothing.
        return self.o_proj(torch.where(step.attends, output, 0))[0]

    def _project(self, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns keys and values of image tokens, each `(image tokens, kv_heads, head_dim)`."""
        shape = (self.num_kv_heads, self.head_dim)
        states = states.to(self.k_proj.weight.dtype)
        key, value = (each(states)[0].unflatten(-1, shape) for each in (self.k_proj, self.v_proj))
        return key if self.k_norm is None else self.k_norm.normalize(key), value

    def _attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, masked: Masked) -> torch.Tensor:
        """Computes attention for a prompt whose tokens see different images. Returns `(text_len, width)`.

        The engine's kernel takes no mask, so this uses SDPA.
        """
        mask = masked.mask
        key, value = key[masked.images], value[masked.images]
        if self.quiet:
            key, value = (torch.cat([each.new_zeros(1, *each.shape[1:]), each]) for each in (key, value))
            mask = nn.functional.pad(mask, (1, 0), value=True)
        attended = nn.functional.scaled_dot_product_attention(
            query[masked.text].transpose(0, 1)[None],
            key.transpose(0, 1)[None],
            value.transpose(0, 1)[None],
            attn_mask=mask,
            scale=self.scale,
            enable_gqa=self.num_heads != self.num_kv_heads,
        )
        return attended[0].transpose(0, 1).flatten(1)


class MLP(nn.Module):
    """The MLP of a block on one rank."""

    def __init__(self, config: CrossAttentionConfig, prefix: str):
        super().__init__()
        sizes, bias = (config.hidden_size, config.intermediate_size), config.mlp_bias
        self.gate_proj = (
            ColumnParallelLinear(*sizes, bias=bias, prefix=f"{prefix}.gate_proj")
            if config.mlp_type == "gated"
            else None
        )
        self.up_proj = ColumnParallelLinear(*sizes, bias=bias, prefix=f"{prefix}.up_proj")
        self.down_proj = RowParallelLinear(*reversed(sizes), bias=bias, prefix=f"{prefix}.down_proj")
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        up = self.up_proj(hidden_states)[0]
        inner = self.act_fn(up) if self.gate_proj is None else self.act_fn(self.gate_proj(hidden_states)[0]) * up
        return self.down_proj(inner)[0]


class Block(nn.Module):
    """One gated cross-attention block in a layer of a vLLM decoder.

    Args:
        config ([`CrossAttentionConfig`]): configuration of the block.
        vllm_config: vLLM's configuration of the engine.
        prefix (`str`): a name that no other block of the engine has.
    """

    def __init__(self, config: CrossAttentionConfig, vllm_config: Any, prefix: str):
        super().__init__()
        self.name = prefix
        registered = vllm_config.compilation_config.static_forward_context
        if prefix in registered:
            raise ValueError(f"Expected a name for each block that no other block has, got {prefix} twice.")
        registered[prefix] = self
        norm = NORMS[config.norm_type]
        self.attn_norm = norm(config.hidden_size, config.norm_eps)
        self.attn = Attention(config, vllm_config.cache_config, f"{prefix}.attn")
        has_mlp = config.mlp_type != "none"
        self.mlp_norm = norm(config.hidden_size, config.norm_eps) if has_mlp else None
        self.mlp = MLP(config, f"{prefix}.mlp") if has_mlp else None
        self.attn_gate: nn.Parameter | TokenGate | None = None
        self.mlp_gate: nn.Parameter | TokenGate | None = None
        if config.gate == "tanh":
            shape = (1,) if config.gate_granularity == "scalar" else (config.hidden_size,)
            gates = [
                nn.Parameter(torch.zeros(shape, dtype=self.attn_norm.weight.dtype), requires_grad=False)
                for _ in range(2)
            ]
            self.attn_gate, self.mlp_gate = gates if has_mlp else (gates[0], None)
        elif config.gate == "token":
            self.attn_gate, self.mlp_gate = TokenGate(config), TokenGate(config) if has_mlp else None

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Runs the block on `(tokens, hidden_size)`, or on a tensor with axes of length 1 before these two.

        Compiled code sees one operator.
        """
        flat = hidden_states.view(-1, hidden_states.shape[-1])
        return torch.ops.hf_xattn.block(flat, self.name).view(hidden_states.shape)

    def compute(self, hidden_states: torch.Tensor, step: Step | None) -> torch.Tensor:
        """Computes the block.

        Args:
            hidden_states (`torch.Tensor`): `(tokens, hidden_size)`.
            step ([`Step`], *optional*): what the tokens see. None while the engine measures memory, because there are
                no requests then.
        """
        normed = self.attn_norm(hidden_states)
        attended = normed if step is None else self.attn(normed, step)
        seen = hidden_states + _gated(attended, self.attn_gate, hidden_states)
        if step is not None:
            seen = torch.where(step.attends, seen, hidden_states)
        if self.mlp is None or self.mlp_norm is None:
            return seen
        made = seen + _gated(self.mlp(self.mlp_norm(seen)), self.mlp_gate, seen)
        return made if step is None else torch.where(step.visible, made, seen)


def _gated(branch: torch.Tensor, gate: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    if isinstance(gate, TokenGate):
        dtype = gate.weight.dtype
        return gate(branch.to(dtype), hidden_states.to(dtype)).to(hidden_states.dtype)
    return (branch if gate is None else torch.tanh(gate) * branch).to(hidden_states.dtype)


def _block(hidden_states: torch.Tensor, name: str) -> torch.Tensor:
    context = get_forward_context()
    return context.no_compile_layers[name].compute(hidden_states, context.additional_kwargs.get(STEP))


def _fake_block(hidden_states: torch.Tensor, name: str) -> torch.Tensor:
    return torch.empty_like(hidden_states)


direct_register_custom_op("block", _block, fake_impl=_fake_block, target_lib=_LIBRARY)
