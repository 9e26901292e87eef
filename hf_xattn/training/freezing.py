"""Decides which parts of a model train, at which rate and in which dtype, and names the modules that get adapters.

PEFT's `LoraConfig` finds layers by the end of their names. But `"q_proj"` is the name of layers in the decoder, in the
blocks and in most vision towers, so this file returns complete names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, TypeVar

from torch import nn
from transformers.pytorch_utils import Conv1D

from ..decoders.decoder import find_decoder
from ..decoders.insertion import BLOCKS, PARTS, part_of
from ..learning.activation_wrappers import WRAPPED, unwrapped
from ..learning.frozen import HALF
from ..learning.sharding import names_of_units
from ..modeling_xattn import XAttnForConditionalGeneration, XAttnModel
from ..utils.tensor_checks import is_packed, is_quantized, plain_tensors, shape_before, untrainable


if TYPE_CHECKING:
    from peft import PeftModel

Seeing = TypeVar("Seeing", bound=XAttnModel | XAttnForConditionalGeneration)
Trained = TypeVar("Trained", bound="XAttnModel | XAttnForConditionalGeneration | PeftModel")
REMEDIES = {
    "text": "Leave it frozen (`text=True`) and train an adapter on it (LoRA, see `hf_xattn.lora_targets`).",
    "vision": "Load the tower without `quantization_config`, or leave it frozen: `freeze(model, vision=True)`.",
    "connector": "Load the base with `quantization_config`: blocks and connector then stay in high precision.",
    "blocks": "Load the base with `quantization_config`: blocks and connector then stay in high precision.",
}


def freeze(
    model: Seeing,
    text: bool = True,
    vision: bool = True,
    connector: bool = False,
    blocks: bool = False,
    names: Mapping[str, bool] | None = None,
) -> Seeing:
    """Freezes the parts whose argument is True, and lets all others train. Each call decides anew about all parts.

    A frozen module stays in evaluation mode when the model is in training mode: there is no dropout and no router
    noise, and batch norms keep their statistics.

    Args:
        model ([`XAttnForConditionalGeneration`] or [`XAttnModel`]): changed in place.
        text (`bool`, defaults to `True`): the text model with its embeddings and its head, without the blocks.
        vision (`bool`, defaults to `True`): the vision tower.
        connector (`bool`, defaults to `False`): the connector.
        blocks (`bool`, defaults to `False`): the cross-attention blocks.
        names (`dict[str, bool]`, *optional*): exceptions, for example `{"*.lm_head.*": False}`. The keys are patterns
            of parameter names. True freezes these parameters, and False lets them train. If several patterns match a
            name, the last one decides.

    Returns:
        The model.

    Raises:
        TypeError: for a model without blocks, or for a wrapper around a model.
        ValueError: for quantized weights that should train, for a pattern that matches no name, or for a model with
            PEFT's adapters. The model is not changed in these cases.

    Example:

    ```python
    >>> import hf_xattn

    >>> model = hf_xattn.retrofit("HuggingFaceTB/SmolLM2-135M-Instruct", "google/siglip-base-patch16-224")
    >>> model = hf_xattn.freeze(model, connector=True, names={"*.lm_head.*": False})  # blocks and head train
    ```
    """
    chosen = _choose(model, names, text=text, vision=vision, connector=connector, blocks=blocks)
    for name, weight in model.named_parameters():
        weight.requires_grad_(chosen[name])
        if not chosen[name]:
            weight.grad = None  # with this gradient, an optimizer would take one more step
    if model.training:
        model.train()
    return model


def _choose(model: Any, names: Mapping[str, bool] | None, **frozen: bool) -> dict[str, bool]:
    """Returns for each parameter name whether `freeze` lets it train. Changes nothing."""
    body = body_of(model)
    if any("base_layer" in each._modules or "original_module" in each._modules for each in body.modules()):
        raise ValueError(
            "Expected `model` without PEFT's adapters, got adapters inside it: PEFT decides what trains. Call `freeze` "
            "before `get_peft_model`, and pass `modules_to_save=added_modules(model)`."
        )
    weights = list(model.named_parameters(remove_duplicate=False))  # a tied weight is listed under all its names
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
            raise untrainable(f"the part `{parts[name]}`", name, weight, REMEDIES[parts[name]])
    return {name: trains[id(weight)] for name, weight in model.named_parameters()}


def body_of(model: object) -> XAttnModel:
    """Returns the [`XAttnModel`] of a model, or raises a `TypeError`."""
    if isinstance(model, XAttnForConditionalGeneration):
        return model.model
    if isinstance(model, XAttnModel):
        return model
    raise TypeError(
        f"Expected `model` to be an XAttnForConditionalGeneration or an XAttnModel, got {type(model).__name__}. "
        "`retrofit` makes such a model. If the model is inside PEFT's wrapper, pass `model.get_base_model()`."
    )


def part_weights(
    model: XAttnModel | XAttnForConditionalGeneration | PeftModel,
) -> Iterator[tuple[str, str, nn.Parameter, nn.Module]]:
    """Yields the part, the name, the weight and the owning module of each parameter. The model may be inside PEFT's
    wrapper.
    """
    given: Any = model
    body = body_of(given.get_base_model() if hasattr(model, "get_base_model") else model)
    owners = {id(weight): each for each in body.modules() for weight in each._parameters.values()}
    for name, weight in body.named_parameters():
        yield part_of(name), name, weight, owners[id(weight)]


def training_table(model: XAttnModel | XAttnForConditionalGeneration | PeftModel) -> str:
    """Returns a table of what trains: the parameters of each part, how many of them train, and the memory they need.

    The column `weights` has the bytes of all weights, `gradients` those of the gradients, and `AdamW` those of the two
    averages that AdamW keeps of each trained weight, in the dtype of the weights. Activations are not counted.

    Args:
        model ([`XAttnForConditionalGeneration`] or [`XAttnModel`]): the model, also inside PEFT's wrapper.

    Raises:
        TypeError: for a model without blocks.

    Example:

    ```python
    >>> import hf_xattn

    >>> model = hf_xattn.retrofit("HuggingFaceTB/SmolLM2-135M-Instruct", "google/siglip-base-patch16-224")
    >>> table = hf_xattn.training_table(hf_xattn.freeze_base(model))
    >>> [line.split()[0] for line in table.splitlines()[1:]]
    ['text', 'vision', 'connector', 'blocks', 'total']
    ```
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


def freeze_base(model: Seeing, vision: bool = True) -> Seeing:
    """Freezes all weights except those of the blocks and the connector. The same as `freeze(model, vision=vision)`.

    The text model may be quantized. The blocks and the connector train in high precision in this case, too.

    Args:
        model ([`XAttnForConditionalGeneration`]): changed in place.
        vision (`bool`, defaults to `True`): freeze the vision tower, too.

    Returns:
        The model.

    Raises:
        TypeError, ValueError: as [`freeze`].

    Example:

    ```python
    >>> import hf_xattn

    >>> model = hf_xattn.retrofit("HuggingFaceTB/SmolLM2-135M-Instruct", "google/siglip-base-patch16-224")
    >>> model = hf_xattn.freeze_base(model)
    >>> all(weight.requires_grad for block in model.blocks for weight in block.parameters())
    True
    >>> any(weight.requires_grad for weight in model.model.vision_tower.parameters())
    False
    ```
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
        where (`str`, defaults to `"text"`): `"text"` for the decoder's own layers, without its head; `"blocks"` for the
            cross-attention blocks; `"both"` for these two; `"vision"` for the vision tower.
        projections (`list[str]`, *optional*): take only layers with these names, such as `["q_proj", "v_proj"]`. By
            default, all linear layers are taken. Experts whose weights are in one tensor are not linear layers; pass
            them as PEFT's `target_parameters`.

    Returns:
        `list[str]`: complete names of modules in `model`.

    Raises:
        TypeError: for a model without blocks.
        ValueError: for an unknown place, a vision tower that the model does not have, or a projection that no layer
            there has.

    Example:

    ```python
    >>> import hf_xattn
    >>> from peft import LoraConfig, get_peft_model

    >>> model = hf_xattn.retrofit("HuggingFaceTB/SmolLM2-135M-Instruct", "google/siglip-base-patch16-224")
    >>> targets = hf_xattn.lora_targets(model, projections=["q_proj", "v_proj"])
    >>> config = LoraConfig(target_modules=targets, modules_to_save=hf_xattn.added_modules(model))
    >>> model = get_peft_model(model, config)
    >>> model.save_pretrained("adapter")  # `PeftModel.from_pretrained(model, "adapter")` loads it
    ```
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
    """Returns the names of the blocks and the connector, for `LoraConfig(modules_to_save=...)`.

    With `modules_to_save`, all weights of these modules train and are saved with the adapter.

    Args:
        model ([`XAttnForConditionalGeneration`] or [`XAttnModel`]): the model that gets the adapter.

    Raises:
        TypeError: for a model without blocks.

    Example:

    ```python
    >>> import hf_xattn

    >>> model = hf_xattn.retrofit("HuggingFaceTB/SmolLM2-135M-Instruct", "google/siglip-base-patch16-224")
    >>> names = hf_xattn.added_modules(model)  # for `modules_to_save` of a `LoraConfig`
    ```
    """
    body = body_of(model)
    _, layers = find_decoder(body.text_model)
    added = [child for layer in layers for name, child in layer.named_children() if name in BLOCKS]
    if body.connector is not None and list(body.connector.parameters()):
        added.append(body.connector)
    names = {id(module): name for name, module in model.named_modules()}
    return [names[id(module)] for module in added]


def _linear_layers(module: nn.Module, prefix: str = "") -> Iterator[str]:
    """Yields the names of linear layers. A layer with an adapter counts as one: its inner modules are not named."""
    for name, child in module.named_children():
        inner = child._modules.get("base_layer")
        layer = child if inner is None else inner
        if isinstance(layer, (nn.Linear, Conv1D)) or is_packed(layer):
            yield prefix + name
        elif inner is None and "original_module" not in child._modules:  # `modules_to_save` train whole
            yield from _linear_layers(child, f"{prefix}{name}.")


def parameter_groups(
    model: XAttnModel | XAttnForConditionalGeneration | PeftModel,
    learning_rate: float | Mapping[str, float],
    weight_decay: float | Mapping[str, float] = 0.0,
    include_frozen: bool = False,
    started_rate: float = 1.0,
) -> list[dict[str, Any]]:
    """Returns parameter groups for an optimizer of torch: `torch.optim.AdamW(parameter_groups(model, 1e-4, 0.1))`.

    Gates, norms and biases get no weight decay. Decay would move a gate towards zero, which closes its block, and the
    weight of a norm towards zero, although its neutral value is one.

    Args:
        model ([`XAttnForConditionalGeneration`] or [`XAttnModel`]): the model, which may be inside PEFT's wrapper.
            Adapters of the text model belong to the part `text`. A copy that `modules_to_save` has made belongs to the
            part that it replaces.
        learning_rate (`float` or `dict[str, float]`): the learning rate of all parts, or of each part by name: `text`,
            `vision`, `connector`, `blocks`.
        weight_decay (`float` or `dict[str, float]`, defaults to 0.0): the weight decay of all parts, or of each part by
            name. A part that a `dict` does not name has none.
        include_frozen (`bool`, defaults to `False`): include parameters that are frozen now, for a run that thaws them
            later. An optimizer skips them until they have gradients, and needs no memory for them until then.
            Quantized weights are left out.
        started_rate (`float`, defaults to 1.0): share of the learning rate for all weights that do not start at zero.
            Only the last projections of the blocks and the gate `"token"` start at zero. Use it after
            [`align_connector`]; the reason is in `training/trainer.py`.

    Returns:
        `list[dict]`: groups with `params`, `lr`, `weight_decay` and `name`. No group is empty.

    Raises:
        TypeError: for a model without blocks, or for a rate that is not a number.
        ValueError: for an unknown part, for a part that trains but has no learning rate, for a weight that trains and
            belongs to no part (such as the prompts of PEFT's prompt tuning), or if nothing trains.

    Example:

    ```python
    >>> import hf_xattn
    >>> import torch

    >>> model = hf_xattn.retrofit("HuggingFaceTB/SmolLM2-135M-Instruct", "google/siglip-base-patch16-224")
    >>> rates = {"blocks": 3e-4, "connector": 1e-3}
    >>> groups = hf_xattn.parameter_groups(hf_xattn.freeze_base(model), rates, weight_decay=0.1)
    >>> optimizer = torch.optim.AdamW(groups)
    ```
    """
    rates, decays = _by_part("learning_rate", learning_rate), _by_part("weight_decay", weight_decay)
    groups: dict[tuple[str, bool, bool], list[nn.Parameter]] = {
        (part, decay, slow): [] for part in PARTS for decay in (True, False) for slow in (False, True)
    }
    of_parts = list(part_weights(model))
    known, new = set(), {id(weight) for weight in starts_at_zero(model)}
    for part, name, weight, owner in of_parts:
        known.add(id(weight))
        # Gates, norms and most biases are vectors; experts have a matrix of biases.
        decay = weight.ndim > 1 and not name.endswith("bias") and "norm" not in type(owner).__name__.lower()
        if weight.requires_grad or (include_frozen and not is_quantized(weight)):
            groups[part, decay, started_rate != 1.0 and id(weight) not in new].append(weight)
    others = [name for name, weight in model.named_parameters() if weight.requires_grad and id(weight) not in known]
    if others:
        raise ValueError(
            f"Expected each weight that trains to be in one of the parts {list(PARTS)}, got {others[0]} of PEFT's "
            "wrapper. Make groups without `parameter_groups`."
        )
    if not any(groups.values()):
        raise ValueError("`model` has no parameter that trains. Call `hf_xattn.freeze(model, ...)` first.")
    missing = sorted({part for (part, *_), weights in groups.items() if weights} - rates.keys(), key=PARTS.index)
    if missing:
        raise ValueError(f"`learning_rate`: expected a rate for each part that trains, got none for {missing}.")
    made = []
    for (part, decay, slow), weights in groups.items():
        factor, name = (decays.get(part, 0.0), part) if decay else (0.0, f"{part}, no decay")
        if weights:
            rate, name = (rates[part] * started_rate, f"{name}, started") if slow else (rates[part], name)
            made.append({"params": weights, "lr": rate, "weight_decay": factor, "name": name})
    return made


def starts_at_zero(model: nn.Module) -> list[nn.Parameter]:
    """Returns the weights that start at zero: those of the last projections of the blocks and of the gate `"token"`."""
    layers = [layer for layer in model.modules() if getattr(layer, "zero_init", False)]
    return [weight for layer in layers for weight in layer.parameters()]


def _by_part(argument: str, given: Any) -> dict[str, float]:
    rates = dict(given) if isinstance(given, Mapping) else dict.fromkeys(PARTS, given)
    unknown = [part for part in rates if part not in PARTS]
    if unknown:
        raise ValueError(f"`{argument}`: expected parts of {list(PARTS)}, got {given!r} with {unknown}.")
    return rates


def train_in_float32(model: Trained) -> Trained:
    """Converts the weights that train from half precision to float32. Frozen weights keep their dtype.

    In half precision, small updates are lost (see `learning/frozen.py`). Blocks and connector in float32 work without
    further settings next to a frozen text model and vision tower in half precision. If only a part of the text model or
    of the tower trains, use autocast (`bf16=True` of `TrainingArguments`, or `torch.autocast`), because their layers do
    not convert between the two dtypes.

    Call this function after `freeze` or `get_peft_model`, before the first step of an optimizer, and before the model
    is sharded.

    `from_pretrained` loads a saved model in the dtype of its text model, and warns of the weights that this rounds.
    Pass `dtype=torch.float32` to keep them. Gates and norms always stay float32.

    Args:
        model ([`XAttnForConditionalGeneration`] or [`XAttnModel`]): changed in place, also inside PEFT's wrapper.

    Returns:
        The model.

    Raises:
        TypeError: for a model without blocks.
        ValueError: if nothing trains, or if weights are sharded.

    Example:

    ```python
    >>> import hf_xattn

    >>> model = hf_xattn.retrofit(
    ...     "HuggingFaceTB/SmolLM2-135M-Instruct", "google/siglip-base-patch16-224", dtype="bfloat16"
    ... )
    >>> model = hf_xattn.train_in_float32(hf_xattn.freeze_base(model))
    >>> model.blocks[0].attn.q_proj.weight.dtype, model.get_input_embeddings().weight.dtype
    (torch.float32, torch.bfloat16)
    ```
    """
    learning = [weight for _, _, weight, _ in part_weights(model) if weight.requires_grad]
    if not learning:
        raise ValueError("`model` has no parameter that trains. Call `hf_xattn.freeze(model, ...)` first.")
    if any(hasattr(weight, "_local_tensor") or hasattr(weight, "_is_fsdp_flattened") for weight in learning):
        raise ValueError("Expected `model` with whole weights, got sharded ones. Call `train_in_float32` before that.")
    for weight in learning:
        if weight.dtype in HALF:
            gradient, weight.grad = weight.grad, None  # torch refuses a gradient of another dtype
            weight.data = weight.data.float()
            weight.grad = None if gradient is None else gradient.float()
    return model


def sharding_units(model: nn.Module) -> list[nn.Module]:
    """Returns the modules that FSDP2 should shard one by one. A run with accelerate does not need this function.

    ```python
    for unit in hf_xattn.sharding_units(model):
        fully_shard(unit)
    fully_shard(model)  # the rest: embeddings and head
    ```

    The modules are the decoder's layers (each with its block), the layers of the vision tower, the tower itself and the
    connector. FSDP2 needs one dtype in each unit. In half precision, gates and norms are float32, so the projections of
    a block are units of their own in this case.

    Args:
        model ([`XAttnForConditionalGeneration`] or [`XAttnModel`]): the model, which may be inside PEFT's wrapper.

    Returns:
        `list[nn.Module]`: modules of `model`; a module inside another one comes before it. For a layer in a checkpoint
        wrapper, the list has the wrapper.

    Raises:
        TypeError: for a model of another kind.
    """
    inner: Any = model
    if hasattr(inner, "get_base_model"):
        inner = inner.get_base_model()
    body_of(inner)
    names = names_of_units(inner)
    modules: list[nn.Module] = list(inner.modules())
    inside = {id(module._modules[WRAPPED]) for module in modules if WRAPPED in module._modules}
    return [
        module for module in reversed(modules) if id(module) not in inside and type(unwrapped(module)).__name__ in names
    ]


__all__ = [
    "added_modules",
    "freeze",
    "freeze_base",
    "lora_targets",
    "parameter_groups",
    "sharding_units",
    "train_in_float32",
    "training_table",
]
