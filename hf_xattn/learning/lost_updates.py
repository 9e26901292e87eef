"""Warns of updates of an optimizer that are lost to rounding, where weights in half precision train.

Adding less than 1/512 of a bfloat16 value gives the same value again. AdamW adds about the learning rate at each step,
so with a small rate most weights never move. The loss still falls a little, because gates and norms are float32.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from transformers.utils import logging


logger = logging.get_logger(__name__)

HALF = (torch.bfloat16, torch.float16)
REMEDY = (
    "Call `hf_xattn.train_in_float32(model)` and train with autocast (`bf16=True` of `TrainingArguments`). Ignore this "
    "if your optimizer keeps float32 copies of the weights, as DeepSpeed's do."
)
SAMPLE = 2**16  # values of one weight that are looked at
WORTH_TELLING = 0.01  # share of the values


def warn_of_half_precision(model: nn.Module) -> None:
    """Warns once if weights that train are stored in half precision. For a run whose learning rate is not known."""
    learning = [weight for weight in model.parameters() if weight.requires_grad]
    narrow = [weight for weight in learning if weight.dtype in HALF]
    if not narrow:
        return
    count, total = (sum(weight.numel() for weight in weights) for weights in (narrow, learning))
    # Lost for certain is less than a quarter of the distance between a value and the next larger one.
    fraction = round(4 / max(torch.finfo(weight.dtype).eps for weight in narrow))
    logger.warning_once(
        f"{count:,} of {total:,} values that train are stored in {_names(narrow)}. Updates smaller than 1/{fraction} "
        f"of a value are lost there: with AdamW and a small learning rate, most. {REMEDY}"
    )


def warn_of_lost_updates(parts: Mapping[str, tuple[list[nn.Parameter], float]]) -> None:
    """Warns if a learning rate is too small for weights in half precision. `parts`: weights and rate of each part."""
    for part, (weights, rate) in parts.items():
        narrow = [weight for weight in weights if weight.dtype in HALF and not weight.is_meta]
        count = sum(weight.numel() for weight in narrow)
        if not count or not rate:
            continue
        lost = sum(share_lost(weight, rate) * weight.numel() for weight in narrow) / count
        if lost >= WORTH_TELLING:
            logger.warning(
                f"A step of AdamW with a learning rate of {rate:g} leaves {lost:.0%} of the {count:,} values of "
                f"`{part}` in {_names(narrow)} as they are, because they are rounded. {REMEDY}"
            )


@torch.no_grad()
def share_lost(weight: torch.Tensor, rate: float) -> float:
    """The share of a weight's values that are the same after adding or subtracting `rate`, in a sample."""
    local: Any = getattr(weight, "_local_tensor", weight)  # of a sharded weight, the values of this process
    values = local.detach().flatten()
    values = values[:: max(1, values.numel() // SAMPLE)]
    if not values.numel():
        return 0.0
    return (((values + rate) == values) & ((values - rate) == values)).float().mean().item()


def _names(weights: Iterable[torch.Tensor]) -> str:
    return " and ".join(sorted({str(weight.dtype).removeprefix("torch.") for weight in weights}))
