"""Tensor parallelism of the blocks: which projections are split over ranks, and how.

transformers splits a model by a plan, a style for each module name. A decoder brings its own plan; this file adds the
blocks' rows, as in Llama: query heads, K/V heads and the MLP by column, the projections back to the residual stream by
row. So a rank holds some heads, their keys and values (also in a cross cache), and a part of the MLP.

Two cases are left where the heads cannot be split evenly:

- Fewer K/V heads than ranks: each rank projects all keys and values, and keeps those of the one head that its queries
  read.
- Otherwise the attention of the block stays whole on each rank, and only its MLP is split.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.distributed.tensor_parallel import TensorParallelLayer

from ..configuration_xattn import CrossAttentionConfig
from ..utils.transformers_api import ALL_PARALLEL_STYLES


HEADS = "xattn_heads"
OF_EACH_RANK = "replicated_with_grad_allreduce"

QUERIES = {
    "attn": HEADS,
    "attn.q_proj": "colwise",
    "attn.q_norm": OF_EACH_RANK,
    "attn.k_norm": OF_EACH_RANK,
    "attn.o_proj": "rowwise",
}
KEYS_VALUES = {"attn.k_proj": "colwise", "attn.v_proj": "colwise"}
MLP = {"mlp.gate_proj": "colwise", "mlp.up_proj": "colwise", "mlp.down_proj": "rowwise"}


def block_plan(config: CrossAttentionConfig, tp_size: int) -> dict[str, str]:
    """Returns the styles of a block's modules, for a number of ranks."""
    plan = dict(MLP)
    if config.num_attention_heads % tp_size == 0 and not config.position_bias:  # its table holds all heads
        if config.num_key_value_heads % tp_size == 0:
            plan |= QUERIES | KEYS_VALUES
        elif tp_size % config.num_key_value_heads == 0:
            plan |= QUERIES  # the style of `attn` shares the heads
    missing = {"mlp.gate_proj"} if config.mlp_type != "gated" else set()
    if not config.qk_norm:
        missing |= {"attn.q_norm", "attn.k_norm"}
    return {name: style for name, style in plan.items() if name not in missing}


class Heads(TensorParallelLayer):
    """Attention with some of the heads. With fewer K/V heads than ranks, several ranks read the same one."""

    def install_forward(self, module: Any, mesh: Any) -> nn.Module:
        ranks, heads = mesh.size(), module.config.num_key_value_heads
        first = mesh.get_local_rank() * heads // ranks
        module.num_key_value_heads = max(heads // ranks, 1)
        if heads % ranks == 0:
            return module
        module.num_groups = module.config.num_attention_heads // ranks
        for projection in (module.k_proj, module.v_proj):
            ALL_PARALLEL_STYLES[OF_EACH_RANK].install_forward(projection, mesh)
            projection.forward = _one_head(projection.forward, heads, first, mesh)
        return module


def _one_head(project, heads: int, read: int, mesh: Any):
    from torch.distributed.tensor import DTensor, Partial, Replicate

    def forward(states: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled():  # the gradient of the states is a sum over the ranks' heads
            whole = DTensor.from_local(states, mesh, [Replicate()], run_check=False)
            states = whole.to_local(grad_placements=[Partial()])
        return project(states).chunk(heads, dim=-1)[read]

    return forward


ALL_PARALLEL_STYLES.register(HEADS, Heads())  # type: ignore[arg-type]  # typed as a function, used as an object
