"""Makes the inputs of the layers require a gradient, where activation checkpointing needs it.

Reentrant checkpointing gives no gradient to the weights of a layer whose inputs require none. So transformers makes the output of every
embedding require a gradient when checkpointing is enabled. This file does so too, with two differences:

- Not in a frozen vision tower. It would keep all its activations, because its layers are in evaluation mode and so are not checkpointed,
  for gradients that nothing uses.
- Not in compiled code, which needs it nowhere, and which refuses a graph that returns such a tensor.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel


def give_gradient_to_inputs(text_model: PreTrainedModel, tower: PreTrainedModel | None) -> tuple[RemovableHandle, ...]:
    """Registers hooks on the embeddings. A tower that is frozen or thawed later needs no other hook.

    Returns:
        the hooks' handles, none for a tower whose embedding transformers does not find.
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
