"""Chooses which parts of a model train, tells what trains, and names the modules that PEFT's adapters go to.

A `LoraConfig` finds its layers by the end of their names, and
`"q_proj"` is a layer of the decoder, of the blocks and of most vision towers: hence whole names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D

from ..decoders.decoder import find_decoder
from ..decoders.insertion import BLOCKS, PARTS, part_of
from ..modeling_xattn import XAttnForConditionalGeneration, XAttnModel
from ..utils.keywords import refuse_unknown
from ..utils.tensor_checks import is_packed, is_quantized, plain_tensors, shape_before, untrainable


REMEDIES = {
    "text": "Leave it frozen (`text=True`) and train an adapter on it (LoRA, see `hf_xattn.lora_targets`).",
    "vision": "Load the tower without `quantization_config`, or leave it frozen: `freeze(model, vision=True)`.",
    "connector": "Load the base with `quantization_config`: blocks and connector then stay in high precision.",
    "blocks": "Load the base with `quantization_config`: blocks and connector then stay in high precision.",
}


def freeze(
    model: Any,
    text: bool = True,
    vision: bool = True,
    connector: bool = False,
    blocks: bool = False,
    names: Mapping[str, bool] | None = None,
    **unknown: Any,
) -> Any:
    """Freezes the parts that are True, and lets the others train. What an earlier call has set does not matter.

    A frozen module stays in evaluation mode when the model is in training mode: no dropout, no router noise, and batch
    norms keep their statistics.

    Args:
        model ([`XAttnForConditionalGeneration`] or [`XAttnModel`]): changed in place.
        text (`bool`, defaults to `True`): the text model with its embeddings and its head, without the blocks.
        vision (`bool`, defaults to `True`): the vision tower.
        connector (`bool`, defaults to `False`): the connector.
        blocks (`bool`, defaults to `False`): the cross-attention blocks.
        names (`dict[str, bool]`, *optional*): exceptions: for patterns of parameter names, True to freeze and False to
            train, for example `{"*.lm_head.*": False}`. The last pattern that matches a name decides.

    Returns:
        The model.

    Raises:
        TypeError: for a model without blocks, or a wrapper around one; for an unknown argument.
        ValueError: for quantized weights that shall train, a pattern that no name matches, or PEFT's adapters. The
            model is not changed then.
    """
    refuse_unknown(freeze, unknown, frozenset())
    chosen = _choose(model, names, text=text, vision=vision, connector=connector, blocks=blocks)
    for name, weight in model.named_parameters():
        weight.requires_grad_(chosen[name])
        if not chosen[name]:
            weight.grad = None  # an optimizer would take one more step with it
    if model.training:
        model.train()
    return model


def _choose(model: Any, names: Mapping[str, bool] | None, **frozen: bool) -> dict[str, bool]:
    """Returns for each parameter name whether it trains after `freeze`. Changes nothing."""
    body = body_of(model)
    if any("base_layer" in each._modules or "original_module" in each._modules for each in body.modules()):
        raise ValueError(
            "Expected `model` without PEFT's adapters, got adapters inside it: PEFT decides what trains. Call `freeze` "
            "before `get_peft_model`, and pass `modules_to_save=added_modules(model)`."
        )
    weights = list(model.named_parameters(remove_duplicate=False))  # a tied weight goes by all its names
    prefix = "" if body is model else "model."
    parts = {name: part_of(name.removeprefix(prefix)) for name, _ in weights}
    trains = {id(weight): not frozen[parts[name]] for name, weight in reversed(weights)}
    for pattern, stays in (names or {}).items():
        matched = [weight for name, weight in weights if fnmatchcase(name, pattern)]
        if not matched:
            raise ValueError(f"`names`: expected patterns of parameter names, got {pattern!r}, which none matches.")
        trains.update((id(weight), not stays) for weight in matched)
    for name, weight in weights:
        if trains[id(weight)] and is_quantized(weight):
            raise untrainable(_called(parts[name], name, model), name, weight, REMEDIES[parts[name]])
    return {name: trains[id(weight)] for name, weight in model.named_parameters()}


def body_of(model: Any) -> XAttnModel:
    """Returns the [`XAttnModel`] of a model, or raises a `TypeError`."""
    if isinstance(model, XAttnForConditionalGeneration):
        return model.model
    if isinstance(model, XAttnModel):
        return model
    raise TypeError(
        f"Expected `model` to be an XAttnForConditionalGeneration or an XAttnModel, got {type(model).__name__}. "
        "`retrofit` makes such a model. Of a model inside PEFT's wrapper pass `get_base_model()`."
    )


def part_weights(model: Any) -> Iterator[tuple[str, str, nn.Parameter, nn.Module]]:
    """Yields part, name, weight and owner of each parameter, also of a model inside PEFT's wrapper."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    body = body_of(inner)
    owners = {id(weight): each for each in body.modules() for weight in each._parameters.values()}
    for name, weight in body.named_parameters():
        yield part_of(name), name, weight, owners[id(weight)]


def training_table(model: Any) -> str:
    """Returns a table of what trains: for each part its parameters, those that train, and the memory they need.

    `weights` are the bytes of all weights, `gradients` of those that train, and `AdamW` of its two averages, in the
    dtype of the weights. Activations are not counted.

    Args:
        model ([`XAttnForConditionalGeneration`] or [`XAttnModel`]): the model, also inside PEFT's wrapper.

    Raises:
        TypeError: for a model without blocks.
    """
    figures = {part: [0, 0, 0, 0, 0] for part in PARTS}
    for part, _, weight, _ in part_weights(model):
        count = shape_before(weight).numel()
        size = sum(plain.numel() * plain.element_size() for plain in plain_tensors(weight))
        learns = weight.requires_grad
        for place, figure in enumerate((count, count * learns, size, size * learns, 2 * size * learns)):
            figures[part][place] += figure
    figures["total"] = [sum(column) for column in zip(*figures.values())]
    lines: list[tuple[str, ...]] = [("part", "parameters", "train", "weights", "gradients", "AdamW")]
    for part, (count, learning, *sizes) in figures.items():
        if count:
            lines.append((part, f"{count:,}", f"{learning:,}", *(f"{size / 2**20:,.1f} MiB" for size in sizes)))
    widths = [max(map(len, column)) for column in zip(*lines)]
    return "\n".join(
        "  ".join([first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(cells, widths[1:]))])
        for first, *cells in lines
    )


def _called(part: str, name: str, model: Any) -> str:
    if part == "blocks":
        weight = model.get_parameter(name)
        return next(f"block {b.layer_idx}" for b in body_of(model).blocks if any(w is weight for w in b.parameters()))
    called = {"text": "the text model", "vision": "the vision tower", "connector": "the connector"}
    return f"{called[part]} (`{part}=False`)"


def freeze_base(model: XAttnForConditionalGeneration, vision: bool = True) -> XAttnForConditionalGeneration:
    """Freezes all weights except those of the blocks and the connector: `freeze(model, vision=vision)`, same errors.

    The base may be quantized: then too the blocks and the connector train, in high precision.
    """
    return freeze(model, vision=bool(vision))


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
        projections (`list[str]`, *optional*): only layers with these names, such as `["q_proj", "v_proj"]`. Default:
            all linear layers. Experts in one tensor are none: PEFT's `target_parameters` takes them.

    Raises:
        TypeError: for a model without blocks.
        ValueError: for an unknown place, a vision tower that the model does not have, or a projection that no layer
            there has.
    """
    body = body_of(model)
    if where not in PLACES:
        raise ValueError(f"`where` must be one of {list(PLACES)}, got {where!r}.")
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
            got = f"got {list(projections)!r}"
            raise ValueError(f"`projections` must be among {sorted(there)} for `where={where!r}`, {got}.")
        found = [name for name in found if name.rpartition(".")[2] in projections]
    prefix = next(name for name, module in model.named_modules() if module is root)
    return [f"{prefix}.{name}" for name in found]


def added_modules(model: XAttnForConditionalGeneration | XAttnModel) -> list[str]:
    """Returns the names of blocks and connector for `LoraConfig(modules_to_save=...)`, which trains all their weights.

    Raises a `TypeError` for a model without blocks.
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


__all__ = ["added_modules", "freeze", "freeze_base", "lora_targets", "training_table"]
