"""The connector `"mlp_2d"`: an MLP that adds a two-dimensional position encoding to the image tokens.

The features of a convolutional tower contain almost no position. DETR therefore adds sine waves of two axes to its
queries and keys (Carion et al., "End-to-End Object Detection with Transformers", 2020). To answer where something is,
a text model needs the position in the values, too. So here the encoding is added to the image tokens, from which keys
and values are computed.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from ..configuration_xattn import XAttnConfig
from ..images.connector import mlp
from ..utils.architectures import TILED_VISION_TYPES
from ..utils.parts import CONNECTORS


WAVES = 4  # number of waves along each axis; the first has half a period in the image, so it tells left from right
SIZE = 0.35  # root mean square of the encoding; that of image tokens is about 1


def is_square(count: int) -> bool:
    """Whether `count` can be the number of tokens of a square grid, with or without a class token in front."""
    return count - int(count**0.5) ** 2 in (0, 1)


class GridCode(nn.Module):
    """Adds a position encoding to image tokens `(..., tokens, width)`, which are a square grid, row by row.

    Even channels encode the row, odd channels the column. A channel has wave `k = channel // 2 % 4 + 1`. In row or
    column p of n, its value is `0.35 * sqrt(2) * cos(pi * k * (p + 1/2) / n)`, as in the discrete cosine transform
    (DCT-II). A class token in front of the grid gets no encoding.
    """

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        count, width = tokens.shape[-2:]
        side = int(count**0.5)  # `math.isqrt` is unknown to `torch.compile`
        class_token = count - side**2
        if class_token not in (0, 1):
            raise ValueError(
                "Expected the tokens of a square image, row by row, behind a class token or none, for "
                f"`connector_type='mlp_2d'`, got {count} tokens. For other towers and sizes use 'mlp'."
            )
        channel = torch.arange(width, device=tokens.device)
        place = torch.arange(side**2, device=tokens.device)
        along = torch.where(channel % 2 == 0, (place // side)[:, None], (place % side)[:, None])
        wave = channel // 2 % WAVES + 1
        code = SIZE * 2**0.5 * torch.cos(math.pi * wave * (along + 0.5) / side)
        return tokens + nn.functional.pad(code, (0, 0, class_token, 0)).to(tokens.dtype)


def code_directions(width: int, most: int) -> torch.Tensor:
    """Returns one direction for each axis and wave of the encoding, `(axes * waves, width)`.

    Along its direction, a wave has a size of at most 1. Only the first `most // 4` directions are returned. The slower
    waves come first, because they tell more.
    """
    channel = torch.arange(width)
    number = torch.arange(2 * WAVES)[:, None]  # ordered by waves; for each wave, rows come before columns
    own = ((channel % 2 == number % 2) & (channel // 2 % WAVES == number // 2)).float()
    return (own / (own.sum(1, keepdim=True).clamp(min=1) * SIZE * 2**0.5))[: most // 4]


def mlp_2d(config: XAttnConfig) -> list[nn.Module]:
    tower = config.vision_config
    if tower is not None and tower.model_type in TILED_VISION_TYPES:
        raise ValueError(
            f"Expected a vision tower of whole images for `connector_type='mlp_2d'`, got {tower.model_type!r}, which "
            "reads tiles and has its own position encodings of them. Use 'mlp' or 'linear'."
        )
    return [*mlp(config), GridCode()]


mlp_2d.needs_square = True  # type: ignore[attr-defined]
CONNECTORS.register("mlp_2d", mlp_2d)
