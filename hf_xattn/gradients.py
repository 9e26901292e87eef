"""Training with a frozen text model: a forward in which no block takes part would leave the loss without a gradient.

Text without images gets a stand-in image that nobody sees, see `ImageEncoder.placeholder`. Where LayerDrop leaves out every layer that
carries a block, the outputs get a gradient of zero.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from .insertion import BLOCKS


def only_images_learn(model: nn.Module) -> bool:
    """Whether weights want a gradient, but none of the text model's own.

    Args:
        model ([`XAttnModel`]): with its blocks inside of `text_model`.
    """
    found = False
    for name, weight in model.named_parameters():
        if weight.requires_grad:
            if name.startswith("text_model.") and not any(f".{block}." in name for block in BLOCKS):
                return False
            found = True
    return found


def give_gradient(outputs: dict[str, Any], weights: Iterable[nn.Parameter]) -> None:
    """Ties the outputs of a forward to the first of the weights that wants a gradient. The gradient is zero, the outputs stay equal."""
    learning = next((weight for weight in weights if weight.requires_grad), None)
    if learning is None:
        return
    for name in ("loss", "logits", "last_hidden_state"):
        value = outputs.get(name)
        if value is not None and not value.requires_grad:
            outputs[name] = value + learning.flatten()[:0].sum().to(value.dtype)
