"""A code of places in the picture on image tokens: cosine waves along rows and columns.

A convolutional tower says next to nothing of a token's place, so DETR adds sine waves of two axes to its tokens (Carion
et al., "End-to-End Object Detection with Transformers", 2020), for queries and keys. A text that asks where something
is needs the code in the values, too, so here image tokens have it.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from ..configuration_xattn import XAttnConfig
from ..images.connector import mlp
from ..utils.architectures import TILED_VISION_TYPES
from ..utils.parts import CONNECTORS


WAVES = 4  # along each axis: the first has half a period in the picture, so it tells left from right
SIZE = 0.35  # root mean square of the code; that of image tokens is about 1


def is_square(count: int) -> bool:
    """Whether tokens are those of a square picture, behind a class token or none."""
    return count - int(count**0.5) ** 2 in (0, 1)


class GridCode(nn.Module):
    """Adds the code of its place to each image token `(..., tokens, width)` of a square picture, row by row.

    Channels take turns: axis `channel % 2`, rows first, and wave `k = channel // 2 % 4 + 1`. The code of place p of n
    is `0.35 * sqrt(2) * cos(pi * k * (p + 1/2) / n)`, as in the discrete cosine transform (DCT-II). A class token in
    front of the patches gets none.
    """

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        count, width = tokens.shape[-2:]
        side = int(count**0.5)  # `math.isqrt` is unknown to `torch.compile`
        class_token = count - side**2
        if class_token not in (0, 1):
            raise ValueError(
                "Expected the tokens of a square picture, row by row, behind a class token or none, for "
                f"`connector_type='mlp_2d'`, got {count} tokens. For other towers and sizes use 'mlp'."
            )
        channel = torch.arange(width, device=tokens.device)
        place = torch.arange(side**2, device=tokens.device)
        along = torch.where(channel % 2 == 0, (place // side)[:, None], (place % side)[:, None])
        wave = channel // 2 % WAVES + 1
        code = SIZE * 2**0.5 * torch.cos(math.pi * wave * (along + 0.5) / side)
        return tokens + nn.functional.pad(code, (0, 0, class_token, 0)).to(tokens.dtype)


def code_directions(width: int, most: int) -> torch.Tensor:
    """Directions `(axes * waves, width)`, of which each wave of the code goes along one; a place has size 1 or less.

    Only the first `most // 4` are returned: slower waves come first, which tell more.
    """
    channel = torch.arange(width)
    number = torch.arange(2 * WAVES)[:, None]  # by waves, the rows of the picture first
    own = ((channel % 2 == number % 2) & (channel // 2 % WAVES == number // 2)).float()
    return (own / (own.sum(1, keepdim=True).clamp(min=1) * SIZE * 2**0.5))[: most // 4]


def mlp_2d(config: XAttnConfig) -> list[nn.Module]:
    tower = config.vision_config
    if tower is not None and tower.model_type in TILED_VISION_TYPES:
        raise ValueError(
            f"Expected a vision tower of whole pictures for `connector_type='mlp_2d'`, got {tower.model_type!r}, which "
            "reads tiles and has codes of their places. Use 'mlp' or 'linear'."
        )
    return [*mlp(config), GridCode()]


mlp_2d.needs_square = True  # type: ignore[attr-defined]
CONNECTORS.register("mlp_2d", mlp_2d)
