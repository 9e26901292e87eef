"""The attention mask with the folded query axis of `layers/attention.py`.

Letters: B text rows, R image rows (B = R * r, each image row serves r text rows), T text tokens, N image tokens, G
query heads that share a K/V head.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..cache.image_layout import rows_to


# If at most this many text positions share an image row, the mask is repeated for each head of a group. Otherwise the
# heads share the mask and attention takes them apart, which is as fast for long text and needs a smaller mask.
MAX_POSITIONS_PER_HEAD = 256


class FoldedMask(NamedTuple):
    """Which keys each query may attend to. All blocks of a forward share it.

    `mask` is `(R, 1, 1, N)` if all queries of an image row see the same tokens, `(R, 1, r * T * G, N)` with an entry
    for each query, or `(R, 1, r * T, N)` if the heads of a group share an entry.
    """

    mask: torch.Tensor | None  # True = attend; no row is all False; None if every query may attend to every key
    visible: torch.Tensor | None  # `(B or 1, T or 1, 1)`, whether a text position sees any image token; None if all do


EVERYTHING = FoldedMask(None, None)


def fold_mask(
    sees: torch.Tensor | None, *, image_rows: int, text_rows: int, text_len: int, group: int, null_key: bool = False
) -> FoldedMask:
    """Folds a mask, and makes a softmax safe for every query.

    For a query that sees nothing the softmax is NaN in some kernels. Its mask becomes all True instead, and the block
    discards the output at this position (`visible`).

    Args:
        sees (`torch.BoolTensor`, *optional*): `(rows, T or 1, N)`, with rows that divide B and are a multiple of R.
        image_rows, text_rows, text_len, group (`int`): R, B, T and G.
        null_key (`bool`): whether the keys start with a null key (quiet softmax). A null key is always visible.
    """
    if sees is None:
        return EVERYTHING
    visible = sees.any(dim=-1, keepdim=True)
    mask = torch.cat([torch.ones_like(visible), sees], dim=-1) if null_key else sees | ~visible
    rows, steps, num_keys = mask.shape
    visible = rows_to(visible, text_rows)
    if rows == image_rows and steps == 1:
        return FoldedMask(mask[:, None], visible)
    repeats = text_rows // image_rows
    heads = group if repeats * text_len <= MAX_POSITIONS_PER_HEAD else 1
    mask = rows_to(mask, text_rows).view(image_rows, repeats, steps, 1, num_keys)
    mask = mask.expand(-1, -1, text_len, heads, -1).reshape(image_rows, 1, -1, num_keys)
    return FoldedMask(mask, visible)
