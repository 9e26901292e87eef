"""Names of modules for PEFT, each of which means one module.

A `LoraConfig` finds its layers by the end of their names, and `"q_proj"` is a layer of the decoder, of the blocks and
of most vision towers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn
from transformers.pytorch_utils import Conv1D

from ..decoders.decoder import find_decoder
from ..decoders.insertion import BLOCKS
from ..modeling_xattn import XAttnForConditionalGeneration, XAttnModel
from ..utils.quantized_weights import is_packed
from .freezing import body_of


PLACES = ("text", "blocks", "both", "vision")


def lora_targets(
    model: XAttnForConditionalGeneration | XAttnModel, where: str = "text", projections: Sequence[str] | None = None
) -> list[str]:
    """Returns names of linear layers for `LoraConfig(target_modules=...)`.

    Args:
        model ([`XAttnForConditionalGeneration`] or [`XAttnModel`]): the model that gets the adapter. It may be
            quantized, or have adapters already.
        where (`str`, defaults to `"text"`): `"text"`: the decoder's own layers, without its head; `"blocks"`: the
            cross-attention blocks; `"both"`; `"vision"`: the vision tower, which no other choice contains.
        projections (`list[str]`, *optional*): only layers with these names, such as `["q_proj", "v_proj"]`. By default
            all linear layers. Experts that a decoder keeps in one tensor are not linear layers: PEFT's
            `target_parameters` takes them.

    Raises:
        TypeError: for a model without blocks.
        ValueError: for an unknown place, a vision tower that the model does not have, or a projection that no layer
            there has.
    """
    body = body_of(model)
    if where not in PLACES:
        raise ValueError(f"`where` must be one of {list(PLACES)}, got {where!r}.")
    is_list = isinstance(projections, (list, tuple, set)) and all(isinstance(name, str) for name in projections)
    if projections is not None and not is_list:
        raise ValueError(
            f"`projections` must be a list of names such as ['q_proj', 'v_proj'] or None, got {projections!r}."
        )
    root: nn.Module | None = body.vision_tower if where == "vision" else find_decoder(body.text_model)[1]
    if root is None:
        raise ValueError("`where='vision'` needs a model with a vision tower, got one without.")
    found = list(_linear_layers(root))
    if where in ("text", "blocks"):
        found = [name for name in found if (where == "blocks") == any(part in BLOCKS for part in name.split("."))]
    if projections is not None:
        there = {name.rpartition(".")[2] for name in found}
        missing = sorted(set(projections) - there)
        if missing or not projections:
            raise ValueError(
                f"`projections` must be among {sorted(there)} for `where={where!r}`, got {list(projections)!r}."
            )
        found = [name for name in found if name.rpartition(".")[2] in projections]
    prefix = next(name for name, module in model.named_modules() if module is root)
    return [f"{prefix}.{name}" for name in found]


def added_modules(model: XAttnForConditionalGeneration | XAttnModel) -> list[str]:
    """Returns the names of blocks and connector for `LoraConfig(modules_to_save=...)`, which trains all their weights.

    Args:
        model ([`XAttnForConditionalGeneration`] or [`XAttnModel`]): the model that gets the adapter.

    Raises:
        TypeError: for a model without blocks.
    """
    body = body_of(model)
    _, layers = find_decoder(body.text_model)
    added = [child for layer in layers for name, child in layer.named_children() if name in BLOCKS]
    if body.connector is not None and list(body.connector.parameters()):
        added.append(body.connector)
    names = {id(module): name for name, module in model.named_modules()}
    return [names[id(module)] for module in added]


def _linear_layers(module: nn.Module, prefix: str = "") -> Iterator[str]:
    """Names of linear layers. For a layer with an adapter it is the name of the layer, not of the parts inside."""
    for name, child in module.named_children():
        inner = child._modules.get("base_layer")
        layer = child if inner is None else inner
        if isinstance(layer, (nn.Linear, Conv1D)) or is_packed(layer):
            yield prefix + name
        elif inner is None and "original_module" not in child._modules:  # of `modules_to_save`: trains whole
            yield from _linear_layers(child, f"{prefix}{name}.")


__all__ = ["added_modules", "lora_targets"]
