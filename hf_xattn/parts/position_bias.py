"""T5's relative position bias, for a context with an order (audio, video): a position part that adds to the scores."""

from __future__ import annotations

import math

import torch
from torch import nn

from ..configuration_xattn import CrossAttentionConfig
from ..layers.positions import SCORE_PARTS, ScorePart


def relative_position_bucket(config: CrossAttentionConfig, distance: torch.Tensor) -> torch.Tensor:
    """Returns T5's bidirectional buckets of distances, ids in `[0, position_bias_num_buckets)`.

    Each direction gets half of them: half of these exact, half logarithmic up to `position_bias_max_distance`; all
    larger distances share the last bucket. Formula: Raffel et al., "Exploring the Limits of Transfer Learning", 2020,
    section 2.1.
    """
    half, max_distance = config.position_bias_num_buckets // 2, config.position_bias_max_distance
    exact = half // 2
    side = (distance > 0).long() * half
    distance = distance.abs()
    scaled = torch.log(distance.clamp(min=1).float() / exact) / math.log(max_distance / exact)
    logarithmic = (exact + (scaled * (half - exact)).long()).clamp(max=half - 1)
    return side + torch.where(distance < exact, distance, logarithmic)


SCORE_PARTS["relative_attention_bias"] = ScorePart(
    lambda config: (
        nn.Embedding(config.position_bias_num_buckets, config.num_attention_heads) if config.position_bias else None
    ),
    relative_position_bucket,
)
