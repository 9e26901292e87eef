"""Notes what a retrofit changes in a text model.

`remove_blocks` undoes these changes, and the text model leaves the added tensors out of its own files.
"""

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
from ..parts.vocabulary import PREFIX as EXTENDED


# A retrofit gives classes with these prefixes to modules of a text model, and adds these children to the modules.
ADDED = {PREFIX: BLOCKS, EXTENDED: ("additional",)}
INITIALIZED = "_is_hf_initialized"
INSERTION = "_insertion"  # attribute of a text model
OF_CALLERS = ("training", INSERTION)
ABSENT = object()

# The attributes of each model inside a text model, and of its configuration, by the name of the model.
Attributes = dict[tuple[str, str], dict[str, Any]]


@dataclass
class Insertion:
    """What a retrofit has changed in a text model, apart from classes and children."""

    was_given: bool  # whether the text model existed before. Otherwise the model around it has built it
    # A unique name of this insertion, by which the model around the text model knows it.
    name: str = field(default_factory=lambda: uuid.uuid4().hex)
    before: Attributes = field(default_factory=dict)  # the attributes that have changed, with their values before
    after: Attributes = field(default_factory=dict)
    not_initialized: list[str] = field(default_factory=list)  # names of parts without the attribute `INITIALIZED`


class AddedTensors(Set):
    """The names of the tensors that were added to a model, as its `_keys_to_ignore_on_save`.

    The names are read each time that they are needed, because an adapter (PEFT) renames the weights of blocks.

    Args:
        model: a text model, or a model inside it.
        own: names that the model leaves out of its files in any case.
    """

    def __init__(self, model: PreTrainedModel, own: Iterable[str]):
        self.own = set(own)
        # The model itself is not kept here: a model that refers to itself is freed only by the garbage collector.
        self.holders = {name: part for name, part in model.named_modules() if added_names(part)}

    def __iter__(self) -> Iterator[str]:
        yield from self.own
        for name, holder in self.holders.items():
            for child in added_names(holder):
                if (added := holder._modules.get(child)) is not None:
                    yield from added.state_dict(prefix=f"{name}.{child}.", keep_vars=True)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, name: object) -> bool:
        return any(name == each for each in self)


def leave_out_added(model: nn.Module) -> None:
    """Lets a text model, and each model inside it, leave added tensors out of its files."""
    for part in model.modules():
        if isinstance(part, PreTrainedModel) and not isinstance(part._keys_to_ignore_on_save, AddedTensors):
            added: Any = AddedTensors(part, part._keys_to_ignore_on_save or ())
            if added.holders:
                part._keys_to_ignore_on_save = added


@contextlib.contextmanager
def recorded(text_model: PreTrainedModel, was_given: bool = True) -> Iterator[Insertion]:
    """Context that notes what changes in a text model, for [`remove_blocks`]. After an error it undoes the changes."""
    insertion = Insertion(was_given)
    before = _attributes(text_model)
    not_initialized = [name for name, part in _parts(text_model) if not getattr(part, INITIALIZED, False)]
    try:
        yield insertion
    except BaseException:
        vars(text_model).pop(INSERTION, None)
        take_out(text_model, Insertion(was_given, "", before, _attributes(text_model), not_initialized))
        raise
    after = _attributes(text_model)
    insertion = vars(text_model).setdefault(INSERTION, insertion)  # an inner `with` statement may have set it
    insertion.not_initialized = not_initialized
    insertion.before = {place: _differing(own, after[place]) for place, own in before.items()}
    insertion.after = {place: _differing(after[place], own) for place, own in before.items()}


def take_out(text_model: PreTrainedModel, insertion: Insertion) -> None:
    """Undoes a retrofit, also one that was cut off by an error. Attributes that were set since then stay."""
    for part in list(text_model.modules()):
        for name in (added := added_names(part)):
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
    found: Attributes = {}
    for name, part in text_model.named_modules():
        if isinstance(part, PreTrainedModel):
            found[name, "model"], found[name, "config"] = vars(part), vars(part.config)
    return {place: dict(own) for place, own in found.items()} if copies else found


def _differing(own: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in own.items() if value is not other.get(name, ABSENT)}


def _parts(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yields modules, parameters and buffers with their names."""
    return chain(model.named_modules(), model.named_parameters(), model.named_buffers())


def added_names(part: nn.Module) -> tuple[str, ...]:
    """Returns the names of the children that a retrofit has added to a module."""
    return next((names for prefix, names in ADDED.items() if is_derived(part, prefix)), ())
