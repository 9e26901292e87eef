"""T5's relative position bias, for a context with an order (audio, video)."""

from __future__ import annotations

import math

import torch


def relative_position_bucket(distance: torch.Tensor, num_buckets: int, max_distance: int) -> torch.Tensor:
    """Returns T5's bidirectional buckets. Each direction gets half of them: half of these exact, half logarithmic up to `max_distance`.

    Formula: Raffel et al., "Exploring the Limits of Transfer Learning", 2020, section 2.1.

    Args:
        distance (`torch.LongTensor`): key position minus query position, any shape.
        num_buckets (`int`): even, at least 4.
        max_distance (`int`): all larger distances share the last bucket.

    Returns:
        `torch.LongTensor`: bucket ids in `[0, num_buckets)`, shape of `distance`.
    """
    half = num_buckets // 2
    exact = half // 2
    side = (distance > 0).long() * half
    distance = distance.abs()
    scaled = torch.log(distance.clamp(min=1).float() / exact) / math.log(max_distance / exact)
    logarithmic = (exact + (scaled * (half - exact)).long()).clamp(max=half - 1)
    return side + torch.where(distance < exact, distance, logarithmic)
