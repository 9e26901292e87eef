"""Keeps the names of weights on disk: those that the text model and the vision tower have in their own checkpoints.

When transformers loads a model, it renames some weights, and joins the experts of a layer in one tensor. Saving
reverses this. The rules of both are patterns, such as `.mlp.` for `.block_sparse_moe.`, which would also fit the
weights of blocks. Here the rules are changed so that they leave blocks alone.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    WeightTransform,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)

from ..decoders.insertion import BLOCKS
from ..utils import memoized


class _SparesBlocks:
    """Mixin for a rule of transformers. The rule and its reverse then leave the weights of blocks alone."""

    __slots__ = ()

    def rename_source_key(self, source_key: str) -> tuple[str, str | None]:
        if not set(BLOCKS).isdisjoint(source_key.split(".")):
            return source_key, None
        rule: Any = super()
        return rule.rename_source_key(source_key)

    def reverse_transform(self) -> WeightTransform:
        rule: Any = super()
        return _sparing_blocks(rule.reverse_transform())


@memoized
def _sparing_class(kind: type[WeightTransform]) -> Any:
    return type(f"{kind.__name__}BesideBlocks", (_SparesBlocks, kind), {"__slots__": ()})


def _sparing_blocks(rule: WeightTransform) -> WeightTransform:
    if not isinstance(rule, _SparesBlocks):
        rule.__class__ = _sparing_class(type(rule))
    return rule


class _Unsharded:
    """Shows a model to transformers with its original classes: for those that FSDP2 derives, it has no rules."""

    def __init__(self, model: PreTrainedModel):
        self.model, self.base_model_prefix = model, model.base_model_prefix

    def named_modules(self) -> Iterator[tuple[str, Any]]:
        for name, module in self.model.named_modules():
            kind = type(module)
            if isinstance(module, PreTrainedModel) and kind.__module__.startswith("torch.distributed."):
                original = next(each for each in kind.__mro__[1:] if issubclass(each, PreTrainedModel))
                shell = original.__new__(original)
                vars(shell)["config"] = module.config
                module = shell
            yield name, module


def rules_of_parts(model: PreTrainedModel) -> list[WeightTransform]:
    """Returns the rules by which loading turns names on disk into names in memory.

    Rules that remove a prefix are left out. They are for checkpoints of larger models, and their reverse would add the
    prefix when the model is saved.
    """
    unsharded: Any = _Unsharded(model)
    rules = get_model_conversion_mapping(unsharded, add_legacy=False)
    return [_sparing_blocks(rule) for rule in rules if not isinstance(rule, PrefixChange)]


class _Rules:
    """The rules for loading a model, and the weights that it has."""

    def __init__(self, model: PreTrainedModel):
        rules = rules_of_parts(model)
        self.own: dict[str, torch.Tensor] = model.state_dict() if rules else {}
        self._prefix = model.base_model_prefix  # `XAttnModel` saves without it, the other model with it
        self._renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
        self._converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
        self._of_pattern = {pattern: rule for rule in self._converters for pattern in rule.source_patterns}

    def place(self, name: str) -> tuple[str, WeightConverter | None, str]:
        """Finds the weight in memory for a weight on disk, which may be one of several pieces of it.

        Returns:
            the name in memory; the rule that joins the pieces, if there is one; and the pattern of the rule.
        """
        target, pattern = rename_source_key(name, self._renamings, self._converters, self._prefix, self.own)
        if target not in self.own:
            return name, None, name
        return target, None if pattern is None else self._of_pattern[pattern], pattern or name

    def places(self, names: Iterable[str]) -> dict[str, tuple[str, WeightConverter | None, str]]:
        """Calls [`place`] for each name, in transformers' order: some rules depend on names that came before."""
        return {name: self.place(name) for name in sorted(names, key=dot_natural_key)}


def places_in_memory(model: PreTrainedModel, names: Iterable[str]) -> dict[str, str]:
    """Returns the name in memory for each name on disk. Names that have none are left out."""
    rules, own, prefix = _Rules(model), model.state_dict().keys(), f"{model.base_model_prefix}."
    found = {name: target for name, (target, *_) in rules.places(names).items()}
    either = {name: (place, prefix + place, place.removeprefix(prefix)) for name, place in found.items()}
    return {name: place for name, places in either.items() if (place := next(filter(own.__contains__, places), None))}


def named_as_in_memory(model: PreTrainedModel, weights: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns weights under their names in memory.

    Args:
        weights: weights with the names in memory or those of a saved folder. They may be one shard of the folder.
    """
    rules = _Rules(model)
    own = rules.own
    if not own or weights.keys() <= own.keys():
        return weights
    found = rules.places(weights)
    joined = {
        target.replace(rule.target_patterns[0], each): own[target.replace(rule.target_patterns[0], each)]
        for target, rule, _ in found.values()
        if rule is not None
        for each in rule.target_patterns
    }
    # A shard may hold only some of the experts of a layer. The others are taken from the model.
    shapes = {name: torch.empty(tensor.shape, device="meta") for name, tensor in joined.items()}
    expected = revert_weight_conversion(model, shapes)
    if not expected.keys() <= weights.keys():
        device = next(iter(weights.values())).device
        others = revert_weight_conversion(model, {name: tensor.to(device) for name, tensor in joined.items()})
        weights = {**others, **weights}
        found = rules.places(weights)
    named: dict[str, Any] = {}
    groups: dict[str, WeightConverter] = {}
    for name, (target, rule, pattern) in found.items():
        if rule is None:
            named[target] = weights[name]
        else:
            groups.setdefault(target, copy.deepcopy(rule)).add_tensor(target, name, pattern, weights[name])
    for target, group in groups.items():
        for name, value in group.convert(target, model=model, config=model.config).items():
            named[name] = value[0] if isinstance(value, list) else value
    return named
