"""Attention in half precision on a CPU that does not compute in it.

Without float16 arithmetic, torch's fused kernel converts number by number, again for each query. Here a few heads at a time are copied
to float32. It is 1.3 to 4 times as fast, and rounds only the result (`examples/benchmarks/decode_attention.py`). bfloat16 gains
nothing: its conversion is a shift, which the fused kernel does as it reads.
"""

from __future__ import annotations

import torch
from torch import nn

from ..utils.projection import multiplies_natively


HEADS_AT_ONCE = 2  # the float32 copies of two heads stay in a processor's cache


def attends_in_float32(query: torch.Tensor, dropout: float) -> bool:
    """Whether [`attend_in_float32`] is the way to attend. Training keeps the fused kernel, which saves no copies for backward."""
    return (
        query.dtype == torch.float16
        and query.device.type == "cpu"
        and not (dropout or torch.is_grad_enabled() or torch.compiler.is_compiling())
        and not multiplies_natively(torch.float16)
    )


def attend_in_float32(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scaling: float
) -> torch.Tensor:
    """`torch.nn.functional.scaled_dot_product_attention` on float32 copies of a few heads at a time.

    Args:
        query (`torch.Tensor`): `(rows, heads, queries, head_dim)`; consecutive heads may share a K/V head.
        key, value (`torch.Tensor`): `(rows, kv_heads, tokens, head_dim)`.
        mask (`torch.BoolTensor`, *optional*): True = attend; `(rows, 1, queries or 1, tokens)`. No row is all False.
        scaling (`float`): factor of the scores.

    Returns:
        `torch.Tensor`: shape and dtype of `query`.
    """
    output = torch.empty_like(query)
    group = query.shape[1] // key.shape[1]
    for row in range(key.shape[0]):
        seen = None if mask is None else mask[row : row + 1]
        for head in range(0, key.shape[1], HEADS_AT_ONCE):
            heads = slice(head, head + HEADS_AT_ONCE)
            queries = slice(head * group, (head + HEADS_AT_ONCE) * group)
            output[row : row + 1, queries] = nn.functional.scaled_dot_product_attention(
                query[row : row + 1, queries].float(),
                key[row : row + 1, heads].float(),
                value[row : row + 1, heads].float(),
                attn_mask=seen,
                scale=scaling,
                enable_gqa=group > 1,
            )
    return output
