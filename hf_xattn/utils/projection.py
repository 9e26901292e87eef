"""Linear layers for image tokens, which are fast on CPUs without half-precision arithmetic.

One call projects the thousands of tokens of an image. On such a CPU, torch multiplies a half-precision matrix row by
row, several times slower than in float32 (`examples/benchmarks`, `projection`). There the layer computes in float32,
which also rounds the result only once.
"""

from __future__ import annotations

import functools

import torch
from torch import nn


MIN_ROWS = 32  # with fewer rows, converting the weights to float32 costs more time than it saves
ROWS_AT_ONCE = 4096  # limits the memory of the float32 copies


@functools.cache
def multiplies_natively(dtype: torch.dtype) -> bool:
    """Whether the matrix kernels of this CPU compute in `dtype`."""
    checks = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}
    if dtype not in checks or not torch.backends.mkldnn.is_available():
        return True
    if dtype == torch.bfloat16 and _cpu_has("avx512"):
        # oneDNN says yes if there is only AVX-512, with which its bfloat16 takes four times as long as float32.
        return _cpu_has("avx512_bf16") or _cpu_has("amx_tile")
    return bool(getattr(torch.ops.mkldnn, checks[dtype])())


def _cpu_has(feature: str) -> bool:
    """Whether this CPU has a feature. False if this torch cannot tell."""
    return bool(getattr(torch.cpu, f"_is_{feature}_supported", bool)())


def to_dtype_of(projection: nn.Linear, states: torch.Tensor) -> torch.Tensor:
    """Casts `states` to the dtype of a projection's weight.

    The hidden states or the image features may have a wider dtype than the weights, for example float32 beside
    bfloat16. Autocast makes the cast itself. A quantized weight, stored as bytes, computes in the dtype of its input.
    """
    dtype = projection.weight.dtype
    if states.dtype == dtype or dtype.itemsize == 1 or torch.is_autocast_enabled(states.device.type):
        return states
    return states.to(dtype)


class ImageLinear(nn.Linear):
    """`nn.Linear` that is faster in CPU inference: many half-precision rows are computed in float32."""

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
