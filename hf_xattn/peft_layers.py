"""Finds layers of adapters (PEFT) in a model. They rename the weights below them, so what is saved with them loads into no other model."""

from __future__ import annotations

from torch import nn


def refuse_adapter_layers(module: nn.Module, what: str, remedy: str) -> None:
    """Raises a `ValueError` for a module with layers of an adapter.

    Args:
        what (`str`): what does not work with them, as the beginning of a sentence.
        remedy (`str`): what to do instead, as a sentence.
    """
    layer = first_adapter_layer(module)
    if layer is not None:
        raise ValueError(
            f"{what} a model that holds LoRA layers or other layers of an adapter (PEFT): {layer} is one. {remedy}"
        )


def first_adapter_layer(module: nn.Module) -> str | None:
    """Name of the first layer with an adapter, or of `modules_to_save`, in a module. None where there is none.

    Both have this attribute. A `PreTrainedModel` has the other ones of such layers too.
    """
    for name, part in module.named_modules():
        if isinstance(getattr(part, "_disable_adapters", None), bool):
            return name
    return None
