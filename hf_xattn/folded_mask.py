"""A mask in the layout of the kernels.

Attention puts all queries that share keys and values into one query axis (see `attention.py`), so the mask has that axis too.

Letters: B text rows, R image rows (B = R * r, each image row serves r text rows), T text tokens, N image tokens, G query heads that
share a K/V head.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .image_layout import rows_to


# Up to so many text positions that share an image row, a mask is written out for each head of a group. Beyond, heads share the mask
# and attention takes them apart: as fast there, and the mask is not several times as large.
MAX_POSITIONS_PER_HEAD = 256


class FoldedMask(NamedTuple):
    """Which keys each query may attend to, once for all blocks of a forward.

    Attributes:
        mask (`torch.BoolTensor`, *optional*): True = attend, without an all-False row; `(R, 1, 1, N)` where all queries of a row
            see the same, `(R, 1, r * T * G, N)` with an entry for each query, or `(R, 1, r * T, N)` where the heads of a group
            share one. None where everything may be attended.
        visible (`torch.BoolTensor`, *optional*): `(B or 1, T or 1, 1)`, whether a text position sees any image token; None where
            all do.
    """

    mask: torch.Tensor | None
    visible: torch.Tensor | None


EVERYTHING = FoldedMask(None, None)


def fold_mask(
    sees: torch.Tensor | None, *, image_rows: int, text_rows: int, text_len: int, group: int, null_key: bool = False
) -> FoldedMask:
    """Brings a mask into the folded layout, and makes it safe to take a softmax over.

    A row that sees nothing would be a softmax over nothing, NaN in some kernels. It gets to see everything instead:
    the block discards what comes out at such positions (`visible`).

    Args:
        sees (`torch.BoolTensor`, *optional*): `(rows, T or 1, N)`, with rows that divide B and are a multiple of R.
        image_rows, text_rows, text_len (`int`): R, B and T.
        group (`int`): G.
        null_key (`bool`): the keys start with a null key (quiet softmax), which is always visible.
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
