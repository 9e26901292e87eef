"""Which layers of a decoder get a block in front of them."""

from __future__ import annotations

from typing import Any

from .checkpoint_files import short
from .config_checks import check_positive_int


def every_nth_layer(every: int, num_layers: int) -> list[int]:
    """Returns the layers `every - 1`, `2 * every - 1`, ... If the decoder has fewer layers, returns the last layer."""
    check_positive_int("every", every)
    step = min(every, num_layers)
    return list(range(step - 1, num_layers, step))


def check_layers(layers: Any, num_layers: int) -> list[int]:
    """Checks layer indices and returns them sorted.

    Raises:
        ValueError: for an empty list, indices outside `[0, num_layers]`, or repeated indices.
    """
    if not isinstance(layers, (list, tuple, range, set)) or not all(type(index) is int for index in layers):
        raise ValueError(f"`cross_attention_layers` must be a list of integers, got {short(layers)}.")
    layers = list(layers)
    if len(layers) > 2 * num_layers + 2:  # before they are compared with each other, and written into a message
        raise ValueError(
            f"`cross_attention_layers`: the decoder has {num_layers} layers, and a layer takes one block, got {len(layers)} indices."
        )
    if not layers:
        raise ValueError("`cross_attention_layers` is empty: name at least one decoder layer.")
    outside = [index for index in layers if not 0 <= index <= num_layers]
    if outside:
        raise ValueError(
            f"`cross_attention_layers`: the decoder has {num_layers} layers, so expected indices from 0 to {num_layers - 1} "
            f"({num_layers} is a block after the last layer), got {outside}."
        )
    repeated = sorted({index for index in layers if layers.count(index) > 1})
    if repeated:
        raise ValueError(f"`cross_attention_layers` names {repeated} more than once, but a layer takes one block.")
    return sorted(layers)
