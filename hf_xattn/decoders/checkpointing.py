"""Reentrant activation checkpointing (`use_reentrant=True`) of decoder layers that carry blocks.

Reentrant checkpointing gives gradients only to the positional arguments of a layer. The images are a keyword argument.
So the backward pass of each layer would go through the graph that encoded the images, and the second layer would find
this graph freed. This file makes the images positional arguments of the checkpointed function. Non-reentrant
checkpointing, the default of transformers, does not need it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from ..cache.cross_cache import CrossAttentionLayer
from ..cache.int8_cache import dense
from ..layers.block import GatedCrossAttentionBlock, cross_attention_blocks
from ..layers.context import KEYWORD, CrossAttentionContext


# transformers sets this attribute on a layer. The layer calls it with its own call, bound to all keyword arguments.
FUNCTION = "_gradient_checkpointing_func"


def _read_function(layer: nn.Module) -> Callable[..., Any]:
    if FUNCTION not in layer.__dict__:
        raise AttributeError(FUNCTION)
    function = layer.__dict__[FUNCTION]
    if getattr(function, "keywords", {}).get("use_reentrant") is False:
        return function
    if torch.compiler.is_compiling() and isinstance(function, functools.partial):
        # A graph of `torch.compile` recomputes without a reentrant backward. This is also right where the graph breaks.
        return functools.partial(function, use_reentrant=False)
    return functools.partial(_checkpoint_layer, layer, function)


def _write_function(layer: nn.Module, function: Callable[..., Any]) -> None:
    layer.__dict__[FUNCTION] = function


# For the class of a layer. A property, because checkpointing may be enabled before the blocks are inserted, or on the
# text model only.
checkpointing_function = property(_read_function, _write_function)


def _checkpoint_layer(
    layer: nn.Module, checkpoint: Callable[..., Any], forward: functools.partial[Any], *args: Any
) -> torch.Tensor | tuple[Any, ...]:
    """Checkpoints a layer's `forward`. Tensors of the context that require a gradient become positional arguments."""
    context = forward.keywords.get(KEYWORD)
    blocks = cross_attention_blocks(layer)
    if context is None or not blocks or not torch.is_grad_enabled():
        return checkpoint(forward, *args)
    if args and args[0] is None:
        return forward(*args)  # returns nested tuples, which reentrant checkpointing leaves without gradients
    if any(isinstance(part, GradientCheckpointingLayer) for part in layer.modules() if part is not layer):
        name = type(layer).__mro__[1].__name__
        raise ValueError(
            f"Gradient checkpointing with `use_reentrant=True` does not support {name}, which contains another "
            "checkpointed layer. Use "
            '`gradient_checkpointing_kwargs={"use_reentrant": False}`.'
        )
    given, put_back = _tensors_of(context, blocks)
    if any(weight.requires_grad for weight in layer.parameters()):
        # Without an input that requires a gradient, the weights would silently get none.
        given.append(torch.empty(0, requires_grad=True))
    count = len(given)

    def run(*inputs: Any) -> torch.Tensor | tuple[Any, ...]:
        return forward(*inputs[count:], **{KEYWORD: put_back(inputs[:count])})

    return checkpoint(run, *given, *args)


def _tensors_of(
    context: CrossAttentionContext, blocks: list[GatedCrossAttentionBlock]
) -> tuple[list[torch.Tensor], Callable[[tuple[torch.Tensor, ...]], CrossAttentionContext]]:
    """The tensors of a context that require a gradient in `blocks`, and a function that puts others in their place."""
    cache = context.cache
    given: list[torch.Tensor] = []
    learning: list[int] = []
    for block in blocks:
        keys_values = context.read(block.layer_idx)
        if any(states.requires_grad for states in keys_values):
            learning.append(block.layer_idx)
            given.extend(dense(states) for states in keys_values)

    def put_back(tensors: tuple[torch.Tensor, ...]) -> CrossAttentionContext:
        if not learning or cache is None:
            return context
        shared = cache.shared()
        for place, index in enumerate(learning):
            shared.layers[index] = CrossAttentionLayer(*tensors[2 * place : 2 * place + 2])
        return replace(context, cache=shared)

    return given, put_back
