"""How `hf-xattn train` starts a fresh model: by the words of the rows, where it can.

A block that starts at random learns to look at the picture late (see `alignment.py`), and a high learning rate moves
what was started before it is of use (see `started_rate.py`). So the learning rates depend on the start.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from transformers.integrations import is_deepspeed_zero3_enabled

from ..data.loading import Rows
from ..utils.quantized_weights import is_quantized
from .alignment import align_connector
from .freezing import body_of
from .launch import is_first_process, num_processes, say
from .started_rate import starts_at_zero


ALIGN_ROWS = 2000  # that are read, evenly spaced
BY_WORDS, AT_RANDOM, TRAINED = "by words", "at random", "trained"


class Rates(NamedTuple):
    """The highest learning rate, and the share of it for weights that do not start at zero."""

    learning_rate: float
    started_rate: float


# examples/photos/README.md has the runs that these are of.
RATES = {BY_WORDS: Rates(3e-3, 0.03), AT_RANDOM: Rates(1e-3, 1.0), TRAINED: Rates(3e-4, 1.0)}


def start(model: Any, processor: Any, rows: Rows, device: torch.device, align: bool = True) -> str:
    """Starts connector and blocks of a fresh model by the words of rows, in the first process; the others get them.

    Args:
        processor ([`XAttnProcessor`]): reads the pictures, or looks up what the tower has returned for them.
        rows ([`Rows`]): to train on.
        device (`torch.device`): where the tower runs.
        align (`bool`, defaults to `True`): False leaves a fresh model as it is.

    Returns:
        `str`: how the model starts, a key of `RATES`.
    """
    found = [""]
    if is_first_process():
        found = [_start(model, processor, rows, device, align)]
    if num_processes() > 1:
        from accelerate.utils import broadcast_object_list

        broadcast_object_list(found)
        if found[0] == BY_WORDS:
            _share(model, device)
    return found[0]


def _start(model: Any, processor: Any, rows: Rows, device: torch.device, align: bool) -> str:
    if not _is_fresh(model):
        return TRAINED
    if not align or is_deepspeed_zero3_enabled():  # whose processes hold a part of each weight
        return AT_RANDOM
    count = min(len(rows), ALIGN_ROWS)
    chosen = rows if count == len(rows) else rows.split([number * len(rows) // count for number in range(count)])[1]
    before = model.device
    moved = before != device and not any(map(is_quantized, model.parameters()))
    say(f"Starting the connector and the blocks by the words of {count} examples")
    try:
        found = align_connector(model.to(device) if moved else model, processor, chosen)
    except ValueError as error:
        say(f"They start at random, which learns later: {error}")
        return AT_RANDOM
    finally:
        if moved:
            model.to(before)
    told = f"They start by {found.words} words of {found.pictures} pictures"
    say(f"{told}, and image tokens explain {found.explained:.0%} of what the words tell")
    return BY_WORDS


def _is_fresh(model: Any) -> bool:
    """Whether no block has learned: all weights that start at zero are zero."""
    zero = [weight for weight in starts_at_zero(model) if not is_quantized(weight)]
    return bool(zero) and not any(bool(weight.detach().any()) for weight in zero)


def _share(model: Any, device: torch.device) -> None:
    """Gives all processes the first one's connector and blocks."""
    body: Any = body_of(model)
    for part in (body.connector, *body.blocks):
        for weight in part.parameters():
            values = weight.detach().to(device)
            torch.distributed.broadcast(values, src=0)
            weight.data.copy_(values)
