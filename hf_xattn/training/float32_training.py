"""Trains weights in float32 inside a model in half precision."""

from __future__ import annotations

from typing import Any

from ..learning.lost_updates import HALF
from .freezing import part_weights


def train_in_float32(model: Any) -> Any:
    """Converts the weights that train from half precision to float32. Frozen weights keep their dtype, and so their memory.

    In half precision small updates are lost (see `learning/lost_updates.py`). Blocks and connector then work as they are, beside a frozen text
    model and tower in half precision. Text models and towers that train in part need autocast, because their layers do not convert
    what they pass on: `bf16=True` of `TrainingArguments`, or `torch.autocast`.

    Call it after `freeze` or `get_peft_model`, and before the first step of an optimizer and before the model is sharded. A saved model
    is loaded in the dtype of its text model; gates and norms stay float32.

    Args:
        model ([`XAttnForConditionalGeneration`] or [`XAttnModel`]): changed in place, also inside PEFT's wrapper.

    Returns:
        The model.

    Raises:
        TypeError: for a model without blocks.
        ValueError: if nothing trains, or for sharded weights.
    """
    learning = [weight for _, _, weight, _ in part_weights(model) if weight.requires_grad]
    if not learning:
        raise ValueError("`model` has no parameter that trains. Call `hf_xattn.freeze(model, ...)` first.")
    if any(hasattr(weight, "_local_tensor") or hasattr(weight, "_is_fsdp_flattened") for weight in learning):
        raise ValueError(
            "Expected `model` with whole weights, got sharded ones. Call `train_in_float32` before the model is sharded."
        )
    for weight in learning:
        if weight.dtype in HALF:
            gradient, weight.grad = weight.grad, None  # torch refuses a gradient of another dtype
            weight.data = weight.data.float()
            weight.grad = None if gradient is None else gradient.float()
    return model


__all__ = ["train_in_float32"]
