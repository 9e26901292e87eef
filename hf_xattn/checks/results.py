"""What a check finds, and how two tensors of logits are compared."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


HOLDS, BROKEN, FRESH, NOT_CHECKED = "holds", "BROKEN", "note", "not checked"

# Largest difference that rounding makes, as a share of the largest logit. In half precision a mixture of experts may
# choose other experts for a token after rounding.
ROUNDING = {torch.float32: 1e-4, torch.float64: 1e-4, torch.float16: 2e-2, torch.bfloat16: 5e-2}
ROUNDING_OF_EXPERTS = {torch.float32: 1e-4, torch.float64: 1e-4, torch.float16: 0.2, torch.bfloat16: 0.2}


@dataclass(frozen=True)
class Result:
    """What a check has found."""

    name: str  # of the check
    status: str  # `HOLDS`, `BROKEN`, `FRESH` (holds, with something to know) or `NOT_CHECKED`
    line: str  # what was measured, in words
    measured: float | None = None
    allowed: float | None = None  # the largest or, for calls, the only number with which the promise holds


def largest_difference(first: torch.Tensor, second: torch.Tensor) -> float:
    """Largest difference of two tensors of one shape: 0 for equal infinities, and infinity for NaN."""
    first, second = first.detach().double().cpu(), second.detach().double().cpu()
    differences = torch.where(first == second, 0.0, (first - second).abs())
    return float(torch.nan_to_num(differences, nan=float("inf")).max()) if differences.numel() else 0.0


def largest(tensor: torch.Tensor) -> float:
    """Largest absolute value that is finite."""
    tensor = tensor.detach().double().abs()
    return float(torch.where(tensor.isfinite(), tensor, 0.0).max())


def has_experts(model: nn.Module) -> bool:
    """Whether a decoder has a mixture of experts, whose layers multiply the tokens of all rows together."""
    return any("experts" in name.rpartition(".")[2].lower() for name, _ in model.named_modules())


def why_rows_mix(model: Any) -> str | None:
    """Why rounding may depend on the other rows of a batch; None where each row is computed alone."""
    text = model.base_model.text_model
    if has_experts(text):
        return "its experts multiply the tokens of all rows together"
    if any(getattr(part, "is_loaded_in_8bit", False) for part in (model, text)):
        return "bitsandbytes chooses the 16-bit columns of 8-bit layers by the values of all rows"
    return None


def rounding_of(model: Any) -> float:
    """Share of the largest logit by which rounding may change the logits of a model."""
    text = model.base_model.text_model
    return (ROUNDING_OF_EXPERTS if has_experts(text) else ROUNDING).get(text.dtype, ROUNDING[torch.bfloat16])


def number(value: float) -> str:
    """A number for a line."""
    return "0" if value == 0 else f"{value:.1e}"


def listed(names: list[str], most: int = 3) -> str:
    """The first of some names, and how many follow."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")
