"""Warns of updates of an optimizer that are lost to rounding, where weights in half precision train.

Adding less than 1/512 of a bfloat16 value gives the same value again. AdamW adds about the learning rate at each step,
so with a small rate most weights never move. The loss still falls a little, because gates and norms are float32.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from transformers.utils import logging


logger = logging.get_logger(__name__)

HALF = (torch.bfloat16, torch.float16)
REMEDY = (
    "Call `hf_xattn.train_in_float32(model)` and train with autocast (`bf16=True` of `TrainingArguments`). Ignore this "
    "if your optimizer keeps float32 copies of the weights, as DeepSpeed's do."
)


def warn_of_half_precision(model: nn.Module) -> None:
    """Warns once if weights that train are stored in half precision."""
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


def _names(weights: Iterable[torch.Tensor]) -> str:
    return " and ".join(sorted({str(weight.dtype).removeprefix("torch.") for weight in weights}))
