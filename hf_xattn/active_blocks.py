"""Finds the blocks that run. PEFT keeps a module of `modules_to_save` beside its trained copies, of which one runs."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from .block import GatedCrossAttentionBlock


def cross_attention_blocks(module: nn.Module) -> list[GatedCrossAttentionBlock]:
    """The blocks that run in a model or a layer, in the order of the layers."""
    blocks = [part for part in _running(module) if isinstance(part, GatedCrossAttentionBlock)]
    return sorted(blocks, key=lambda block: block.layer_idx)


def _running(module: nn.Module) -> Iterator[nn.Module]:
    copies = module._modules.get("modules_to_save")
    if isinstance(copies, nn.ModuleDict) and "original_module" in module._modules:
        active = [] if getattr(module, "disable_adapters", False) else getattr(module, "active_adapters", [])
        trained = next((copies[name] for name in active if name in copies), None)
        yield from _running(module.get_submodule("original_module") if trained is None else trained)
        return
    yield module
    for child in module.children():
        yield from _running(child)
