"""Keys and values of images in int8, which take about half of the bytes of bfloat16, or a quarter of float32.

Each image token has one scale for its key and one for its value in each K/V head: `states = steps * scale`, with steps
from -127 to 127 and `scale = max |states| / 127`. Each token is rounded on its own, so images can be selected, combined
and appended without another rounding. int8 only works for inference, because rounding has no gradient.

- The scales are float32 in a model of any dtype. In float16, the scale of a small token would lose its digits or be
  zero. In bfloat16, it would add an error as large as that of the steps. With a head width of 128, the scales take 3 %
  of the bytes.
- A token that is zero stays exactly zero. A token with NaN or infinity becomes NaN as a whole. int8 has no such values,
  and finite values would hide the fault.

Letters in shapes as in `layers/attention.py`: R image rows, K K/V heads, N image tokens, D head width, Q folded
queries.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..cache.states import FORMS, StoredStates
from ..utils.projection import multiplies_natively


INT8 = "int8"
STEPS = 127
SMALLEST = torch.finfo(torch.float32).tiny  # Smaller scales have few digits. A token with such a scale becomes zero.
LARGEST = torch.finfo(torch.float32).max / STEPS * (1 - 2**-22)  # With a larger scale, 127 steps would be infinite.
BYTES_AT_ONCE = 2**22  # Size of a copy in the dtype of the product, which should fit into the processor's cache.


@dataclass(frozen=True, eq=False)
class Int8States(StoredStates):
    """Keys or values in int8, with float32 scales."""

    form = INT8

    @classmethod
    def quantize(cls, states: torch.Tensor) -> Int8States:
        """Rounds keys or values `(R, K, N, D)` to int8, with a scale for each row, head and token."""
        wide = states.to(torch.float32)
        largest = wide.abs().amax(dim=-1, keepdim=True)
        scales = (largest / STEPS).clamp_(max=LARGEST)
        scales = torch.where(scales < SMALLEST, 0.0, scales)
        scales = torch.where(largest.isfinite(), scales, torch.nan)
        steps = torch.where(scales > 0, wide / scales, 0.0).round_().clamp_(-STEPS, STEPS)
        return cls(steps.to(torch.int8), scales, states.dtype)

    def dequantized(self) -> torch.Tensor:
        """Returns the states `(R, K, N, D)` in `dtype`. The product of steps and scales is rounded once."""
        if self.dtype == torch.float32 or self.device.type != "cpu" or torch.compiler.is_compiling():
            return (self.steps.to(torch.float32) * self.scales).to(self.dtype)
        states = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        for part in _parts_of_tokens(self.shape, torch.float32):
            states[:, :, part] = self.steps[:, :, part].to(torch.float32).mul_(self.scales[:, :, part])
        return states

    @staticmethod
    def multiplies_few(query: torch.Tensor) -> bool:
        """Whether [`attend`] with queries `(R, K, Q, D)` needs less time and memory than attention over floats.

        - With many queries, the products take longer than the conversion to floats (measured with a head width of 128),
          and the scores take more memory than dequantized keys and values.
        - With gradients, the buffer of [`attend`] would be overwritten before the backward pass.
        - Compiled code uses floats, because it would be compiled again for each number of parts.
        """
        few = 2 * query.shape[2] <= query.shape[3]
        return few and not torch.is_grad_enabled() and not torch.compiler.is_compiling()

    def attend(
        self,
        query: torch.Tensor,
        value: Int8States,
        attention_mask: torch.Tensor | None,
        scaling: float,
        position_bias: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Computes attention of a few queries over keys and values in int8, without a whole copy in another dtype.

        The scales are applied outside of the products: the scale of a key to its score, and the scale of a value to its
        probability. The steps are cast to the dtype of the product, which is exact. This happens for some tokens at a
        time, in one buffer. In bfloat16, the product rounds the scores before the softmax, which a fused kernel does
        not do, so large scores get a large error.

        Args:
            query (`torch.Tensor`): `(R, K, Q, D)`.
            value ([`Int8States`]): `(R, K, N, D)`.
            attention_mask (`torch.BoolTensor`, *optional*): `(R, 1, Q or 1, N)`, True = attend.
            position_bias (`torch.Tensor`, *optional*): `(R, K, Q, N)`.

        Returns:
            The output `(R, Q, K, D)` and the weights `(R, K, Q, N)`, as transformers' attention functions return them.
        """
        # float16 is never used, because sums of steps would overflow it.
        native = self.dtype == torch.bfloat16 and (query.device.type != "cpu" or multiplies_natively(self.dtype))
        dtype = torch.bfloat16 if native else torch.float32
        parts = _parts_of_tokens(self.shape, dtype)
        buffer = query.new_empty(*self.shape[:2], parts[0].stop, self.shape[3], dtype=dtype)

        def cast(states: Int8States, part: slice) -> torch.Tensor:
            steps = states.steps[:, :, part]
            return buffer[:, :, : steps.shape[2]].copy_(steps)

        folded = query.to(dtype)
        products = [torch.matmul(folded, cast(self, part).transpose(-1, -2)) for part in parts]
        scores = torch.cat(products, dim=-1).to(torch.float32) * (self.scales.transpose(-1, -2) * scaling)
        if position_bias is not None:
            scores = scores + position_bias
        if attention_mask is not None:
            scores = scores.masked_fill(~attention_mask, torch.finfo(scores.dtype).min)
        weights = scores.softmax(dim=-1)
        scaled = (weights * value.scales.transpose(-1, -2)).to(dtype)
        output = torch.zeros(query.shape, dtype=torch.float32, device=query.device)
        for part in parts:
            output += torch.matmul(scaled[..., part], cast(value, part))
        return output.to(self.dtype).transpose(1, 2), weights.to(self.dtype)


def _parts_of_tokens(shape: torch.Size, dtype: torch.dtype) -> list[slice]:
    """Splits the tokens of `(R, K, N, D)` into parts. The copy of a part in `dtype` takes at most `BYTES_AT_ONCE`, or
    the part has 256 tokens.
    """
    rows, heads, tokens, width = shape
    count = min(max(BYTES_AT_ONCE // (rows * heads * width * dtype.itemsize), 256), tokens)
    return [slice(start, min(start + count, tokens)) for start in range(0, tokens, count)]


FORMS[INT8] = Int8States
