"""Recognises quantized weights, and takes them apart."""

from __future__ import annotations

import torch
from torch import nn


def is_quantized(weight: torch.Tensor) -> bool:
    """Whether a weight is stored in 8 bit or less: integers, 8-bit floats, or a tensor of torchao's classes."""
    if hasattr(weight, "_local_tensor"):  # sharded
        weight = weight._local_tensor
    return not weight.is_floating_point() or weight.dtype.itemsize == 1 or hasattr(weight, "__tensor_flatten__")


def is_packed(module: nn.Module) -> bool:
    """Whether a quantizer (GPTQ, AWQ, HQQ) has replaced a linear layer by a class that is none."""
    return hasattr(module, "qweight") or type(module).__name__ == "HQQLinear"


def first_quantized(module: nn.Module) -> str | None:
    """Name of the first quantized weight of a module, or None."""
    return next((name for name, weight in module.named_parameters() if is_quantized(weight)), None)


def check_trainable(part: str, module: nn.Module, remedy: str) -> None:
    """Raises a `ValueError` for a part with quantized weights. `remedy`: a sentence."""
    if (name := first_quantized(module)) is not None:
        raise untrainable(part, name, module.get_parameter(name), remedy)


def untrainable(part: str, name: str, weight: torch.Tensor, remedy: str) -> ValueError:
    """The error for a quantized weight that shall be trained."""
    kind = type(weight).__name__ if hasattr(weight, "__tensor_flatten__") else str(weight.dtype)
    return ValueError(f"The weights of {part} are quantized ({name}: {kind}) and cannot be trained. {remedy}")


def plain_tensors(weight: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that a weight consists of: several for classes of torchao's, otherwise the weight itself."""
    if type(weight) in (torch.Tensor, nn.Parameter) or not hasattr(weight, "__tensor_flatten__"):
        return [weight]
    names, _ = weight.__tensor_flatten__()
    return [plain for name in names for plain in plain_tensors(getattr(weight, name))]


def shape_before(weight: torch.Tensor) -> torch.Size:
    """The shape of a weight before it was quantized. bitsandbytes packs 4-bit values into one long column."""
    state = getattr(weight, "quant_state", None)
    return weight.shape if state is None else torch.Size(state.shape)
