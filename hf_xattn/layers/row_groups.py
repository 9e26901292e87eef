"""Attention over rows with different numbers of image tokens: similar neighbours share a call of the kernel.

The keys and values of a batch have the width of its longest row. A kernel reads all that it is given, masked or not,
so each group of rows is given its own tokens only. Where padding follows the tokens of a row, these are a view.
Padding between them (tiles, later turns) is left out by a copy, where a copy costs less than the padding. A call has a
cost of its own, too, so rows stay together where padding costs less.

    keys of row 0  x . . . . . . .   one call, 1 wide
         row 1     x . . . . . . .
         row 2     x x x x x x x x   one call
         row 3     x . . . . . . x   one call, 2 wide, of a copy
         row 4     . . . . . . . .   no call
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from ..cache.int8_cache import States, map_states
from ..cache.real_tokens import RowSpans, Span


class RowGroup(NamedTuple):
    """The neighbouring image rows `first ... end - 1`, which share a call."""

    first: int
    end: int
    spans: tuple[Span, ...]  # first and end of each run of keys that they read; empty if they see none
    masked: bool  # whether some text may not see all of these keys

    @property
    def is_view(self) -> bool:
        """Whether the keys are the first ones of the rows, or none."""
        return not self.spans or (len(self.spans) == 1 and self.spans[0][0] == 0)

    @property
    def length(self) -> int:
        return self.spans[-1][1] if self.spans else 0


class CallCost(NamedTuple):
    """What one more call of the kernel costs on a kind of device."""

    numbers: int  # numbers of keys and values that the kernel reads in the time that a call costs
    # up to this number, a kernel spends its time on reading keys; twice as many queries take as long as two readings
    queries: int


# 25 microseconds at 20 GB/s of bfloat16. Elsewhere: 15 microseconds at 2 TB/s, from data sheets.
ON_CPU = CallCost(2**18, 8)
ELSEWHERE = CallCost(2**24, 256)
COPY = 2  # copying a number takes as long as reading it twice


def group_rows(
    rows: RowSpans | None,
    *,
    num_tokens: int,
    token_size: int,
    queries: int,
    null_key: bool,
    only_padding: bool,
    device: torch.device,
) -> tuple[RowGroup, ...] | None:
    """Decides which rows share a call; None where one call for all is best.

    Args:
        rows ([`RowSpans`], *optional*): of the images; None if every row reads all.
        num_tokens (`int`): width of keys and values, without a null key.
        token_size (`int`): numbers in the keys and values of a token.
        queries (`int`): of an image row, for each K/V head.
        null_key (`bool`): whether the keys start with a null key.
        only_padding (`bool`): whether nothing but padding hides image tokens.
    """
    if rows is None:
        return None
    cost = ON_CPU if device.type == "cpu" else ELSEWHERE
    reads = max(1, queries // cost.queries)  # the time that a key takes, in readings
    call = cost.numbers / (token_size * reads)  # the time that a call costs, in keys
    groups: list[RowGroup] = []
    for row, (spans, shared) in enumerate(zip(*rows)):
        group = _own_group(row, spans, shared and only_padding, reads, call)
        if groups:
            last, count = groups[-1], row - groups[-1].first
            masked = last.masked or group.masked
            if last.spans == group.spans:
                groups[-1] = last._replace(end=group.end, masked=masked)
                continue
            width = max(last.length, group.length)
            padding = width - group.length + (width - last.length) * count
            if last.is_view and group.is_view and padding <= call:
                groups[-1] = RowGroup(last.first, group.end, ((0, width),), True)
                continue
        groups.append(group)
    if len(groups) == 1 and groups[0].spans in ((), ((0, num_tokens),)):
        return None
    return tuple(map(_with_null_key, groups)) if null_key else tuple(groups)


def _own_group(row: int, spans: tuple[Span, ...], whole: bool, reads: int, call: float) -> RowGroup:
    """The group of one row. `whole`: all its text sees all its real tokens."""
    group = RowGroup(row, row + 1, spans, not whole)
    if group.is_view:
        return group
    real = sum(end - first for first, end in spans)
    if (group.length - real) * reads > COPY * real + call * reads:
        return group
    return group._replace(spans=((0, group.length),), masked=True)


def _with_null_key(group: RowGroup) -> RowGroup:
    """The group for keys with a null key in front, which all text sees."""
    spans = tuple((first + 1, end + 1) for first, end in group.spans)
    if not spans:
        return group
    return group._replace(spans=((0, spans[0][1]), *spans[1:]) if spans[0][0] == 1 else ((0, 1), *spans))


def attend_by_group(
    attend: Callable[..., tuple[torch.Tensor, torch.Tensor | None]],
    groups: tuple[RowGroup, ...],
    query: torch.Tensor,
    key: States,
    value: States,
    mask: torch.Tensor | None,
    position_bias: torch.Tensor | None,
) -> torch.Tensor:
    """Calls `attend` for each group of rows.

    Args:
        attend (`Callable`): takes query, key, value, mask, bias. Returns `(rows, queries, K, D)`, and weights.
        query (`torch.Tensor`): `(R, K, queries, D)`.
        key, value (`torch.Tensor` or [`Int8States`]): `(R, K, N, D)`.
        mask (`torch.BoolTensor`, *optional*): `(R, 1, 1 or more, N)`.
        position_bias (`torch.Tensor`, *optional*): `(R, K, queries, N)`.

    Returns:
        `torch.Tensor`: `(R, queries, K, D)`; zeros for rows that see no image.
    """
    parts = []
    for group in groups:
        first, end, spans, masked = group
        asked = query[first:end]
        if not spans:
            parts.append(asked.new_zeros(asked.transpose(1, 2).shape, dtype=key.dtype))
            continue
        read = partial(_read, group=group, dim=2)
        hidden = _read(mask, group, -1) if masked and mask is not None else None
        bias = None if position_bias is None else _read(position_bias, group, -1)
        parts.append(attend(asked, map_states(key, read), map_states(value, read), hidden, bias)[0])
    return torch.cat(parts)


def _read(tensor: torch.Tensor, group: RowGroup, dim: int) -> torch.Tensor:
    """The rows and keys of a group: a view, if they have no padding between them."""
    rows = tensor[group.first : group.end]
    parts = [rows.narrow(dim, first, end - first) for first, end in group.spans]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=dim)
