"""Which layers of a decoder get blocks in front of them."""

from __future__ import annotations

from typing import Any

from .checkpoint_files import short
from .config_checks import check_positive_int
from .config_sizes import MAX_LAYERS


def every_nth_layer(every: int, num_layers: int) -> list[int]:
    """Returns the layers `every - 1`, `2 * every - 1`, ... If the decoder has fewer layers, returns the last layer."""
    check_positive_int("every", every)
    step = min(every, num_layers)
    return list(range(step - 1, num_layers, step))


def check_layers(layers: Any, num_layers: int) -> list[int]:
    """Checks layer indices and returns them sorted. An index that is repeated stands for several blocks in front of that layer.

    Raises:
        ValueError: for an empty list, too many indices, or indices outside `[0, num_layers]`.
    """
    if not isinstance(layers, (list, tuple, range, set)) or not all(type(index) is int for index in layers):
        raise ValueError(f"`cross_attention_layers` must be a list of integers, got {short(layers)}.")
    layers = list(layers)
    if len(layers) > MAX_LAYERS:
        raise ValueError(f"`cross_attention_layers`: expected at most {MAX_LAYERS} blocks, got {len(layers)} indices.")
    if not layers:
        raise ValueError("`cross_attention_layers` is empty: name at least one decoder layer.")
    outside = [index for index in layers if not 0 <= index <= num_layers]
    if outside:
        raise ValueError(
            f"`cross_attention_layers`: the decoder has {num_layers} layers, so expected indices from 0 to {num_layers - 1} "
            f"({num_layers} is a block after the last layer), got {short(outside)}."
        )
    return sorted(layers)


def blocks_at(layers: list[int], place: int) -> list[int]:
    """Returns the indices of the blocks in front of layer `place`, in the order in which they run.

    Args:
        layers (`list[int]`): the place of each block, from [`check_layers`].
        place (`int`): a layer, or the number of layers for the blocks after the last one.
    """
    return [index for index, each in enumerate(layers) if each == place]
