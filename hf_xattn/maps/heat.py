"""A picture with attention over it, for an image file or a page. [`AttentionMaps.plot`] draws figures, with a scale."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .attention_maps import AttentionMaps


if TYPE_CHECKING:
    from PIL.Image import Image

COLOUR = "darkorange"
OPACITY = 165  # of 255, where the attention is largest
SIDE = 320  # pixels that a small picture is enlarged to


def lit(picture: Image, heat: torch.Tensor, covered: tuple[float, float] = (1.0, 1.0)) -> Image:
    """Lays an orange colour over a picture, as strong as the attention.

    Args:
        picture (`PIL.Image.Image`): in RGB.
        heat (`torch.Tensor`): `(patch rows, patch columns)`, from 0 to 1.
        covered (`tuple[float, float]`): the share of the picture's height and width that the patches cover.
    """
    from PIL import Image

    # The power lifts what is faint, which could not be told from nothing on a dark picture.
    patches = Image.fromarray((heat.clamp(0, 1) ** 0.7 * OPACITY).round().to(torch.uint8).numpy())
    cover = Image.new("L", picture.size)
    size = round(picture.width * covered[1]), round(picture.height * covered[0])
    cover.paste(patches.resize(size, Image.Resampling.NEAREST))
    return Image.composite(Image.new("RGB", picture.size, COLOUR), picture, cover)


def looks(maps: AttentionMaps, tokens: range, layer: int | str = "mean") -> list[tuple[Image, float]]:
    """Where the model looked when it generated `tokens`, of which the mean is shown: for each picture an image of it
    under the heat, and its share of the attention. All tokens and pictures of an answer have one scale.

    Args:
        maps ([`AttentionMaps`]): of an answer, with a row and with pixels.
        tokens (`range`): indices into the generated tokens.
        layer (`int` or `"mean"`): as in [`AttentionMaps.grid`], which has the errors, too.
    """
    from PIL import Image

    # The weights behind the choice of a token are at the position before it.
    grids = [maps.grid(image, layer=layer, head="mean")[maps.num_given - 1 : -1] for image in range(maps.num_images)]
    most = max(max(float(grid.max()) for grid in grids), 1e-6)
    shown = []
    for image, grid in enumerate(grids):
        picture = Image.fromarray((maps.pixels(image) * 255).round().byte().numpy())
        scale = max(1, SIDE // max(picture.size))
        picture = picture.resize((picture.width * scale, picture.height * scale), Image.Resampling.NEAREST)
        heat = grid[tokens.start : tokens.stop].mean(dim=0)
        shown.append((lit(picture, heat / most, maps.covered(image)), float(heat.sum())))
    return shown
