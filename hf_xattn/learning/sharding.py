"""How a model is split over devices: the units of FSDP, and the blocks' entries in a plan of tensor parallelism.

accelerate finds units by the names of classes, and transformers by a plan. Usually a decoder layer is a unit, together
with its block. But a unit must have a single dtype. In half precision, gates and norms stay float32, so the projections
of a block are units of their own then.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.distributed.tensor_parallel import TensorParallelLayer

from ..configuration_xattn import CrossAttentionConfig
from ..layers.block import GatedCrossAttentionBlock, cross_attention_blocks
from ..utils.distributed import is_distributed
from ..utils.transformers_api import ALL_PARALLEL_STYLES


if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# Submodules of a block that are entirely in half precision, except for the norms in the attention.
PROJECTIONS = ("attn", "mlp")
UNITS_OF_ATTENTION = ("q_norm", "k_norm", "context_norm", "position")


class XAttnUnitsMixin:
    _no_split: set[str] = set()

    def _names(self) -> set[str]:
        return names_of_units(self) if is_distributed() else self._no_split

    def _set_names(self, names: Iterable[str] | None) -> None:
        self._no_split = set(names or ())  # a copy, because transformers adds the names of submodules

    # Class names of modules that are not split over devices. In a run of several processes these are the units.
    _no_split_modules: Any = property(_names, _set_names)


def names_of_units(model: Any) -> set[str]:
    """Returns the class names of the modules that FSDP shards as units.

    - Decoder layers, and other modules that may not be split. Names that no module has are left out, because accelerate
      refuses them. A layer with a block has another class than without.
    - Vision tower and connector, because `generate` and `encode_images` call them outside of the model's `forward`.
    - The parts of a block, if the block has several dtypes.
    """
    inner = getattr(model, "model", model)
    names, called = set(model._no_split) | inner._no_split, (inner.vision_tower, inner.connector)
    for part in (inner.text_model, *called):
        names |= set(getattr(part, "_no_split_modules", None) or ())
    names &= {type(module).__name__ for module in model.modules()}
    names |= {type(part).__name__ for part in called if part is not None}
    for block in cross_attention_blocks(model):
        if len({weight.dtype for weight in block.parameters() if weight.is_floating_point()}) > 1:
            names.update(_classes_of_parts(block))
    return names


def fsdp_plan(model: PreTrainedModel, blocks: Iterable[str]) -> dict[str, str]:
    """Returns entries for transformers' plan of FSDP units: tower, connector, and the projections of the `blocks`.

    The plan has the decoder's layers already. In half precision, transformers also makes a unit of each module that
    holds a float32 weight. This is each of the blocks, because of its gates.
    """
    inner = getattr(model, "model", model)
    prefix = "" if inner is model else "model."
    units = [f"{prefix}{name}" for name in ("vision_tower", "connector") if getattr(inner, name) is not None]
    if model._get_dtype_plan(model.dtype):
        names: tuple[str, ...] = PROJECTIONS
        if model.config.cross_attention_config.position != "none":  # a position encoding may have weights of any dtype
            names = ("attn.position", *PROJECTIONS)
        units += [f"{block}.{name}" for block in blocks for name in names]
    return dict.fromkeys(units, "free_full_weight")


def _classes_of_parts(block: GatedCrossAttentionBlock) -> set[str]:
    attention: Any = block.attn
    parts: list[nn.Module] = [block, *(getattr(block, name) for name in PROJECTIONS)]
    parts += [part for name in UNITS_OF_ATTENTION if (part := getattr(attention, name)) is not None]
    return {type(part).__name__ for part in parts}


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
    """Returns the styles of tensor parallelism for a block's modules, as in Llama.

    Query heads, K/V heads and the MLP are split by column, and the projections back to the residual stream by row. So a
    rank holds some of the heads, their keys and values (also in a cross cache), and a part of the MLP. If there are
    fewer K/V heads than ranks, each rank projects all keys and values, and keeps those of the one head that its queries
    read. Heads that cannot be split evenly are not split.

    Args:
        config ([`CrossAttentionConfig`]): the configuration of the block.
        tp_size (`int`): number of ranks.
    """
    plan = dict(MLP)
    # The table of the position bias holds all heads, and a position encoding may, too.
    if config.num_attention_heads % tp_size == 0 and not config.counts_text:
        if config.num_key_value_heads % tp_size == 0:
            plan |= QUERIES | KEYS_VALUES
        elif tp_size % config.num_key_value_heads == 0:
            plan |= QUERIES  # the style of `attn` gives each rank its K/V head
    missing = {"gated": set(), "plain": {"mlp.gate_proj"}, "none": set(MLP)}[config.mlp_type]
    if not config.qk_norm:
        missing |= {"attn.q_norm", "attn.k_norm"}
    return {name: style for name, style in plan.items() if name not in missing}


class Heads(TensorParallelLayer):
    """The style of an attention module that holds some of the heads."""

    def install_forward(self, module: Any, mesh: DeviceMesh) -> nn.Module:
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
        if torch.is_grad_enabled():  # the gradient of the states is the sum over the heads of all ranks
            whole = DTensor.from_local(states, mesh, [Replicate()], run_check=False)
            states = whole.to_local(grad_placements=[Partial()])
        return project(states).chunk(heads, dim=-1)[read]

    return forward


ALL_PARALLEL_STYLES.register(HEADS, Heads())  # type: ignore[arg-type]  # typed as a function, used as an object
