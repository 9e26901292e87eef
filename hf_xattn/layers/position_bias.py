"""T5's relative position bias, for a context with an order (audio, video). Positions count real tokens, no padding."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from ..cache.xattn_cache import XAttnCache


def text_positions(text: Mapping[str, Any], cache: XAttnCache | None, given: torch.Tensor) -> torch.Tensor:
    """The positions of the text tokens, `(B or 1, T)`: `position_ids`, or the number of real tokens before each.

    Padding in front of a text is at 0, like its first token.

    Args:
        text (`Mapping`): the decoder's own arguments.
        given (`torch.Tensor`): `(B, T, ...)`, the ids or embeddings.
    """
    positions = text.get("position_ids")
    if positions is not None:
        return positions if positions.dim() == 2 else positions[0]  # 3-D ones have one row for each axis of an image
    (rows, length), past = given.shape[:2], 0 if cache is None else cache.get_seq_length()
    places = torch.arange(length, device=given.device)[None] + past
    before = None if cache is None else cache.text_padding
    mask = text.get("attention_mask")
    if not isinstance(mask, torch.Tensor) or mask.dim() != 2:
        return places if before is None else (places - before).clamp(min=0)
    padding = (mask == 0).cumsum(dim=-1).to(places.device)
    if mask.shape[1] != length or cache is None or cache.text_rows is None:  # the mask covers all text so far
        padding = padding.gather(1, places.expand(rows, -1))
    elif before is not None:
        padding = padding + before
    return (places - padding).clamp(min=0)


def token_positions(token_mask: torch.Tensor | None) -> torch.Tensor | None:
    """The place of each image token among the real ones of its row, `(rows, N)`; None if all are real."""
    return None if token_mask is None else token_mask.cumsum(dim=-1) - 1


def relative_position_bucket(distance: torch.Tensor, num_buckets: int, max_distance: int) -> torch.Tensor:
    """Returns T5's bidirectional buckets, ids in `[0, num_buckets)`.

    Each direction gets half of them: half of these exact, half logarithmic up to `max_distance`. Formula: Raffel et
    al., "Exploring the Limits of Transfer Learning", 2020, section 2.1.

    Args:
        distance (`torch.LongTensor`): key position minus query position, any shape.
        num_buckets (`int`): even, at least 4.
        max_distance (`int`): all larger distances share the last bucket.
    """
    half = num_buckets // 2
    exact = half // 2
    side = (distance > 0).long() * half
    distance = distance.abs()
    scaled = torch.log(distance.clamp(min=1).float() / exact) / math.log(max_distance / exact)
    logarithmic = (exact + (scaled * (half - exact)).long()).clamp(max=half - 1)
    return side + torch.where(distance < exact, distance, logarithmic)
