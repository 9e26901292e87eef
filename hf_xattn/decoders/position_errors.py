"""Names positions that a decoder cannot read, after its own code has raised an error.

Which positions a decoder takes, only its code knows: a table of learned positions ends, a rotary embedding goes on;
some decoders take three positions for a token. So nothing is checked before, and a call that works pays nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache


def name_wrong_positions(
    config: PreTrainedConfig, text: Mapping[str, Any], length: int, cache: Cache | None, error: Exception
) -> None:
    """Raises a `ValueError` if the positions of a failed call are outside the decoder's table, or have a wrong axis.

    Args:
        text (`Mapping`): the decoder's arguments.
        length (`int`): text tokens of the call.
        cache (`Cache`, *optional*): of the text before it.
        error (`Exception`): the decoder's error, which becomes the cause.
    """
    positions, limit = text.get("position_ids"), getattr(config, "max_position_embeddings", None)
    if isinstance(positions, torch.Tensor):
        if positions.dim() == 3:
            raise ValueError(
                f"Expected `position_ids` of shape (batch, text_len={length}), got {tuple(positions.shape)}, which "
                f"this decoder ({config.model_type}) does not take."
            ) from error
        if not isinstance(error, IndexError) or positions.device.type != "cpu" or not isinstance(limit, int):
            return
        first, last = int(positions.min()), int(positions.max())
        if first < 0 or last >= limit:
            raise ValueError(
                f"Expected `position_ids` from 0 to {limit - 1}, the decoder's table of positions, got {first} to "
                f"{last}."
            ) from error
    elif isinstance(error, IndexError) and isinstance(limit, int):
        total = length + (0 if cache is None else int(cache.get_seq_length()))
        if total > limit:
            raise ValueError(
                f"Expected a text of at most {limit} tokens, the decoder's table of positions, got {total}."
            ) from error
