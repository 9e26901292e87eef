"""Reentrant activation checkpointing (`use_reentrant=True`) of decoder layers that carry blocks.

It gives gradients to the positional arguments of a layer only. The images travel as a keyword argument, so each layer's recomputation
would run its backward pass through the graph that made them, and the second layer finds that graph freed. Here the images become
positional arguments of the checkpointed function. The non-reentrant way, the default of transformers, needs none of this.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from .block import GatedCrossAttentionBlock
from .context import KEYWORD, CrossAttentionContext
from .cross_cache import CrossAttentionLayer


# transformers sets this attribute on a layer, and the layer calls it with its own `forward`, bound to all keyword arguments.
FUNCTION = "_gradient_checkpointing_func"


def _read_function(layer: nn.Module) -> Callable[..., Any]:
    if FUNCTION not in layer.__dict__:
        raise AttributeError(FUNCTION)
    function = layer.__dict__[FUNCTION]
    if getattr(function, "keywords", {}).get("use_reentrant") is False:
        return function
    return functools.partial(_checkpoint_layer, function)


def _write_function(layer: nn.Module, function: Callable[..., Any]) -> None:
    layer.__dict__[FUNCTION] = function


# For the class of a layer. A property, because checkpointing may be switched on before the blocks go in, or on the text model alone.
checkpointing_function = property(_read_function, _write_function)


def _checkpoint_layer(
    checkpoint: Callable[..., Any], forward: functools.partial[Any], *args: Any
) -> torch.Tensor | tuple[Any, ...]:
    """Checkpoints a layer's `forward`, with all tensors of the context that want gradients as positional arguments."""
    layer, context = forward.args[0], forward.keywords.get(KEYWORD)
    blocks = [part for part in layer.children() if isinstance(part, GatedCrossAttentionBlock)]
    if context is None or not blocks or not torch.is_grad_enabled():
        return checkpoint(forward, *args)
    if context.encode_only:
        return forward(*args)  # gives a nest of tensors, which reentrant checkpointing leaves without gradients
    if any(isinstance(part, GradientCheckpointingLayer) for part in layer.modules() if part is not layer):
        name = type(layer).__mro__[1].__name__
        raise ValueError(
            f"Gradient checkpointing with `use_reentrant=True` cannot go through {name}, which checkpoints a layer inside of itself. Use "
            '`gradient_checkpointing_kwargs={"use_reentrant": False}`.'
        )
    given, put_back = _tensors_of(context, blocks)
    if any(weight.requires_grad for weight in layer.parameters()):
        # Without an input that wants a gradient, the weights would silently get none.
        given.append(torch.empty(0, requires_grad=True))
    count = len(given)

    def run(*inputs: Any) -> torch.Tensor | tuple[Any, ...]:
        return forward(*inputs[count:], **{KEYWORD: put_back(inputs[:count])})

    return checkpoint(run, *given, *args)


def _tensors_of(
    context: CrossAttentionContext, blocks: list[GatedCrossAttentionBlock]
) -> tuple[list[torch.Tensor], Callable[[tuple[torch.Tensor, ...]], CrossAttentionContext]]:
    """The tensors of a context that want gradients in `blocks`, and a function that makes the context of others in their place."""
    states, cache = context.cross_attention_states, context.cache
    with_states = states is not None and states.requires_grad
    given = [states] if states is not None and states.requires_grad else []
    learning: list[int] = []
    for block in blocks:
        keys_values = context.cached(block.layer_idx)
        if keys_values is not None and any(tensor.requires_grad for tensor in keys_values):
            learning.append(block.layer_idx)
            given.extend(keys_values)

    def put_back(tensors: tuple[torch.Tensor, ...]) -> CrossAttentionContext:
        changes: dict[str, Any] = {}
        if with_states:
            changes["cross_attention_states"], tensors = tensors[0], tensors[1:]
        if learning and cache is not None:
            changes["cache"] = shared = cache.shared()
            for place, index in enumerate(learning):
                shared.layers[index] = CrossAttentionLayer(*tensors[2 * place : 2 * place + 2])
        return replace(context, **changes)

    return given, put_back
