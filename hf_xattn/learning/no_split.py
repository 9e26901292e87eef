"""The modules that FSDP shards as units: accelerate finds them by class names, transformers by a plan.

A layer and its blocks are one unit. But the weights of a unit must have one dtype, and in half precision gates and
norms stay float32. Then the projections of a block become units of their own, and the rest of the block is float32.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from ..layers.block import GatedCrossAttentionBlock, cross_attention_blocks
from ..utils.distributed import is_distributed


# Submodules of a block that are half precision as a whole, but for the norms of queries and keys.
PROJECTIONS = ("attn", "mlp")
NORMS_OF_HEADS = ("q_norm", "k_norm")


class XAttnUnitsMixin:
    """`_no_split_modules` of both models."""

    _no_split: set[str] = set()

    def _names(self) -> set[str]:
        return names_of_units(self) if is_distributed() else self._no_split

    def _set_names(self, names: Iterable[str] | None) -> None:
        self._no_split = set(names or ())  # transformers adds the names of submodules to it

    # Class names of modules that are not split over devices. In a run of several processes, `names_of_units`.
    _no_split_modules: Any = property(_names, _set_names)


def names_of_units(model: Any) -> set[str]:
    """Class names of the modules of a model that FSDP shards as units.

    - Decoder layers, and what else may not be split. accelerate refuses a name that no module has, and the blocks have
      changed the classes of the layers.
    - Vision tower and connector, because `generate` and `encode_images` call them outside of the model's `forward`.
    - The parts of a block with several dtypes.
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


def fsdp_plan(model: Any, blocks: Iterable[str]) -> dict[str, str]:
    """Rows for transformers' plan of FSDP units, which has the decoder's layers already: tower, connector, projections.

    In half precision, transformers makes the module of each float32 weight a unit: with the gates, that is the block.
    So the projections of the `blocks` (names) become units, too.
    """
    inner = getattr(model, "model", model)
    prefix = "" if inner is model else "model."
    units = [f"{prefix}{name}" for name in ("vision_tower", "connector") if getattr(inner, name) is not None]
    if model._get_dtype_plan(model.dtype):
        units += [f"{block}.{name}" for block in blocks for name in PROJECTIONS]
    return dict.fromkeys(units, "free_full_weight")


def _classes_of_parts(block: GatedCrossAttentionBlock) -> set[str]:
    attention: Any = block.attn
    parts: list[nn.Module] = [block, *(getattr(block, name) for name in PROJECTIONS)]
    parts += [norm for name in NORMS_OF_HEADS if (norm := getattr(attention, name)) is not None]
    return {type(part).__name__ for part in parts}
