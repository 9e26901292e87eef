"""What a run makes of a model's weights: groups for an optimizer, float32 for what trains, units for FSDP2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from ..decoders.insertion import PARTS
from ..learning.activation_wrappers import WRAPPED, unwrapped
from ..learning.lost_updates import HALF
from ..learning.sharding import names_of_units
from ..utils.tensor_checks import is_quantized
from .freezing import body_of, part_weights


def parameter_groups(
    model: Any,
    learning_rate: float | Mapping[str, float],
    weight_decay: float | Mapping[str, float] = 0.0,
    include_frozen: bool = False,
    started_rate: float = 1.0,
) -> list[dict[str, Any]]:
    """Returns groups for an optimizer of torch: `torch.optim.AdamW(parameter_groups(model, 1e-4, 0.1))`.

    Gates, norms and biases get no weight decay. A gate that decays closes the block; norms decay towards zero, not
    towards one.

    Args:
        model ([`XAttnForConditionalGeneration`] or [`XAttnModel`]): the model, also inside PEFT's wrapper: adapters of
            the text model belong to the part `text`, copies of `modules_to_save` to the part they stand for.
        learning_rate (`float` or `dict[str, float]`): of all parts, or of each: `text`, `vision`, `connector`,
            `blocks`.
        weight_decay (`float` or `dict[str, float]`, defaults to 0.0): of all parts, or of each. A part that a `dict`
            does not name has none.
        include_frozen (`bool`, defaults to `False`): also parameters that are frozen now, for a run that thaws them
            later. An optimizer passes over them until they have gradients, and needs no memory for them. Quantized
            weights are left out.
        started_rate (`float`, defaults to 1.0): share of the learning rate for weights that do not start at zero, as
            after [`align_connector`]: all but the last projections of blocks (see `training/trainer.py`).

    Returns:
        `list[dict]`: groups with `params`, `lr`, `weight_decay` and `name`. No group is empty.

    Raises:
        TypeError: for a model without blocks, or a rate that is no number.
        ValueError: for an unknown part, a part that trains without a learning
            rate, a weight that trains in no part (the prompts of PEFT's prompt tuning), or if nothing trains.
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
    """The weights that start at zero: those of the last projections of blocks."""
    layers = [layer for layer in model.modules() if getattr(layer, "zero_init", False)]
    return [weight for layer in layers for weight in layer.parameters()]


def _by_part(argument: str, given: Any) -> dict[str, float]:
    rates = dict(given) if isinstance(given, Mapping) else dict.fromkeys(PARTS, given)
    unknown = [part for part in rates if part not in PARTS]
    if unknown:
        raise ValueError(f"`{argument}`: expected parts of {list(PARTS)}, got {given!r} with {unknown}.")
    return rates


def train_in_float32(model: Any) -> Any:
    """Converts the weights that train from half precision to float32. Frozen weights keep their dtype and memory.

    In half precision small updates are lost (see `learning/lost_updates.py`). Blocks and connector then work as they
    are, beside a frozen text model and tower in half precision. Text models and towers that train in part need
    autocast, because their layers do not convert what they pass on: `bf16=True` of `TrainingArguments`, or
    `torch.autocast`.

    Call it after `freeze` or `get_peft_model`, and before the first step of an optimizer and before the model is
    sharded. A saved model is loaded in the dtype of its text model, with a warning of what that rounds, unless
    `from_pretrained` gets a `dtype`; gates and norms stay float32.

    Args:
        model ([`XAttnForConditionalGeneration`] or [`XAttnModel`]): changed in place, also inside PEFT's wrapper.

    Returns:
        The model.

    Raises:
        TypeError: for a model without blocks.
        ValueError: if nothing trains, or for sharded weights.
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


def sharding_units(model: Any) -> list[nn.Module]:
    """Returns the modules that FSDP2 shards one by one, for runs without accelerate, which finds them by itself.

    ```python
    for unit in hf_xattn.sharding_units(model):
        fully_shard(unit)
    fully_shard(model)  # the rest: embeddings and head
    ```

    These are the decoder's layers, each with its block, the layers of the vision tower, the tower and the connector. In
    half precision, gates and norms are float32, and FSDP2 wants one dtype in a unit: then the projections of a block
    are units of their own, too.

    Args:
        model ([`XAttnForConditionalGeneration`] or [`XAttnModel`]): the model, also inside PEFT's wrapper.

    Returns:
        `list[nn.Module]`: modules of `model`, those inside others first. Of a layer in a checkpoint wrapper, the
        wrapper.

    Raises:
        TypeError: for a model of another kind.
    """
    inner: Any = model.get_base_model() if hasattr(model, "get_base_model") else model
    body_of(inner)
    names = names_of_units(inner)
    modules: list[nn.Module] = list(inner.modules())
    inside = {id(module._modules[WRAPPED]) for module in modules if WRAPPED in module._modules}
    return [
        module for module in reversed(modules) if id(module) not in inside and type(unwrapped(module)).__name__ in names
    ]


__all__ = ["parameter_groups", "sharding_units", "train_in_float32"]
