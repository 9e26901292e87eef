"""The names that weights have on disk: those that text model and vision tower have in their own checkpoints.

transformers holds the experts of a layer in one tensor, and renames other weights. It saves a model under the published names, by reversing
what loading does. Here it does so for the parts of a model. The rules are patterns, such as `.mlp.` for `.block_sparse_moe.`, which would
hit the blocks inside the layers too, so blocks are kept from them.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

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

from .insertion import BLOCKS
from .memo import memoized


class _SparesBlocks:
    """Part of a rule of transformers that leaves the weights of blocks alone, as does its reverse."""

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


def rules_of_parts(model: PreTrainedModel) -> list[WeightTransform]:
    """How loading makes the names that weights have in memory. transformers reverses these rules when it saves the model.

    A rule that removes a prefix is left out: it is for checkpoints of larger models, and its reverse would add the prefix.
    """
    rules = get_model_conversion_mapping(model, add_legacy=False)
    return [_sparing_blocks(rule) for rule in rules if not isinstance(rule, PrefixChange)]


def named_as_in_memory(model: PreTrainedModel, weights: Mapping[str, Any]) -> Mapping[str, Any]:
    """Weights of a model under the names that they have in memory. `from_pretrained` does the same on its own.

    Args:
        model ([`XAttnPreTrainedModel`]): the model.
        weights (`dict`): under these names already, or those of a saved folder, or a part of them, such as one shard.
    """
    rules = rules_of_parts(model)
    own = model.state_dict() if rules else {}
    if not rules or weights.keys() <= own.keys():
        return weights
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    of_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}

    def place(name: str) -> tuple[str, str | None]:
        target, pattern = rename_source_key(name, renamings, converters)
        return (target, pattern) if target in own else (name, None)

    places = {name: place(name) for name in sorted(weights, key=dot_natural_key)}
    joined = [
        target.replace(of_pattern[pattern].target_patterns[0], each)
        for target, pattern in set(places.values())
        if pattern is not None
        for each in of_pattern[pattern].target_patterns
    ]
    # A shard may hold a part of the experts of a layer: the model has the others.
    expected = revert_weight_conversion(model, {name: own[name].to("meta") for name in joined})
    if not expected.keys() <= weights.keys():
        device = next(iter(weights.values())).device
        weights = {**revert_weight_conversion(model, {name: own[name].to(device) for name in joined}), **weights}
        places = {name: place(name) for name in sorted(weights, key=dot_natural_key)}
    named: dict[str, Any] = {}
    groups: dict[str, WeightConverter] = {}
    for name, (target, pattern) in places.items():
        if pattern is None:
            named[target] = weights[name]
        else:
            group = groups.setdefault(target, copy.deepcopy(of_pattern[pattern]))
            group.add_tensor(target, name, pattern, weights[name])
    for target, group in groups.items():
        for name, value in group.convert(target, model=model, config=model.config).items():
            named[name] = value[0] if isinstance(value, list) else value
    return named
