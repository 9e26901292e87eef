"""Position parts of the attention. The core has none, because image features already contain their positions.

There are two kinds of position parts:

- A position encoding changes queries and keys, as a rotary embedding does. It is a module that a user registers (see
  `utils/parts.py`). It gets the position of an image token within its own image only. So the keys of an image are the
  same in caches, in image stores, in packed rows and in shared rows.
- A score part ([`ScorePart`]) adds to the attention scores. It reads the distances between image tokens and text
  tokens. T5's relative position bias is one (`parts/position_bias.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from ..cache.image_layout import rows_to
from ..cache.xattn_cache import XAttnCache
from ..configuration_xattn import CrossAttentionConfig
from ..utils.parts import POSITIONS


def no_position(config: CrossAttentionConfig) -> None:
    return None


POSITIONS.register("none", no_position)


class ScorePart(NamedTuple):
    """A position part that adds to the scores of the attention."""

    make: Callable[[CrossAttentionConfig], nn.Module | None]  # returns None if the configuration does not choose it
    # Turns the distances `(rows, T, N)` from text tokens to image tokens into the input of the module. The module
    # returns `(rows, T, N, heads)`. `read` is no method of the module, because device hooks and PEFT's wrappers handle
    # only calls of a module.
    read: Callable[[CrossAttentionConfig, torch.Tensor], torch.Tensor]


# The score parts, by the name that the module has in the attention, and that the names of its weights contain.
SCORE_PARTS: dict[str, ScorePart] = {}


class Positions(NamedTuple):
    """The positions that the position parts of one call read.

    It is a named tuple, so that device hooks and FSDP move its tensors.
    """

    query: torch.Tensor | None  # `(B or 1, T)`, positions in the text; None stands for 0 ... T - 1
    key: torch.Tensor | None  # `(rows, N)`, positions in the row, for score parts; None stands for 0 ... N - 1


def with_position(position: nn.Module, of: str, states: torch.Tensor, positions: torch.Tensor | None) -> torch.Tensor:
    """Applies a position encoding to queries or keys.

    Args:
        position: The module of the position encoding.
        of (`str`): `"queries"` or `"keys"`.
        states (`torch.Tensor`): The queries or keys, `(rows, tokens, heads, head_dim)`.
        positions (`torch.LongTensor`, *optional*): `(rows or 1, tokens)`; None stands for 0 ... tokens - 1.
    """
    if positions is None:
        positions = torch.arange(states.shape[1], device=states.device)[None]
    coded = position(states, positions, of)
    if not isinstance(coded, torch.Tensor) or coded.shape != states.shape:
        got = tuple(coded.shape) if isinstance(coded, torch.Tensor) else type(coded).__name__
        raise ValueError(
            f"Expected the position {type(position).__name__} to return {of} (rows, tokens, heads, head_dim) "
            f"{tuple(states.shape)}, got {got}."
        )
    return coded.to(states.dtype)


def positions_in_images(sizes: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Returns the position of each image token in its image, `(1, N)`.

    `sizes` has the number of tokens of each image of a row.
    """
    return torch.cat([torch.arange(size, device=device) for size in sizes])[None]


def added_to_scores(
    attention: nn.Module, positions: Positions | None, shape: tuple[int, int, int], device: torch.device
) -> torch.Tensor:
    """Returns what the score parts of an attention add to its scores, `(B, T, heads, N)`.

    The attention must have at least one score part. `shape` is `(B, T, N)`.
    """
    config: Any = attention.config
    parts = [(getattr(attention, name), part) for name, part in SCORE_PARTS.items()]
    query, key = positions or (None, None)
    query = torch.arange(shape[1], device=device)[None] if query is None else query
    key = torch.arange(shape[2], device=device)[None] if key is None else rows_to(key, shape[0])
    distance = key[:, None, :] - query[:, :, None]
    first, *others = [module(part.read(config, distance)) for module, part in parts if module is not None]
    return sum(others, first).transpose(2, 3).expand(shape[0], -1, -1, -1)


def text_positions(text: Mapping[str, Any], cache: XAttnCache | None, given: torch.Tensor) -> torch.Tensor:
    """Returns the positions of the text tokens, `(B or 1, T)`.

    These are the `position_ids` of the caller, or the number of tokens before each token without padding. Padding in
    front of a text has position 0, like the first token of the text.

    Args:
        text (`Mapping`): The arguments of the text model itself.
        cache ([`XAttnCache`], *optional*): The cache of the earlier text.
        given (`torch.Tensor`): `(B, T, ...)`, the ids or embeddings.
    """
    positions = text.get("position_ids")
    if positions is not None:
        return positions if positions.dim() == 2 else positions[0]  # 3-D ones have one row for each axis of an image
    (rows, length), past = given.shape[:2], 0 if cache is None else cache.get_seq_length()
    positions = torch.arange(length, device=given.device)[None] + past
    before = None if cache is None else cache.text_padding
    mask = text.get("attention_mask")
    if isinstance(mask, torch.Tensor) and mask.dim() == 2:
        padding = (mask == 0).cumsum(dim=-1).to(positions.device)
        if mask.shape[1] != length or cache is None or cache.text_rows is None:  # the mask covers all text so far
            before = padding.gather(1, positions.expand(rows, -1))
        else:
            before = padding if before is None else padding + before
    return positions if before is None else (positions - before).clamp(min=0)


def token_positions(token_mask: torch.Tensor | None) -> torch.Tensor | None:
    """Returns the position of each image token in its row, `(rows, N)`, in which padding is not counted.

    None if no token is padding.
    """
    return None if token_mask is None else token_mask.cumsum(dim=-1) - 1
