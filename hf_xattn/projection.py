"""Linear layers over the tokens of images.

An image has thousands of tokens, all projected at once. On a CPU without arithmetic in half precision torch multiplies such a
matrix row by row, several times slower than in float32 (`examples/benchmarks`, `projection`), so there the layer goes through
float32, which also rounds only once.
"""

from __future__ import annotations

import functools

import torch
from torch import nn


MIN_ROWS = 32  # from here on, widening the weights costs less than it saves
ROWS_AT_ONCE = 4096  # bounds the copies in float32


@functools.cache
def multiplies_natively(dtype: torch.dtype) -> bool:
    """Whether this CPU's matrix kernels compute in `dtype`."""
    checks = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}
    if dtype not in checks or not torch.backends.mkldnn.is_available():
        return True
    return bool(getattr(torch.ops.mkldnn, checks[dtype])())


def to_dtype_of(projection: nn.Linear, states: torch.Tensor) -> torch.Tensor:
    """`states` in the dtype that a projection computes in: that of its weight.

    The text stream or the image features may be wider than the model. Under autocast torch casts itself; a quantized weight, stored
    in bytes, computes in the dtype of its input.
    """
    dtype = projection.weight.dtype
    if states.dtype == dtype or dtype.itemsize == 1 or torch.is_autocast_enabled(states.device.type):
        return states
    return states.to(dtype)


class ImageLinear(nn.Linear):
    """`nn.Linear`, in inference by the fastest way there is for many rows."""

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """`(..., in_features)` to `(..., out_features)`, in the dtype of `states`."""
        if (
            states.device.type != "cpu"
            or torch.is_grad_enabled()
            or torch.compiler.is_compiling()
            or type(self.weight) is not nn.Parameter  # sharded or quantized
            or states.dtype != self.weight.dtype
            or states.shape[:-1].numel() < MIN_ROWS
            or multiplies_natively(states.dtype)
        ):
            return super().forward(states)
        weight, bias = self.weight.float(), None if self.bias is None else self.bias.float()
        output = states.new_empty(*states.shape[:-1], self.out_features)
        rows = output.view(-1, self.out_features).split(ROWS_AT_ONCE)
        for part, row in zip(states.flatten(0, -2).split(ROWS_AT_ONCE), rows):
            row.copy_(nn.functional.linear(part.float(), weight, bias))
        return output
