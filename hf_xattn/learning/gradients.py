"""Gradients where most of a model is frozen: of a loss without a block, and of the inputs of checkpointed layers."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from ..decoders.insertion import part_of


def only_images_learn(model: nn.Module) -> bool:
    """Whether some weights of an [`XAttnModel`] require a gradient, but none of the text model's own.

    Then text without images needs a stand-in image (`learning/stand_in.py`): without a block, `backward` fails.
    """
    parts = {part_of(name) for name, weight in model.named_parameters() if weight.requires_grad}
    return bool(parts) and "text" not in parts


def give_gradient(outputs: dict[str, Any], weights: Iterable[nn.Parameter]) -> None:
    """Connects the outputs of a forward to the first weight that requires a gradient, by a gradient of zero.

    For LayerDrop that skips every layer with a block: `backward` would fail. The outputs do not change.
    """
    learning = next((weight for weight in weights if weight.requires_grad), None)
    if learning is None:
        return
    for name in ("loss", "logits", "last_hidden_state"):
        value = outputs.get(name)
        if value is not None and not value.requires_grad:
            outputs[name] = value + learning.flatten()[:0].sum().to(value.dtype)


def give_gradient_to_inputs(text_model: PreTrainedModel, tower: PreTrainedModel | None) -> tuple[RemovableHandle, ...]:
    """Registers hooks that make the outputs of the embeddings require a gradient, for activation checkpointing.

    Reentrant checkpointing gives no gradient to the weights of a layer whose inputs require none. Unlike transformers'
    hooks, these do nothing in two cases:

    - In a frozen vision tower. Its layers are in evaluation mode and not checkpointed: it would keep all activations.
    - In compiled code, which needs no such gradient, and refuses a graph that returns such a tensor.

    Returns the hooks' handles, none for a tower whose embedding transformers does not find.
    """
    handles = []
    for part, trains_like in ((text_model, None), (tower, tower)):
        embedding = None if part is None else _embedding_of(part)
        if embedding is not None:
            # A partial, not a closure: a copy of the model then asks its own tower, and the model can be pickled.
            hook = functools.partial(_require_gradient, trains_like)
            handles.append(embedding.register_forward_hook(hook))
    return tuple(handles)


def _embedding_of(part: PreTrainedModel) -> nn.Module | None:
    try:
        embedding: Any = part.get_input_embeddings()
    except NotImplementedError:  # transformers' way to say that it finds none, as in a convolutional tower
        return None
    return embedding if isinstance(embedding, nn.Module) else None


def _require_gradient(tower: nn.Module | None, embedding: nn.Module, inputs: Any, output: torch.Tensor) -> None:
    frozen = tower is not None and not tower.training  # a frozen tower stays in evaluation mode
    if not (frozen or torch.compiler.is_compiling()):
        output.requires_grad_(True)
