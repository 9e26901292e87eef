"""Draws attention maps with matplotlib, which only this module needs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from .tensor_checks import type_name


if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from .attention_maps import AttentionMaps

COLUMNS, SIDE = 4, 2.6  # panels a line, inches a panel


def draw(
    maps: AttentionMaps,
    tokens: list[int] | None,
    processor: Any,
    picture: Any,
    image: int,
    row: int,
    layer: Any,
    head: Any,
) -> Figure:
    """See [`AttentionMaps.plot`]."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError('`plot` needs matplotlib: pip install "hf_xattn[plot]"') from error
    for name, choice in (("layer", layer), ("head", head)):
        if choice is None:
            raise ValueError(f"Expected `{name}` to be one {name} or 'mean', because a panel shows one map, got None.")
    if processor is not None and not hasattr(processor, "decode"):
        raise TypeError(f"Expected `processor` to be a processor, a tokenizer or None, got {type_name(processor)}.")
    grid = maps.grid(image, row, layer=layer, head=head)  # (text_len, patch rows, patch columns)
    positions = _positions(maps, tokens, row)
    shown = np.asarray(maps.pixels(image, row) if picture is None else picture)
    if shown.ndim not in (2, 3):
        raise ValueError(
            f"Expected `picture` to be a PIL image or an array (height, width[, channels]), got {_came(picture)}."
        )
    if shown.ndim == 3 and shown.shape[2] == 1:
        shown = shown[..., 0]
    height, width = shown.shape[:2]
    covered = maps._patches(image, row).covered if picture is None else (1.0, 1.0)
    extent = (0, width * covered[1], height * covered[0], 0)
    lines = -(-len(positions) // COLUMNS)
    columns = min(len(positions), COLUMNS)
    ratio = min(max(height / width, 0.3), 3.0)
    figure = Figure(figsize=(columns * SIDE, lines * (SIDE * ratio + 0.4) + 0.5), layout="constrained")
    axes = figure.subplots(lines, columns, squeeze=False).flatten()
    top = max(float(grid[positions].max()), 1e-6)
    for panel, position in zip(axes, positions):
        panel.imshow(shown, cmap="gray", extent=(0, width, height, 0))
        drawn = panel.imshow(grid[position].numpy(), cmap="inferno", alpha=0.6, vmin=0, vmax=top, extent=extent)
        panel.set_title(_word(maps, processor, row, position), fontsize=9)
    for panel in axes:
        panel.set_axis_off()
    figure.colorbar(drawn, ax=list(axes), shrink=0.8)
    figure.suptitle(
        f"attention of {_name('layer', layer, len(maps.layers))}, {_name('head', head, maps.weights[0].shape[1])}"
    )
    return figure


def _positions(maps: AttentionMaps, tokens: list[int] | None, row: int) -> list[int]:
    text_len = maps.tokens.shape[1]
    if tokens is None:
        first = maps.num_given if maps.num_given < text_len else 0
        tokens = [index for index in range(first, text_len) if bool(maps.text_mask[row, index])]
    if not isinstance(tokens, (list, tuple, range)) or not tokens:
        raise ValueError(f"Expected `tokens` to be a list of positions in the text, got {tokens!r}.")
    for index in tokens:
        if isinstance(index, bool) or not isinstance(index, int) or not -text_len <= index < text_len:
            raise ValueError(f"Expected `tokens` to hold integers from {-text_len} to {text_len - 1}, got {tokens!r}.")
    return [index % text_len for index in tokens]


def _word(maps: AttentionMaps, processor: Any, row: int, position: int) -> str:
    token = int(maps.tokens[row, position])
    word = str(token) if processor is None else processor.decode([token])
    return word.replace("$", r"\$")  # not mathematics


def _came(picture: Any) -> str:
    shape = getattr(picture, "shape", None)
    return repr(picture) if shape is None else f"shape {tuple(shape)}"


def _name(what: str, choice: Any, count: int) -> str:
    return f"mean of {count} {what}s" if choice == "mean" else f"{what} {choice}"
