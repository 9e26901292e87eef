"""Keys and values of images in int8: about half the bytes of bfloat16, a quarter of float32's.

Each image token has one scale for its key and one for its value in each K/V head: `states = steps * scale`, with steps
from -127 to 127 and `scale = max |states| / 127`. A token is rounded by itself, so images can be selected, combined
and appended without rounding them again. It is for inference: rounding has no gradient.

- The scales are float32 in a model of any dtype. In float16 the scale of a small token would lose its digits or be
  zero, in bfloat16 it would add an error as large as that of the steps. For heads of width 128 they take 3 % of the
  bytes.
- A token that is zero is exactly zero again. A token with NaN or infinity becomes NaN as a whole: the steps have no
  such values, and finite ones would hide the fault.

Letters as in `layers/attention.py`: R image rows, K K/V heads, N image tokens, D head width, Q folded queries.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from ..utils.projection import multiplies_natively
from ..utils.tensor_checks import type_name


INT8 = "int8"
STEPS = 127
SMALLEST = torch.finfo(torch.float32).tiny  # smaller scales have few digits; a token with such a scale is zero
LARGEST = torch.finfo(torch.float32).max / STEPS * (1 - 2**-22)  # a larger scale would make infinity of 127 steps
BYTES_AT_ONCE = 2**22  # of a copy in the dtype of the product; it should stay in the processor's cache


@dataclass(frozen=True, eq=False)
class Int8States:
    """Keys or values in int8. Reads like the tensor `(R, K, N, D)` that it stands for, if whole tokens are taken."""

    steps: torch.Tensor  # int8, (R, K, N, D)
    scales: torch.Tensor  # float32, (R, K, N, 1)
    dtype: torch.dtype  # of the states before rounding

    requires_grad = False

    @property
    def shape(self) -> torch.Size:
        return self.steps.shape

    @property
    def device(self) -> torch.device:
        return self.steps.device

    @property
    def nbytes(self) -> int:
        return self.steps.nbytes + self.scales.nbytes

    def mapped(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Int8States:
        """Changes steps and scales alike. `change` must leave the last axis alone."""
        return Int8States(change(self.steps), change(self.scales), self.dtype)

    def __getitem__(self, index: Any) -> Int8States:
        return self.mapped(lambda part: part[index])

    def __setitem__(self, index: Any, states: Int8States) -> None:
        self.steps[index], self.scales[index] = states.steps, states.scales

    def new_zeros(self, *shape: int) -> Int8States:
        return Int8States(self.steps.new_zeros(shape), self.scales.new_zeros(*shape[:-1], 1), self.dtype)

    def dequantized(self) -> torch.Tensor:
        """`(R, K, N, D)` in `dtype`. The product is rounded once."""
        if self.dtype == torch.float32 or self.device.type != "cpu" or torch.compiler.is_compiling():
            return (self.steps.to(torch.float32) * self.scales).to(self.dtype)
        states = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        for part in _parts_of_tokens(self.shape, torch.float32):
            states[:, :, part] = self.steps[:, :, part].to(torch.float32).mul_(self.scales[:, :, part])
        return states


States: TypeAlias = torch.Tensor | Int8States


def check_cache_dtype(name: str, value: Any) -> str | None:
    """Returns the checked value of an argument: `"int8"`, or None for the dtype that the model computes in."""
    if value is None or (isinstance(value, str) and value == INT8):
        return value
    expected = f'Expected `{name}` to be "{INT8}" or None (the dtype that the model computes in), got'
    if not isinstance(value, str):
        raise TypeError(f"{expected} {value!r} ({type_name(value)}).")
    raise ValueError(f"{expected} {value!r}.")


def check_no_gradient(cache_dtype: str | None) -> None:
    """Raises a `ValueError` if images in int8 are to be made while gradients are recorded."""
    if cache_dtype is not None and torch.is_grad_enabled():
        raise ValueError(
            "Expected no gradients to be recorded, because the images are kept with "
            f'`cache_dtype="{cache_dtype}"`, which is for '
            "inference only: rounding has no gradient. Call the model under `torch.no_grad()`."
        )


def check_not_training(cache_dtype: str | None) -> None:
    """Raises a `ValueError` for training on images in int8."""
    if cache_dtype is not None:
        raise ValueError(
            f'The images in `cache` are kept with `cache_dtype="{cache_dtype}"`, which is for inference '
            "only. To train on "
            "encoded images, call `encode_images` without `cache_dtype`; otherwise call `model.eval()` or use "
            "`torch.no_grad()`."
        )


def quantize(states: torch.Tensor) -> Int8States:
    """Rounds keys or values `(R, K, N, D)` to int8, with a scale for each row, head and token."""
    wide = states.to(torch.float32)
    largest = wide.abs().amax(dim=-1, keepdim=True)
    scales = (largest / STEPS).clamp_(max=LARGEST)
    scales = torch.where(scales < SMALLEST, 0.0, scales)
    scales = torch.where(largest.isfinite(), scales, torch.nan)
    steps = torch.where(scales > 0, wide / scales, 0.0).round_().clamp_(-STEPS, STEPS)
    return Int8States(steps.to(torch.int8), scales, states.dtype)


def as_stored(states: States, cache_dtype: str | None) -> States:
    """Keys or values in the form of a cache of `cache_dtype`."""
    if isinstance(states, Int8States):
        return states if cache_dtype == INT8 else states.dequantized()
    return quantize(states) if cache_dtype == INT8 else states


def dense(states: States) -> torch.Tensor:
    return states.dequantized() if isinstance(states, Int8States) else states


def map_states(states: States, change: Callable[[torch.Tensor], torch.Tensor]) -> States:
    """Applies `change`, which leaves the last axis alone, to the tensor or to both tensors of the states."""
    return states.mapped(change) if isinstance(states, Int8States) else change(states)


def concatenate(parts: Sequence[States], dim: int) -> States:
    """Like `torch.cat`, for states that are all floats or all int8."""
    floats = [part for part in parts if isinstance(part, torch.Tensor)]
    if len(floats) == len(parts):
        return torch.cat(floats, dim=dim)
    rounded = [part for part in parts if isinstance(part, Int8States)]
    dtype = rounded[0].dtype
    for part in rounded[1:]:
        dtype = torch.promote_types(dtype, part.dtype)
    steps, scales = ([getattr(part, name) for part in rounded] for name in ("steps", "scales"))
    return Int8States(torch.cat(steps, dim=dim), torch.cat(scales, dim=dim), dtype)


def multiplies_few(query: torch.Tensor) -> bool:
    """Whether [`attend`] with queries `(R, K, Q, D)` needs less time and memory than dequantising keys and values.

    With more queries, the products take longer than the conversion (seen at a head width of 128), and the scores more
    memory than dequantised keys and values. With gradients, its buffer would be overwritten before the backward pass.
    Compiled code gets tensors of floats, because the number of parts would be a guard.
    """
    few = 2 * query.shape[2] <= query.shape[3]
    return few and not torch.is_grad_enabled() and not torch.compiler.is_compiling()


def attend(
    query: torch.Tensor,
    key: Int8States,
    value: Int8States,
    attention_mask: torch.Tensor | None,
    scaling: float,
    position_bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of a few queries over keys and values in int8, without a copy of them in another dtype.

    The scales are applied outside of the products: that of a key to its score, that of a value to its probability. The
    steps are cast to the dtype of the product, which is exact, some tokens at a time in one buffer. In bfloat16 the
    product rounds the scores before the softmax, which a fused kernel does not: large scores get a large error.

    Args:
        query (`torch.Tensor`): `(R, K, Q, D)`.
        key, value ([`Int8States`]): `(R, K, N, D)`.
        attention_mask (`torch.BoolTensor`, *optional*): `(R, 1, Q or 1, N)`, True = attend.
        position_bias (`torch.Tensor`, *optional*): `(R, K, Q, N)`.

    Returns:
        as from transformers' attention interface: the output `(R, Q, K, D)` and the weights `(R, K, Q, N)`.
    """
    dtype = _dtype_of_product(key.dtype, query.device)
    parts = _parts_of_tokens(key.shape, dtype)
    buffer = query.new_empty(*key.shape[:2], parts[0].stop, key.shape[3], dtype=dtype)

    def cast(states: Int8States, part: slice) -> torch.Tensor:
        steps = states.steps[:, :, part]
        return buffer[:, :, : steps.shape[2]].copy_(steps)

    folded = query.to(dtype)
    products = [torch.matmul(folded, cast(key, part).transpose(-1, -2)) for part in parts]
    scores = torch.cat(products, dim=-1).to(torch.float32) * (key.scales.transpose(-1, -2) * scaling)
    if position_bias is not None:
        scores = scores + position_bias
    if attention_mask is not None:
        scores = scores.masked_fill(~attention_mask, torch.finfo(scores.dtype).min)
    weights = scores.softmax(dim=-1)
    scaled = (weights * value.scales.transpose(-1, -2)).to(dtype)
    output = torch.zeros(query.shape, dtype=torch.float32, device=query.device)
    for part in parts:
        output += torch.matmul(scaled[..., part], cast(value, part))
    return output.to(key.dtype).transpose(1, 2), weights.to(key.dtype)


def _dtype_of_product(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """bfloat16 where it is multiplied natively, float32 otherwise. Sums of steps would overflow float16."""
    if dtype == torch.bfloat16 and (device.type != "cpu" or multiplies_natively(dtype)):
        return dtype
    return torch.float32


def _parts_of_tokens(shape: torch.Size, dtype: torch.dtype) -> list[slice]:
    """Splits the tokens of `(R, K, N, D)` into parts whose copy in `dtype` takes `BYTES_AT_ONCE`, or has 256 tokens."""
    rows, heads, tokens, width = shape
    count = min(max(BYTES_AT_ONCE // (rows * heads * width * dtype.itemsize), 256), tokens)
    return [slice(start, min(start + count, tokens)) for start in range(0, tokens, count)]
