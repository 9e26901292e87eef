"""Frozen modules stay in evaluation mode while the rest of a model trains.

In training mode, the results of frozen weights would depend on chance and on the batch: dropout, router noise,
LayerDrop, statistics of batch norms.
"""

from __future__ import annotations

from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from ..decoders.insertion import BLOCKS
from ..utils.quantized_weights import is_packed, is_quantized


def keep_frozen_in_eval(module: nn.Module) -> None:
    """Sets the frozen modules inside a module to evaluation mode.

    A module is frozen if it has weights and none of them trains. A module without weights, such as a dropout, goes with
    the module around it. A decoder layer and the block inside it are looked at separately. Two kinds keep their mode:

    - A layer that checkpoints activations itself, which transformers does in training mode only.
    - Layers with quantized weights: some pack them for inference in evaluation mode, and then pass on no gradient.
    """
    trains: dict[nn.Module, bool | None] = {}
    roots = [module]
    while roots:
        root = roots.pop()
        _look(root, trains)
        _apply(root, trains, True, roots)


def _look(module: nn.Module, trains: dict[nn.Module, bool | None]) -> bool | None:
    """Notes for a module and those inside whether any weight trains; None without weights."""
    found = [weight.requires_grad for weight in module._parameters.values() if weight is not None]
    for name, child in module._modules.items():
        if child is not None and name not in BLOCKS:
            inside = _look(child, trains)
            if inside is not None:
                found.append(inside)
    trains[module] = any(found) if found else None
    return trains[module]


def _apply(module: nn.Module, trains: dict[nn.Module, bool | None], around: bool, roots: list[nn.Module]) -> None:
    own = trains[module]
    learns = around if own is None else own
    quantized = is_packed(module) or any(w is not None and is_quantized(w) for w in module._parameters.values())
    if not learns and not quantized and not _checkpoints(module):
        module.training = False
    for name, child in module._modules.items():
        if child is not None and name in BLOCKS:
            roots.append(child)
        elif child is not None:
            _apply(child, trains, learns, roots)


def _checkpoints(module: nn.Module) -> bool:
    """Whether a module recomputes activations itself. Decoders with custom code may do so for their layers."""
    if not getattr(module, "gradient_checkpointing", False):
        return False
    return not any(isinstance(child, GradientCheckpointingLayer) for child in module.modules() if child is not module)
