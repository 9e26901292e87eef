"""Where the model looked while it generated the words of an answer. These are attention weights, not explanations."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from ...decoders.block_stack import blocks_at
from ...maps.attention_maps import AttentionMaps


if TYPE_CHECKING:
    from PIL.Image import Image

COLOUR = (255, 106, 0)
MOST = 165  # opacity of the heat where the attention is largest, of 255


@dataclass(frozen=True, eq=False)
class Look:
    """Where the model looked on one picture."""

    picture: Image  # that the vision tower has read
    heat: Image  # one RGBA pixel a patch, to lay over the picture
    covered: tuple[float, float]  # share of the picture's height and width that the patches cover
    share: float  # of the attention, on the patches of this picture, from 0 to 1


class Gaze:
    """The attention of each token of an answer, as the mean over heads. Errors as [`AttentionMaps.grid`]."""

    def __init__(self, maps: AttentionMaps):
        # The weights behind the choice of a token are at the position before it.
        first = maps.num_given - 1
        weights = [each[:, :, first:-1] for each in maps.weights]
        answer = replace(maps, weights=weights, tokens=maps.tokens[:, first:-1])
        self.layers = list(dict.fromkeys(maps.layers))
        self._blocks = {layer: blocks_at(maps.layers, layer) for layer in self.layers}
        images = range(maps.num_images)
        self._grids = [answer.grid(image, head="mean") for image in images]  # (blocks, tokens, rows, columns) each
        self._pictures = [_image(maps.pixels(image)) for image in images]
        self._covered = [maps.covered(image) for image in images]

    def looks(self, tokens: range, layer: int | None = None) -> list[Look]:
        """Returns one value for each picture. All words and pictures of the answer have one scale.

        Args:
            tokens (`range`): tokens of a word. Their mean is shown.
            layer (`int`, *optional*): one of `layers`. By default the mean of all blocks.
        """
        if layer is not None and layer not in self.layers:
            raise ValueError(f"Expected `layer` to be one of {self.layers} or None, got {layer!r}.")
        grids = self._grids if layer is None else [grid[self._blocks[layer]] for grid in self._grids]
        chosen = [grid.mean(dim=0) for grid in grids]  # (tokens, rows, columns) each
        most = max(max(float(grid.max()) for grid in chosen), 1e-6)
        of_word = [grid[tokens.start : tokens.stop].mean(dim=0) for grid in chosen]
        return [
            Look(picture, _heat(grid / most), covered, float(grid.sum()))
            for picture, grid, covered in zip(self._pictures, of_word, self._covered)
        ]


def _image(pixels: torch.Tensor) -> Image:
    from PIL import Image

    return Image.fromarray((pixels * 255).round().to(torch.uint8).numpy())


def _heat(weights: torch.Tensor) -> Image:
    from PIL import Image

    # The power lifts what is faint, which could not be told from nothing on a dark picture.
    opacity = Image.fromarray((weights.clamp(0, 1) ** 0.7 * MOST).round().to(torch.uint8).numpy())
    heat = Image.new("RGBA", opacity.size, COLOUR)
    heat.putalpha(opacity)
    return heat
