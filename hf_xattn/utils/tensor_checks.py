"""Checks single tensors by their type, dtype and shape, and recognises quantized weights. Values are read rarely,
because this waits for a GPU.
"""

from __future__ import annotations

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor


INTEGERS = (torch.int64, torch.int32)  # the dtypes that an embedding takes


def check_tensor(name: str, value: object) -> None:
    """Raises a `TypeError` for anything but a tensor, such as a list, an array or an image."""
    if not isinstance(value, torch.Tensor):
        raise TypeError(
            f"Expected `{name}` to be a torch.Tensor, got {type_name(value)}. A processor makes tensors of texts and "
            "images, and `torch.as_tensor` makes them of arrays and lists."
        )


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether a tensor has a shape but no values (`FakeTensorMode`)."""
    return isinstance(tensor, FakeTensor)


def has_values(tensor: torch.Tensor) -> bool:
    """Whether the values of a tensor can be read. In compiled, exported, traced or captured code they cannot."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or tensor.is_meta or is_fake(tensor):
        return False
    return not (tensor.is_cuda and torch.cuda.is_current_stream_capturing())


def type_name(value: object) -> str:
    """Returns the name of a value's type for a message: `list`, `numpy.ndarray`, `PIL.Image.Image`, ..."""
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def check_bool(name: str, tensor: torch.Tensor) -> None:
    """Raises a `TypeError` for a mask that is not boolean."""
    if tensor.dtype != torch.bool:
        raise TypeError(
            f"Expected `{name}` to be a boolean tensor (True = attend), got {tensor.dtype}. Use `{name}.bool()` for a "
            "mask of 0 and 1."
        )


def check_no_bias(name: str, tensor: torch.Tensor) -> None:
    """Raises a `ValueError` for a mask of the other kind, which is added to scores and in which 0 means to attend."""
    if tensor.is_floating_point() and has_values(tensor) and not ((tensor == 0) | (tensor == 1)).all():
        raise ValueError(
            f"Expected `{name}` to be boolean, or 1 (attend) and 0 (do not), got {tensor.min().item():g} to "
            f"{tensor.max().item():g}."
        )


def check_floating(name: str, tensor: torch.Tensor, remedy: str = "") -> None:
    """Raises a `TypeError` for a tensor that is not floating point. `remedy` ends the message."""
    if not tensor.is_floating_point():
        raise TypeError(f"Expected `{name}` to be floating point, got {tensor.dtype}{remedy}.")


def check_integers(name: str, tensor: torch.Tensor, dtypes: tuple[torch.dtype, ...] = INTEGERS) -> None:
    """Raises a `TypeError` for a tensor of any other dtype than `dtypes`."""
    if tensor.dtype not in dtypes:
        raise TypeError(
            f"Expected `{name}` to hold integers ({' or '.join(str(dtype) for dtype in dtypes)}), got {tensor.dtype}."
        )


def check_states(states: torch.Tensor, context_size: int, by_image: bool = False) -> None:
    """Checks image tokens, from which keys and values are computed.

    Args:
        states (`torch.Tensor`): image tokens `(batch, num_image_tokens, context_size)`. With `by_image`, the shape
            `(batch, num_images, tokens, context_size)` is allowed, too.

    Raises:
        TypeError: for anything but a floating point tensor.
        ValueError: for another number of axes, for another width, and for a tensor without tokens.
    """
    check_tensor("cross_attention_states", states)
    check_floating("cross_attention_states", states)
    shape = tuple(states.shape)
    if len(shape) not in ((3, 4) if by_image else (3,)) or shape[-1] != context_size:
        shapes = f"(batch, num_image_tokens, context_size={context_size})"
        if by_image:
            shapes += f" or (batch, num_images, tokens, context_size={context_size})"
        raise ValueError(f"Expected `cross_attention_states` of shape {shapes}, got {shape}.")
    if 0 in shape:
        raise ValueError(f"`cross_attention_states` holds no image token: its shape is {shape}.")


def is_quantized(weight: torch.Tensor) -> bool:
    """Whether a weight is stored in 8 bits or less: as integers, as 8-bit floats, or in one of torchao's classes."""
    if hasattr(weight, "_local_tensor"):  # sharded
        weight = weight._local_tensor
    return not weight.is_floating_point() or weight.dtype.itemsize == 1 or hasattr(weight, "__tensor_flatten__")


def is_packed(module: nn.Module) -> bool:
    """Whether a quantizer (GPTQ, AWQ, HQQ) has replaced a linear layer by a class that is no `nn.Linear`."""
    return hasattr(module, "qweight") or type(module).__name__ == "HQQLinear"


def first_quantized(module: nn.Module) -> str | None:
    """Returns the name of the first quantized weight of a module, or None."""
    return next((name for name, weight in module.named_parameters() if is_quantized(weight)), None)


def check_trainable(part: str, module: nn.Module, remedy: str) -> None:
    """Raises a `ValueError` for a part with quantized weights. `remedy` is the last sentence of the message."""
    if (name := first_quantized(module)) is not None:
        raise untrainable(part, name, module.get_parameter(name), remedy)


def untrainable(part: str, name: str, weight: torch.Tensor, remedy: str) -> ValueError:
    """Returns the error for a quantized weight that is to be trained."""
    kind = type(weight).__name__ if hasattr(weight, "__tensor_flatten__") else str(weight.dtype)
    return ValueError(f"The weights of {part} are quantized ({name}: {kind}) and cannot be trained. {remedy}")


def plain_tensors(weight: torch.Tensor) -> list[torch.Tensor]:
    """Returns the tensors that a weight consists of: several for torchao's classes, otherwise the weight itself."""
    if type(weight) in (torch.Tensor, nn.Parameter) or not hasattr(weight, "__tensor_flatten__"):
        return [weight]
    names, _ = weight.__tensor_flatten__()
    return [plain for name in names for plain in plain_tensors(getattr(weight, name))]


def shape_before(weight: torch.Tensor) -> torch.Size:
    """Returns the shape that a weight had before it was quantized. bitsandbytes packs 4-bit values into one column."""
    state = getattr(weight, "quant_state", None)
    return weight.shape if state is None else torch.Size(state.shape)
