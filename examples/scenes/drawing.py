"""What a picture holds, and how its text is drawn.

Places are shares of the side of a picture, from its upper left corner: a picture is a square. So a question does not
depend on the number of pixels.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from fonts import font, x_height
from PIL import Image, ImageDraw


SIDES = (224, 256, 288, 320, 336)  # pixels
# Background and ink; `contrast` of each pair is tested.
PAPERS = (
    ("#ffffff", "#000000"),
    ("#ffffff", "#1a2a6c"),
    ("#fbf5e0", "#3a2410"),
    ("#eaf2fb", "#10243e"),
    ("#f2f2f2", "#222222"),
    ("#e8f5e9", "#0b3d17"),
    ("#1f2430", "#f5f5f5"),
    ("#10324a", "#fff4cc"),
)


class Asked(NamedTuple):
    """A question before it is put into words.

    Attributes:
        kind (`str`): of `phrasings.KINDS`.
        words (`dict[str, str]`): for the braces of a phrasing.
        answer (`str`)
    """

    kind: str
    words: dict[str, str]
    answer: str


class Thing(NamedTuple):
    """An object of a scene. `radius` is the unit in which `scenes.OUTLINES` gives its outline."""

    shape: str
    colour: str
    x: float
    y: float
    radius: float


class Word(NamedTuple):
    """A word of a document or a chart: its left end on the base line, in pixels, and the font and its pixels an em."""

    text: str
    left: float
    baseline: float
    font: str
    size: int


class Bar(NamedTuple):
    """A bar of a chart: it covers `box` (left, top, right, bottom). `level` counts lines of the grid."""

    label: str
    level: int
    box: tuple[float, float, float, float]


@dataclass
class Drawn:
    """A picture, what it holds, and what is asked about it. `step` is the value of a line of a chart's grid."""

    image: Image.Image
    asked: list[Asked]
    things: list[Thing] = field(default_factory=list)
    words: list[Word] = field(default_factory=list)
    bars: list[Bar] = field(default_factory=list)
    step: int = 1


def size_for(name: str, height: float, side: int) -> int:
    """Pixels an em of a font whose small x is as high as `height`, a share of the side, or a little higher."""
    return -int(-height * side // x_height(name))


def width_of(text: str, name: str, size: int) -> float:
    """In pixels."""
    return font(name, size).getlength(text)


def write(draw: ImageDraw.ImageDraw, word: Word, ink: str) -> None:
    draw.text((word.left, word.baseline), word.text, fill=ink, font=font(word.font, word.size), anchor="ls")
