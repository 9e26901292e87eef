"""Checks of single tensors that several arguments share."""

from __future__ import annotations

import torch


def check_bool(name: str, tensor: torch.Tensor) -> None:
    """Raises a `TypeError` where a mask is not boolean."""
    if tensor.dtype != torch.bool:
        raise TypeError(
            f"Expected `{name}` to be a boolean tensor (True = attend), got {tensor.dtype}. Use `{name}.bool()` for a mask of 0 and 1."
        )
