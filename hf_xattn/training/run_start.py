"""How `hf-xattn train` starts a fresh model: from the words of the rows, if possible.

Usually a new module starts at random and has one default learning rate. Here the default rates depend on the start. A
block that starts at random learns late to look at the image (see `alignment.py`). After a start from words, a high rate
for all weights would destroy the start before it is of use (see `trainer.py`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from accelerate.utils import broadcast_object_list
from transformers.integrations import is_deepspeed_zero3_enabled

from ..checkpoints.model_card import is_fresh
from ..data.loading import Rows
from ..modeling_xattn import XAttnForConditionalGeneration
from ..processing_xattn import XAttnProcessor
from .alignment import align_connector
from .alignment_words import CannotAlign
from .freezing import body_of, starts_at_zero
from .launch import is_first_process, num_processes, on_device, say
from .training_options import TrainingOptions


BY_WORDS, AT_RANDOM, TRAINED = "by words", "at random", "as it was saved"


class Rates(NamedTuple):
    """The highest learning rate, and the share of it for weights that do not start at zero."""

    learning_rate: float
    started_rate: float


# The first two come from the runs in examples/photos/README.md. A trained model has a low rate, to keep what it has
# learned.
RATES = {BY_WORDS: Rates(3e-3, 0.03), AT_RANDOM: Rates(1e-3, 1.0), TRAINED: Rates(1e-4, 1.0)}


def rates_of(start: str, options: TrainingOptions) -> Rates:
    """Returns the learning rates of a run: the given ones, and defaults that depend on the start for the others."""
    whole = options.train_text or options.train_vision
    # Text model and tower train at the same rate as the blocks, so it must suit trained weights.
    rate, share = RATES[TRAINED if whole and start == AT_RANDOM else start]
    given = options.learning_rate, options.started_rate
    return Rates(rate if given[0] is None else given[0], share if given[1] is None else given[1])


def start(
    model: XAttnForConditionalGeneration,
    processor: XAttnProcessor,
    rows: Rows | None,
    device: torch.device,
    asked: bool = False,
) -> str:
    """Starts the connector and the blocks of a fresh model from the words of rows.

    The first process computes the start and sends the weights to the others.

    Args:
        processor ([`XAttnProcessor`]): reads the images, or looks up stored features of them.
        rows ([`Rows`], *optional*): the rows for the start. None leaves the model as it is.
        device (`torch.device`): where the tower runs.
        asked (`bool`, defaults to `False`): whether the user has named these rows (`--align SOURCE`). If the start is
            not possible, this is an error then; otherwise the model starts at random.

    Returns:
        `str`: how the model starts, a key of `RATES`.

    Raises:
        ValueError: for a broken row and, if `asked`, for a model or rows that allow no such start.
    """
    found = [""]
    if is_first_process():
        found = [_start(model, processor, rows, device, asked)]
    if num_processes() > 1:
        broadcast_object_list(found)
        if found[0] == BY_WORDS:
            body: Any = body_of(model)
            for weight in (weight for part in (body.connector, *body.blocks) for weight in part.parameters()):
                values = weight.detach().to(device)
                torch.distributed.broadcast(values, src=0)
                weight.data.copy_(values)
    return found[0]


def _start(model: Any, processor: Any, rows: Rows | None, device: torch.device, asked: bool) -> str:
    if not is_fresh(body_of(model)):
        if asked:
            raise ValueError(
                "Expected `--align SOURCE` with a fresh model, got one whose blocks have learned, which would be "
                "written over. Leave `--align` out."
            )
        return TRAINED
    if rows is None:
        return AT_RANDOM
    say(f"Starting the connector and the blocks by the words of {len(rows)} examples (`--align none`: they stay)")
    try:
        if is_deepspeed_zero3_enabled():
            raise CannotAlign("Expected whole weights, got those of ZeRO-3, of which each process holds a part.")
        if not starts_at_zero(model):  # `--started-rate` would then slow down all weights
            raise CannotAlign("Expected blocks with `zero_init`, got others.")
        found = on_device(model, device, lambda: align_connector(model, processor, rows))
    except CannotAlign as error:
        if asked:
            raise
        say(f"They start at random, so the model learns later to use its images: {error}")
        return AT_RANDOM
    told = f"They start by {found.words} words of {found.pictures} images"
    say(f"{told}, and image tokens explain {found.explained:.0%} of what the words tell")
    return BY_WORDS
