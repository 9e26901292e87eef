"""What a visitor draws on: a canvas with the shape of the pictures that the model reads, many times as large.

The image processor scales the drawing down to the picture. So the canvas has the picture's ratio of width to height
(another one would distort the drawing), a whole number of canvas pixels for each pixel of the picture, and a pen that
is about 1.5 pixels of the picture wide: thinner lines fade when they are scaled down, thicker ones close the loops of
small digits.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ...configuration_xattn import XAttnConfig
from ...images.tower import image_size_of


CANVAS_SIDE = 720  # pixels of the longer side, at least half of it
SMALL = 64  # pictures of fewer pixels on the shorter side are drawn white on black, like the usual data sets of digits
MANY_PATCHES = 64  # lines between more patches would be in the way
DEFAULT_SIZE = (224, 224)


class Drawing(NamedTuple):
    """The canvas that visitors draw on."""

    width: int  # in pixels, as height and pen
    height: int
    ink: str  # colour of lines, as in CSS
    paper: str  # colour of the background
    pen: float  # width of lines
    reads: tuple[int, int]  # height and width of the picture that the model reads
    patches: tuple[int, int] | None  # rows and columns of the patches, to draw lines between them


def drawing_for(
    config: XAttnConfig,
    image_processor: Any,
    canvas: tuple[int, int] | None = None,
    ink: str | None = None,
    paper: str | None = None,
) -> Drawing:
    """Chooses a canvas.

    Args:
        canvas (`tuple[int, int]`, *optional*): width and height of the canvas. By default those of the picture that
            the model reads, times a whole number.
        ink, paper (`str`, *optional*): colours, as in CSS. By default white on black for pictures of fewer than 64
            pixels on a side, else black on white. They should be those of the pictures that the model was trained on.
    """
    reads = _picture_size(config, image_processor)
    height, width = reads
    scale = max(1, round(CANVAS_SIDE / max(reads)))
    if canvas is not None:
        scale = max(1, round(canvas[0] / width))
        width, height = canvas
    else:
        width, height = width * scale, height * scale
    small = min(reads) < SMALL
    pen = max(1.5 * scale, 0.02 * min(width, height))
    colours = (ink or ("white" if small else "black"), paper or ("black" if small else "white"))
    return Drawing(width, height, *colours, round(pen, 1), reads, _patches(config, reads))


def _picture_size(config: XAttnConfig, image_processor: Any) -> tuple[int, int]:
    """Height and width of the pictures that an image processor makes, where every picture gets the same size."""
    crop = getattr(image_processor, "crop_size", None) if getattr(image_processor, "do_center_crop", False) else None
    for size in (crop, getattr(image_processor, "size", None)):
        found = _pair(size)
        if found is not None:
            return found
    tower = config.vision_config
    return (image_size_of(tower) if tower is not None else None) or DEFAULT_SIZE


def _pair(size: Any) -> tuple[int, int] | None:
    if isinstance(size, int):
        return size, size
    read = size.get if hasattr(size, "get") else lambda name: getattr(size, name, None)
    if size is None:
        return None
    height, width = read("height"), read("width")
    if height and width:
        return int(height), int(width)
    side = read("shortest_edge") or read("longest_edge")
    return (int(side), int(side)) if side else None


def _patches(config: XAttnConfig, reads: tuple[int, int]) -> tuple[int, int] | None:
    """Rows and columns of the patches; None if they are many, or not known."""
    tower = config.vision_config
    patch = getattr(tower, "patch_size", None)
    if patch is None:
        return None
    across = (patch, patch) if isinstance(patch, int) else tuple(patch)
    rows, columns = reads[0] // across[0], reads[1] // across[1]
    return (rows, columns) if 1 < rows * columns <= MANY_PATCHES else None
