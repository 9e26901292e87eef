"""The canvas that visitors draw on."""

from __future__ import annotations

from typing import Any, NamedTuple

from PIL import Image


# The image processor scales a drawing down. So the canvas has the picture's ratio of width to height, a whole number of
# pixels for each of the picture, and a pen about 1.5 of these wide: thinner lines fade, thicker ones close the loops of
# small digits.
CANVAS_SIDE = 720  # pixels of the longer side, at least half of it
SMALL = 64  # pictures of fewer pixels on the shorter side are drawn white on black, like the usual data sets of digits


class Drawing(NamedTuple):
    """How visitors draw."""

    blank: Image.Image
    ink: str  # colour of lines, as in CSS
    pen: float  # width of lines in pixels
    reads: tuple[int, int]  # width and height of the picture that the model reads


def drawing_for(
    image_processor: Any, canvas: tuple[int, int] | None = None, ink: str | None = None, paper: str | None = None
) -> Drawing:
    """Chooses a canvas. Arguments as in [`build_page`]. The image processor tells what the model reads of a square."""
    made = image_processor(Image.new("RGB", (CANVAS_SIDE, CANVAS_SIDE)), return_tensors="pt")
    height, width = made["pixel_values"].shape[-2:]
    scale = max(1, round((canvas[0] / width) if canvas is not None else (CANVAS_SIDE / max(height, width))))
    size = (canvas[0], canvas[1]) if canvas is not None else (width * scale, height * scale)
    default_ink, default_paper = ("white", "black") if min(height, width) < SMALL else ("black", "white")
    blank = Image.new("RGB", size, paper or default_paper)
    return Drawing(blank, ink or default_ink, max(1.5 * scale, 0.02 * min(size)), (width, height))
