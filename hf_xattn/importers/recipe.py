"""What an importer knows of one family of checkpoints: a configuration, and where each tensor goes."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..configuration_xattn import XAttnConfig
from ..insertion import BLOCKS


# What the configuration of a decoder that is a Llama takes over as it is.
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
    """Where a tensor of the source goes.

    Attributes:
        name (`str`): parameter of the [`XAttnForConditionalGeneration`].
        rows (`slice`): which rows of the source's tensor.
    """

    name: str
    rows: slice = slice(None)


@dataclass(frozen=True)
class Recipe:
    """How one checkpoint is brought over.

    Attributes:
        config ([`XAttnConfig`]): of the model it becomes.
        targets (`Callable`): the targets of a source tensor's name, in the order of their rows; an empty list for a tensor
            that is not needed, None for a name that does not belong to the family.
    """

    config: XAttnConfig
    targets: Callable[[str], list[Target] | None]


def renamed(name: str, rules: list[tuple[str, str]]) -> str | None:
    """`name` after the first rule (pattern and replacement) that matches all of it; None where none does."""
    for pattern, replacement in rules:
        match = re.fullmatch(pattern, name)
        if match is not None:
            return match.expand(replacement)
    return None


def block_name(layers: str, place: int, num_layers: int) -> str:
    """Name of the block in front of layer `place` of a stack; `num_layers` is the place after the last layer."""
    before, after = BLOCKS
    return f"{layers}.{place}.{before}" if place < num_layers else f"{layers}.{num_layers - 1}.{after}"


def fits(source: tuple[int, ...], target: tuple[int, ...]) -> bool:
    """Whether shapes are the same but for axes of size 1."""
    return [size for size in source if size != 1] == [size for size in target if size != 1]


def take(tensor: torch.Tensor, target: Target, shape: tuple[int, ...]) -> torch.Tensor:
    """The part of a source tensor that a target gets, in the target's shape; not copied where that can be."""
    return tensor[target.rows].reshape(shape)
