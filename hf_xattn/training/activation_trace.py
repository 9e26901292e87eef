"""Counts the bytes that a forward holds for the backward, with fake tensors: shapes without values.

Fake tensors follow the code that a real forward runs, down to single operations, and need no memory. The one operation that is replaced
is attention: which kernel torch takes depends on the device, and fake tensors stand on a CPU. The replacement holds what the fused
kernels of a GPU hold (FlashAttention, Dao et al. 2022, algorithm 2): queries, keys, values, the output, and the logarithm of each
query's sum of exponentials. K/V heads are not repeated.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import masking_utils
from transformers.modeling_layers import GradientCheckpointingLayer


class Held(NamedTuple):
    """Bytes that are held when a forward ends.

    Attributes:
        activations (`int`): tensors that autograd has saved, without weights and their copies.
        copies (`int`): copies of weights in another dtype. Autocast keeps them until the forward ends.
        largest_layer (`int`): activations of the layer that holds the most.
    """

    activations: int
    copies: int
    largest_layer: int


def with_fake_weights(model: nn.Module) -> FakeTensorMode:
    """Replaces the weights and buffers of a model by fake ones that stand on a CPU. Returns the mode that they belong to."""
    mode = FakeTensorMode()
    made: dict[int, torch.Tensor] = {}  # a tied weight stays tied
    for module in model.modules():
        named: Any
        for named in (module._parameters, module._buffers):
            for name, tensor in named.items():
                if tensor is None:
                    continue
                if id(tensor) not in made:
                    with mode:
                        fake = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
                        if isinstance(tensor, nn.Parameter):
                            fake = nn.Parameter(fake, requires_grad=tensor.requires_grad)
                    made[id(tensor)] = fake
                named[name] = made[id(tensor)]
    return mode


def held_activations(forward: Callable[[], Any], model: nn.Module, mode: FakeTensorMode, dtype: torch.dtype) -> Held:
    """Runs a forward, and counts what it holds.

    Args:
        forward (`Callable`): makes its inputs, runs the model, and returns the outputs.
        model (`nn.Module`), mode (`FakeTensorMode`): from [`with_fake_weights`].
        dtype (`torch.dtype`): in half precision, the forward runs under autocast.
    """
    weights = {_storage(weight) for weight in (*model.parameters(), *model.buffers())}
    saved: weakref.WeakSet[_Saved] = weakref.WeakSet()
    layers: list[int] = []
    numbers = itertools.count()

    def pack(tensor: torch.Tensor) -> _Saved:
        kept = _Saved(tensor, layers[-1] if layers else None, next(numbers))
        saved.add(kept)
        return kept

    copies, half = _Copies(weights), dtype in (torch.bfloat16, torch.float16)
    with (
        mode,
        copies,
        _FusedAttention(),
        _one_sample_a_row(),
        _in_layers(model, layers),
        saved_tensors_hooks(pack, lambda kept: kept.tensor),
        torch.autocast("cpu", dtype=dtype if half else None, enabled=half),
    ):
        outputs = forward()
    sizes: dict[int, int] = {}
    of_layers: dict[int, int] = {}
    for kept in sorted(saved, key=lambda kept: kept.number):  # what several layers have saved counts for the first
        storage = _storage(kept.tensor)
        if storage in sizes or storage in weights or storage in copies.made:
            continue
        sizes[storage] = kept.tensor.untyped_storage().nbytes()
        if kept.layer is not None:
            of_layers[kept.layer] = of_layers.get(kept.layer, 0) + sizes[storage]
    found = Held(
        activations=sum(sizes.values()),
        copies=sum(copy.untyped_storage().nbytes() for copy in copies.made.values()),
        largest_layer=max(of_layers.values(), default=0),
    )
    del outputs
    return found


class _Saved:
    """What autograd keeps in the place of a tensor: as long as it lives, the tensor is held."""

    def __init__(self, tensor: torch.Tensor, layer: int | None, number: int):
        self.tensor, self.layer, self.number = tensor, layer, number


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


@contextmanager
def _one_sample_a_row() -> Iterator[None]:
    """transformers looks for packed rows in the values of positions. Where it cannot read them, it takes every row for a packed one,
    and makes a mask that a real forward does not have."""
    found = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = lambda position_ids: None
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = found


@contextmanager
def _in_layers(model: nn.Module, layers: list[int]) -> Iterator[None]:
    """Notes in which layer a forward is: the last of `layers`."""
    hooks = []
    for layer in model.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            hooks.append(layer.register_forward_pre_hook(lambda module, _: layers.append(id(module))))
            hooks.append(layer.register_forward_hook(lambda *_: layers.pop() and None))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class _Copies(TorchDispatchMode):
    """Notes the copies of weights in another dtype.

    Attributes:
        made (`dict[int, torch.Tensor]`): by their storage. They are kept, so that no other tensor takes the place of one.
    """

    def __init__(self, weights: set[int]):
        super().__init__()
        self.weights = weights
        self.made: dict[int, torch.Tensor] = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function is torch.ops.aten._to_copy.default and _storage(args[0]) in self.weights:
            self.made[_storage(result)] = result
        return result


class _FusedAttention(TorchFunctionMode):
    """Replaces `scaled_dot_product_attention`, see the head of this file."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is nn.functional.scaled_dot_product_attention:
            return _fused_attention(*args, **(kwargs or {}))
        return function(*args, **(kwargs or {}))


def _fused_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    *_: Any,
    **__: Any,
) -> torch.Tensor:
    if torch.is_autocast_enabled("cpu"):
        query, key, value = (tensor.to(torch.get_autocast_dtype("cpu")) for tensor in (query, key, value))
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype)  # torch adds a mask to the scores
    output: torch.Tensor = _Fused.apply(query, key, value, attn_mask)
    return output


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, mask):
        rows, heads, length, _ = query.shape
        # The kernels put the heads of a token side by side. So the caller's transposition makes no copy.
        output = query.new_empty(rows, length, heads, value.shape[-1]).transpose(1, 2)
        sums = query.new_empty(rows, heads, length, dtype=torch.float32)
        ctx.save_for_backward(query, key, value, mask, output, sums)
        return output

    @staticmethod
    def backward(ctx, *gradients):  # autograd wants one to be there; the trace ends with the forward
        raise NotImplementedError("Fake attention has no gradient: only what a forward holds is counted.")
