"""Training with a frozen text model: if no block runs in a forward, the loss has no gradient and `backward` fails.

Text without images gets a stand-in image that no text sees (`learning/stand_in.py`). If LayerDrop skips every layer with a block, the
outputs get a gradient of zero.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from ..decoders.model_parts import part_of


def only_images_learn(model: nn.Module) -> bool:
    """Whether some weights require a gradient, but none of the text model's own.

    Args:
        model ([`XAttnModel`]): with the blocks inside `text_model`.
    """
    found = False
    for name, weight in model.named_parameters():
        if weight.requires_grad:
            if part_of(name) == "text":
                return False
            found = True
    return found


def give_gradient(outputs: dict[str, Any], weights: Iterable[nn.Parameter]) -> None:
    """Connects the outputs of a forward to the first weight that requires a gradient. The gradient is zero, the outputs do not change."""
    learning = next((weight for weight in weights if weight.requires_grad), None)
    if learning is None:
        return
    for name in ("loss", "logits", "last_hidden_state"):
        value = outputs.get(name)
        if value is not None and not value.requires_grad:
            outputs[name] = value + learning.flatten()[:0].sum().to(value.dtype)
