"""Draws attention maps with matplotlib, which only this module needs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch


if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLUMNS, SIDE = 4, 2.6  # panels in a line, width of a panel in inches


def draw(
    grid: torch.Tensor, positions: list[int], words: list[str], picture: Any, covered: tuple[float, float], title: str
) -> Figure:
    """Draws one panel for each text position, with a word as its title.

    `grid` is `(text_len, patch rows, patch columns)`, `picture` a PIL image or an array `(height, width[, channels])`,
    `covered` the share of its height and width that the patches cover. Raises an `ImportError` without matplotlib, and
    a `ValueError` for another picture.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError('`plot` needs matplotlib: pip install "matplotlib>=3.8"') from error
    shown = np.asarray(picture)
    if shown.ndim not in (2, 3):
        described = f"shape {tuple(picture.shape)}" if hasattr(picture, "shape") else repr(picture)
        raise ValueError(
            f"Expected `picture` to be a PIL image or an array (height, width[, channels]), got {described}."
        )
    if shown.ndim == 3 and shown.shape[2] == 1:
        shown = shown[..., 0]
    height, width = shown.shape[:2]
    extent = (0, width * covered[1], height * covered[0], 0)
    lines = -(-len(positions) // COLUMNS)
    columns = min(len(positions), COLUMNS)
    ratio = min(max(height / width, 0.3), 3.0)
    figure = Figure(figsize=(columns * SIDE, lines * (SIDE * ratio + 0.4) + 0.5), layout="constrained")
    axes = figure.subplots(lines, columns, squeeze=False).flatten()
    top = max(float(grid[positions].max()), 1e-6)
    for panel, position, word in zip(axes, positions, words):
        panel.imshow(shown, cmap="gray", extent=(0, width, height, 0))
        drawn = panel.imshow(grid[position].numpy(), cmap="inferno", alpha=0.6, vmin=0, vmax=top, extent=extent)
        panel.set_title(word.replace("$", r"\$"), fontsize=9)  # a plain `$` would start a formula
    for panel in axes:
        panel.set_axis_off()
    figure.colorbar(drawn, ax=list(axes), shrink=0.8)
    figure.suptitle(title)
    return figure
