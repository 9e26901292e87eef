"""A model of which most is frozen: modes of frozen modules, gradients of a loss without a block, and a warning where
what trains is stored in half precision.
"""

from __future__ import annotations

import functools
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
    """Sets the frozen modules inside a module to evaluation mode, so that dropout, router noise, LayerDrop rest.

    A module is frozen if it has weights and none of them trains. A module without weights, such as a dropout, goes with
    the module around it. A decoder layer and the block inside it are looked at separately. Three kinds keep their mode:

    - A layer that checkpoints activations itself, which transformers does in training mode only.
    - Layers with quantized weights: some pack them for inference in evaluation mode, and then pass on no gradient.
    - An embedding that gets noise (NEFTune), which transformers adds in training mode only.
    """
    trains: dict[nn.Module, bool | None] = {}
    roots = [module]
    while roots:
        root = roots.pop()
        _look(root, trains)
        _apply(root, trains, True, roots)


def _look(module: nn.Module, trains: dict[nn.Module, bool | None]) -> bool | None:
    found = [weight.requires_grad for weight in module._parameters.values() if weight is not None]
    for name, child in module._modules.items():
        if child is not None and name not in BLOCKS:
            inside = _look(child, trains)
            if inside is not None:
                found.append(inside)
    trains[module] = any(found) if found else None
    return trains[module]


def _apply(module: nn.Module, trains: dict[nn.Module, bool | None], around: bool, roots: list[nn.Module]) -> None:
    own = trains[module]
    learns = around if own is None else own
    quantized = is_packed(module) or any(w is not None and is_quantized(w) for w in module._parameters.values())
    if not learns and not quantized and not _checkpoints(module) and not hasattr(module, "neftune_noise_alpha"):
        module.training = False
    for name, child in module._modules.items():
        if child is not None and name in BLOCKS:
            roots.append(child)
        elif child is not None:
            _apply(child, trains, learns, roots)


def _checkpoints(module: nn.Module) -> bool:
    """Whether a module recomputes activations itself, as custom code may for its layers."""
    if not getattr(module, "gradient_checkpointing", False):
        return False
    return not any(isinstance(child, GradientCheckpointingLayer) for child in module.modules() if child is not module)


def only_images_learn(model: nn.Module) -> bool:
    """Whether some weights of an [`XAttnModel`] require a gradient, but none of the text model's own.

    Then text without images needs a stand-in image (`learning/stand_in.py`): without a block, `backward` fails.
    """
    parts = {part_of(name) for name, weight in model.named_parameters() if weight.requires_grad}
    return bool(parts) and "text" not in parts


def give_gradient_to_inputs(text_model: PreTrainedModel, tower: PreTrainedModel | None) -> tuple[RemovableHandle, ...]:
    """Registers hooks that make the outputs of the embeddings require a gradient, as trainers ask before checkpointing.

    Unlike transformers' hooks, these do nothing in two cases:

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


def warn_of_half_precision(model: nn.Module) -> None:
    """Warns once if weights that train are stored in half precision, where updates are lost to rounding.

    Adding less than 1/512 of a bfloat16 value gives the same value again. AdamW adds about the learning rate at each
    step, so with a small rate most weights never move. The loss still falls a little: gates and norms are float32.
    """
    learning = [weight for weight in model.parameters() if weight.requires_grad]
    narrow = [weight for weight in learning if weight.dtype in HALF]
    if not narrow:
        return
    count, total = (sum(weight.numel() for weight in weights) for weights in (narrow, learning))
    # Lost for certain is less than a quarter of the distance between a value and the next larger one.
    fraction = round(4 / max(torch.finfo(weight.dtype).eps for weight in narrow))
    kinds = " and ".join(sorted({str(weight.dtype).removeprefix("torch.") for weight in narrow}))
    logger.warning_once(
        f"{count:,} of {total:,} values that train are stored in {kinds}. Updates smaller than 1/{fraction} "
        f"of a value are lost there: with AdamW and a small learning rate, most. {REMEDY}"
    )
