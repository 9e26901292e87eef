"""T5's relative position bias, for features with an order (sound, video). It is a part that adds to the scores."""

from __future__ import annotations

import math

import torch
from torch import nn

from ..configuration_xattn import CrossAttentionConfig
from ..layers.positions import SCORE_PARTS, ScorePart


def relative_position_bucket(config: CrossAttentionConfig, distance: torch.Tensor) -> torch.Tensor:
    """Returns T5's bidirectional buckets of distances: ids from 0 to `position_bias_num_buckets - 1`.

    Each direction has half of the buckets. Half of these stand for one distance each. The other half is logarithmic, up
    to `position_bias_max_distance`; all larger distances share the last bucket. The formula is from Raffel et al.,
    "Exploring the Limits of Transfer Learning", 2020, section 2.1.
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
