"""Training a model whose largest part is frozen.

In transformers, freezing a weight leaves the mode of its module as it is. Here frozen modules go to evaluation mode.
This file also lets a loss have a gradient when no block runs, and warns if weights that train are in half precision.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import logging

from ..decoders.insertion import BLOCKS, part_of
from ..utils.tensor_checks import is_packed, is_quantized


logger = logging.get_logger(__name__)
HALF = (torch.bfloat16, torch.float16)
REMEDY = (
    "Call `hf_xattn.train_in_float32(model)` and train with autocast (`bf16=True` of `TrainingArguments`). Ignore this "
    "if your optimizer keeps float32 copies of the weights, as DeepSpeed's do."
)


def keep_frozen_in_eval(module: nn.Module) -> None:
    """Sets the frozen modules inside a module to evaluation mode, which turns off dropout, router noise and LayerDrop.

    A module is frozen if it has weights and none of them trains. A module without weights, such as a dropout, gets the
    mode of the module around it. A decoder layer and the block inside it are judged separately. Three kinds of frozen
    modules keep their mode:

    - A layer that checkpoints its activations itself, because transformers does this only in training mode.
    - A layer with quantized weights. In evaluation mode, some of these pack their weights for inference, and then no
      gradient passes through them.
    - An embedding that gets noise (NEFTune), because transformers adds the noise only in training mode.
    """
    _set_mode(module, True)


def _set_mode(module: nn.Module, learns: bool) -> None:
    """Sets the mode of a module whose surrounding module `learns`."""
    own = [weight.requires_grad for weight in _own_weights(module)]
    learns = any(own) if own else learns
    quantized = is_packed(module) or any(w is not None and is_quantized(w) for w in module._parameters.values())
    if not learns and not quantized and not _checkpoints(module) and not hasattr(module, "neftune_noise_alpha"):
        module.training = False
    for name, child in module.named_children():
        _set_mode(child, learns or name in BLOCKS)


def _own_weights(module: nn.Module) -> Iterator[nn.Parameter]:
    """Yields the weights of a module, without those of the blocks inside it."""
    yield from module.parameters(recurse=False)
    for name, child in module.named_children():
        if name not in BLOCKS:
            yield from _own_weights(child)


def _checkpoints(module: nn.Module) -> bool:
    """Whether a module itself recomputes activations, as the layers of custom code may do."""
    if not getattr(module, "gradient_checkpointing", False):
        return False
    return not any(isinstance(child, GradientCheckpointingLayer) for child in module.modules() if child is not module)


def only_images_learn(model: nn.Module) -> bool:
    """Whether some weights of an [`XAttnModel`] require a gradient, but none of the text model's own weights.

    In this case, a text without images gets a stand-in image (`learning/stand_in.py`). Otherwise no block would run,
    the loss would have no gradient, and `backward` would fail.
    """
    parts = {part_of(name) for name, weight in model.named_parameters() if weight.requires_grad}
    return bool(parts) and "text" not in parts


def give_gradient_to_inputs(text_model: PreTrainedModel, tower: PreTrainedModel | None) -> tuple[RemovableHandle, ...]:
    """Registers hooks that make the outputs of the embeddings require a gradient, which checkpointing may need.

    Unlike transformers' hooks, these do nothing in two cases:

    - In a frozen vision tower. Its layers are in evaluation mode and are not checkpointed, so a gradient would make it
      keep all activations.
    - In compiled code, which does not need this gradient, and which refuses a graph that returns such a tensor.

    Returns:
        The handles of the hooks. There is none for a tower whose embedding transformers does not find.
    """
    handles = []
    for part, trains_like in ((text_model, None), (tower, tower)):
        embedding = None if part is None else _embedding_of(part)
        if embedding is not None:
            # With a partial instead of a closure, a copy of the model asks its own tower, and the model can be pickled.
            hook = functools.partial(_require_gradient, trains_like)
            handles.append(embedding.register_forward_hook(hook))
    return tuple(handles)


def _embedding_of(part: PreTrainedModel) -> nn.Module | None:
    try:
        embedding: Any = part.get_input_embeddings()
    except NotImplementedError:  # transformers raises this if it finds no embedding, as in a convolutional tower
        return None
    return embedding if isinstance(embedding, nn.Module) else None


def _require_gradient(tower: nn.Module | None, embedding: nn.Module, inputs: Any, output: torch.Tensor) -> None:
    frozen = tower is not None and not tower.training  # a frozen tower stays in evaluation mode
    if not (frozen or torch.compiler.is_compiling()):
        output.requires_grad_(True)


def warn_of_half_precision(model: nn.Module) -> None:
    """Warns once if weights that train are stored in half precision, in which small updates are lost to rounding.

    If less than 1/512 of a bfloat16 value is added to it, the value does not change. AdamW adds about the learning rate
    at each step, so with a small rate most weights never move. The loss nevertheless falls a little, because gates and
    norms are float32. So the mistake is hard to see without the warning.
    """
    learning = [weight for weight in model.parameters() if weight.requires_grad]
    narrow = [weight for weight in learning if weight.dtype in HALF]
    if not narrow:
        return
    count, total = (sum(weight.numel() for weight in weights) for weights in (narrow, learning))
    # An update is certainly lost if it is less than a quarter of the distance to the next larger value.
    fraction = round(4 / max(torch.finfo(weight.dtype).eps for weight in narrow))
    kinds = " and ".join(sorted({str(weight.dtype).removeprefix("torch.") for weight in narrow}))
    logger.warning_once(
        f"{count:,} of {total:,} values that train are stored in {kinds}. Updates smaller than 1/{fraction} "
        f"of a value are lost there: with AdamW and a small learning rate, most. {REMEDY}"
    )
