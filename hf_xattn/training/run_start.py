"""How `hf-xattn train` starts a fresh model: by the words of the rows, where it can.

A block that starts at random learns to look at the picture late (see `alignment.py`), and a high learning rate moves
what was started before it is of use (see `started_rate.py`). So the learning rates depend on the start.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from accelerate.utils import broadcast_object_list
from transformers.integrations import is_deepspeed_zero3_enabled

from ..checkpoints.model_card import is_fresh
from ..data.loading import Rows
from ..utils.quantized_weights import is_quantized
from .alignment import align_connector
from .freezing import body_of
from .launch import is_first_process, num_processes, say
from .parameter_groups import starts_at_zero


BY_WORDS, AT_RANDOM, TRAINED = "by words", "at random", "trained"


class Rates(NamedTuple):
    """The highest learning rate, and the share of it for weights that do not start at zero."""

    learning_rate: float
    started_rate: float


# examples/photos/README.md has the runs that the first two are of. A trained model has all to lose.
RATES = {BY_WORDS: Rates(3e-3, 0.03), AT_RANDOM: Rates(1e-3, 1.0), TRAINED: Rates(1e-4, 1.0)}


def rates_of(start: str, learning_rate: float | None, started_rate: float | None) -> Rates:
    """The learning rates of a run: those that are given, and the others by how the model starts."""
    rate, share = RATES[start]
    return Rates(rate if learning_rate is None else learning_rate, share if started_rate is None else started_rate)


def start(model: Any, processor: Any, rows: Rows | None, device: torch.device) -> str:
    """Starts connector and blocks of a fresh model by the words of rows, in the first process; the others get them.

    Args:
        processor ([`XAttnProcessor`]): reads the pictures, or looks up what the tower has returned for them.
        rows ([`Rows`], *optional*): to start by. None leaves the model as it is.
        device (`torch.device`): where the tower runs.

    Returns:
        `str`: how the model starts, a key of `RATES`.
    """
    found = [""]
    if is_first_process():
        found = [_start(model, processor, rows, device)]
    if num_processes() > 1:
        broadcast_object_list(found)
        if found[0] == BY_WORDS:
            _share(model, device)
    return found[0]


def _start(model: Any, processor: Any, rows: Rows | None, device: torch.device) -> str:
    if not is_fresh(body_of(model)):
        return TRAINED
    # The share of the learning rate is for what does not start at zero; DeepSpeed's processes hold parts of weights.
    if rows is None or not starts_at_zero(model) or is_deepspeed_zero3_enabled():
        return AT_RANDOM
    home = model.device
    moves = home.type == "cpu" != device.type and not any(map(is_quantized, model.parameters()))
    say(f"Starting the connector and the blocks by the words of {len(rows)} examples (`--align none`: they stay)")
    try:
        found = align_connector(model.to(device) if moves else model, processor, rows)
    except ValueError as error:
        say(f"They start at random, which learns later: {error}")
        return AT_RANDOM
    finally:
        if moves:
            model.to(home)
    told = f"They start by {found.words} words of {found.pictures} pictures"
    say(f"{told}, and image tokens explain {found.explained:.0%} of what the words tell")
    return BY_WORDS


def _share(model: Any, device: torch.device) -> None:
    """Gives all processes the first one's connector and blocks."""
    body: Any = body_of(model)
    for part in (body.connector, *body.blocks):
        for weight in part.parameters():
            values = weight.detach().to(device)
            torch.distributed.broadcast(values, src=0)
            weight.data.copy_(values)
