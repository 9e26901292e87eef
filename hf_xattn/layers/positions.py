"""Codes of positions on queries and keys, such as rotary embeddings. We have none: image features hold their places.

A code of one's own is a module of the attention (see `utils/parts.py`). It gets the place of an image token within its
image alone, so that keys stay right whatever stands beside the image: in caches, stores, packed and shared rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..configuration_xattn import CrossAttentionConfig
from ..utils.parts import POSITIONS


def no_position(config: CrossAttentionConfig) -> None:
    return None


POSITIONS.register("none", no_position)


def new_position(config: CrossAttentionConfig) -> nn.Module | None:
    position: nn.Module | None = POSITIONS.make(config.position, config)
    return position


def with_position(position: Any, of: str, states: torch.Tensor, places: torch.Tensor | None) -> torch.Tensor:
    """Queries or keys with their positions.

    Args:
        of (`"queries"` or `"keys"`).
        states (`torch.Tensor`): `(rows, tokens, heads, head_dim)`.
        places (`torch.LongTensor`, *optional*): `(rows or 1, tokens)`; None stands for 0 ... tokens - 1.
    """
    if places is None:
        places = torch.arange(states.shape[1], device=states.device)[None]
    coded = position(states, places, of)
    if not isinstance(coded, torch.Tensor) or coded.shape != states.shape:
        got = tuple(coded.shape) if isinstance(coded, torch.Tensor) else type(coded).__name__
        raise ValueError(
            f"Expected the position {type(position).__name__} to return {of} (rows, tokens, heads, head_dim) "
            f"{tuple(states.shape)}, got {got}."
        )
    return coded.to(states.dtype)


def places_in_images(sizes: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """`(1, N)`, the place of each image token in its image; `sizes` are the tokens of the images of a row."""
    return torch.cat([torch.arange(size, device=device) for size in sizes])[None]
