"""Finds the blocks that run. PEFT keeps a module of `modules_to_save` beside its trained copies, of which one runs."""

from __future__ import annotations

from typing import Any

from torch import nn

from .block import GatedCrossAttentionBlock


def cross_attention_blocks(module: nn.Module) -> list[GatedCrossAttentionBlock]:
    """The blocks that run in a model or a layer, in the order of the layers."""
    blocks, left = [], [module]
    while left:
        part = left.pop()
        if isinstance(part, GatedCrossAttentionBlock):
            blocks.append(part)
        elif "original_module" in part._modules and isinstance(part._modules.get("modules_to_save"), nn.ModuleDict):
            left.append(_running_copy(part))
        else:
            left.extend(part.children())
    return sorted(blocks, key=lambda block: block.layer_idx)


def _running_copy(wrapper: Any) -> nn.Module:
    active = [] if wrapper.disable_adapters else wrapper.active_adapters
    return next(
        (wrapper.modules_to_save[name] for name in active if name in wrapper.modules_to_save), wrapper.original_module
    )
