"""A recipe converts one family of checkpoints: it gives the new configuration and the target of each tensor."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

from ..configuration_xattn import XAttnConfig
from ..decoders.block_stack import blocks_at
from ..decoders.insertion import BLOCKS


# Fields that are copied to the configuration of a Llama decoder.
LLAMA_FIELDS = (
    "vocab_size",
    "hidden_size",
    "hidden_act",
    "num_attention_heads",
    "intermediate_size",
    "rope_parameters",
    "rms_norm_eps",
    "max_position_embeddings",
    "initializer_range",
    "use_cache",
    "tie_word_embeddings",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)


class Target(NamedTuple):
    """The parameter of [`XAttnForConditionalGeneration`] that gets a tensor of the source, or some of its rows."""

    name: str
    rows: slice = slice(None)


class Recipe(NamedTuple):
    """How to convert one checkpoint.

    Attributes:
        config ([`XAttnConfig`]): configuration of the new model.
        targets (`Callable`): maps the name of a source tensor to its targets, in the order of the rows. Returns an
            empty list for a tensor that is not needed, and None for a name that the family does not have.
    """

    config: XAttnConfig
    targets: Callable[[str], list[Target] | None]


def renamed(name: str, rules: list[tuple[str, str]]) -> str | None:
    """Applies the first rule (pattern, replacement) that matches the whole name. Returns None if no rule matches."""
    for pattern, replacement in rules:
        match = re.fullmatch(pattern, name)
        if match is not None:
            return match.expand(replacement)
    return None


def block_name(layers: str, place: int, num_layers: int) -> str:
    """Returns the name of the only block in front of layer `place`, or after the last layer if there is none."""
    before, after = BLOCKS
    return f"{layers}.{place}.{before}" if place < num_layers else f"{layers}.{num_layers - 1}.{after}"


def block_names(layers: str, places: list[int], num_layers: int) -> list[str]:
    """Returns the name of each block. `places` are the `cross_attention_layers` of the configuration."""
    names = []
    for index, place in enumerate(places):
        name, here = block_name(layers, place, num_layers), blocks_at(places, place)
        names.append(name if len(here) == 1 else f"{name}.{here.index(index)}")
    return names


def fits(source: tuple[int, ...], target: tuple[int, ...]) -> bool:
    """Whether two shapes are equal when axes of size 1 are ignored."""
    return [size for size in source if size != 1] == [size for size in target if size != 1]
