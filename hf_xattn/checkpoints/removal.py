"""Takes blocks out of a text model again, and leaves them out of the files that the text model saves itself."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from ..decoders.derived import is_derived, original_class
from ..decoders.insertion import BLOCKS, PREFIX
from ..decoders.quantization import return_quantizer
from ..decoders.vocabulary import PREFIX as EXTENDED
from .block_sets import XAttnSetsMixin
from .peft_adapters import refuse_adapter_layers


# Prefixes of the classes that a retrofit gives to modules of a text model, and the children that it adds to them.
ADDED = {PREFIX: BLOCKS, EXTENDED: ("additional",)}
INITIALIZED = "_is_hf_initialized"
HERE = "_insertion"  # attribute of a text model
OF_CALLERS = ("training", HERE)
ABSENT = object()

# For each model inside a text model and for its configuration, by name: attributes.
Attributes = dict[tuple[str, str], dict[str, Any]]


@dataclass
class Insertion:
    """What a retrofit has changed in a text model, beside classes and children. The text model keeps it."""

    was_given: bool  # whether the text model existed before; otherwise the model around it has built it
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)  # that of the model around the text model
    before: Attributes = field(default_factory=dict)  # attributes that have changed
    after: Attributes = field(default_factory=dict)
    not_initialized: list[str] = field(default_factory=list)  # names of parts without the attribute `INITIALIZED`


class AddedTensors(Set):
    """Names of the tensors that were added to a text model, or to a part of it, for its `_keys_to_ignore_on_save`.

    They are read when they are asked for: another set of blocks (`set_cross_attention`) has other names. `own` are the
    names that the model leaves out in any case.
    """

    def __init__(self, model: PreTrainedModel, own: Iterable[str]):
        self.own = set(own)
        # Not the model itself: a model that refers to itself keeps its memory until the garbage collector runs.
        self.holders = {name: part for name, part in model.named_modules() if _added_names(part)}

    def __iter__(self) -> Iterator[str]:
        yield from self.own
        for name, holder in self.holders.items():
            for child in _added_names(holder):
                if (added := holder._modules.get(child)) is not None:
                    yield from added.state_dict(prefix=f"{name}.{child}.", keep_vars=True)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, name: object) -> bool:
        return any(name == each for each in self)


def leave_out_added(model: nn.Module) -> None:
    """Makes a text model, the models inside it and those around it save no tensors that were added."""
    for part in model.modules():
        if isinstance(part, PreTrainedModel) and not isinstance(part._keys_to_ignore_on_save, AddedTensors):
            added: Any = AddedTensors(part, part._keys_to_ignore_on_save or ())
            if added.holders:
                part._keys_to_ignore_on_save = added


@contextlib.contextmanager
def recorded(text_model: PreTrainedModel, was_given: bool = True) -> Iterator[Insertion]:
    """Notes what is changed inside, for [`remove_blocks`]. After an error nothing is changed."""
    insertion = Insertion(was_given)
    before = _attributes(text_model)
    not_initialized = [name for name, part in _parts(text_model) if not getattr(part, INITIALIZED, False)]
    try:
        yield insertion
    except BaseException:
        vars(text_model).pop(HERE, None)
        _take_out(text_model, Insertion(was_given, "", before, _attributes(text_model), not_initialized))
        raise
    after = _attributes(text_model)
    insertion = vars(text_model).setdefault(HERE, insertion)  # of a `with` statement inside this one
    insertion.not_initialized = not_initialized
    insertion.before = {place: _differing(own, after[place]) for place, own in before.items()}
    insertion.after = {place: _differing(after[place], own) for place, own in before.items()}


def remove_blocks(model: Any) -> PreTrainedModel:
    """Takes the blocks out of a text model. It is then what it was before [`retrofit`], bit for bit.

    Added tokens are taken out, too. What was trained, frozen, cast or moved meanwhile stays so. The model around the
    text model cannot be called or saved any more.

    Args:
        model ([`XAttnForConditionalGeneration`], [`XAttnModel`] or `PreTrainedModel`): a model with blocks, or the text
            model that contains them. Changed in place.

    Returns:
        `PreTrainedModel`: the text model.

    Raises:
        TypeError: for anything but a model.
        ValueError: for a model without blocks, or whose blocks were removed already; for layers that hold adapters
            (PEFT) or hooks of accelerate, or that FSDP has split. The model is not changed then.
    """
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"Expected `model` to be a model with blocks, got {type(model).__name__}. Of a model inside a wrapper pass "
            "the model itself."
        )
    body: Any = model.base_model
    is_outer = isinstance(body, XAttnSetsMixin)
    if is_outer:
        body._check_inserted()
    text_model: Any = body.text_model if is_outer else model
    insertion: Insertion | None = vars(text_model).get(HERE)
    if insertion is None:
        raise ValueError(
            "Expected `model` to be a model with blocks, such as `retrofit` returns, or the text model inside it "
            f"(`model.base_model.text_model`), got a {type(model).__name__}."
        )
    remedy = "Merge the adapter first (`merge_and_unload()`), or delete it."
    refuse_adapter_layers(text_model, "`remove_blocks` cannot take blocks out of", remedy)
    for name, part in text_model.named_modules():
        if _added_names(part) and ("_hf_hook" in vars(part) or original_class(part) is None):
            why = "has a hook of accelerate" if "_hf_hook" in vars(part) else f"is a {type(part).__name__}"
            raise ValueError(
                f"Expected `model` to be neither dispatched with a device map nor split by FSDP, but its part {name} "
                f"{why}. Save the model, and load it without."
            )
    if is_outer and not insertion.was_given:
        text_model.generation_config = getattr(model, "generation_config", text_model.generation_config)
        return_quantizer(body, text_model)
    _take_out(text_model, insertion)
    del vars(text_model)[HERE]
    return text_model.train(model.training)


def _take_out(text_model: PreTrainedModel, insertion: Insertion) -> None:
    """Undoes a retrofit, as far as it has come. Attributes that were set since then stay."""
    for part in list(text_model.modules()):
        for name in (added := _added_names(part)):
            part._modules.pop(name, None)
        if added:
            part.__class__ = original_class(part)  # type: ignore[assignment]
    for place, now in _attributes(text_model, copies=False).items():
        old, new = insertion.before.get(place, {}), insertion.after.get(place, {})
        for name in {*old, *new}.difference(OF_CALLERS):
            if now.get(name, ABSENT) is not new.get(name, ABSENT):
                continue
            if name in old:
                now[name] = old[name]
            else:
                del now[name]
    parts = dict(_parts(text_model))
    for name in insertion.not_initialized:
        vars(parts.get(name, nn.Identity())).pop(INITIALIZED, None)


def _attributes(text_model: PreTrainedModel, copies: bool = True) -> Attributes:
    models = [(name, part) for name, part in text_model.named_modules() if isinstance(part, PreTrainedModel)]
    found = {(name, "model"): vars(part) for name, part in models}
    found |= {(name, "config"): vars(part.config) for name, part in models}
    return {place: dict(own) for place, own in found.items()} if copies else found


def _differing(own: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in own.items() if value is not other.get(name, ABSENT)}


def _parts(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Modules, parameters and buffers, by name."""
    return chain(model.named_modules(), model.named_parameters(), model.named_buffers())


def _added_names(part: nn.Module) -> tuple[str, ...]:
    """Names of the children that a retrofit adds to a module."""
    return next((names for prefix, names in ADDED.items() if is_derived(part, prefix)), ())
