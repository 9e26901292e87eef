"""Charts of three to six bars, upright or lying, over a grid with numbers. The value of a bar is a line of the grid."""

import random

from drawing import PAPERS, Asked, Bar, Drawn, Word, size_for, width_of, write
from fonts import x_height
from PIL import Image, ImageColor, ImageDraw
from words import LABELS


LEVELS = 10  # lines of the grid above 0
STEPS = (1, 10)  # value of a line
BARS = {"upright": (3, 4), "lying": (3, 6)}  # fewest and most; under upright ones is less room for labels
PLOTS = {"upright": (0.17, 0.05, 0.97, 0.85), "lying": (0.23, 0.04, 0.91, 0.86)}  # left, top, right, bottom
FILLS = ("#3465a4", "#cc4125", "#4e9a06", "#8e5ea2", "#e08a00", "#2a9d8f")
X_HEIGHT = 0.034  # of a small x, in shares of the side
GRID, AXIS = 0.25, 0.7  # shares of ink in the colour of a line


def draw_chart(rng: random.Random, side: int, fonts: tuple[str, ...]) -> Drawn:
    """A chart, with two questions for the highest or lowest value, and two for the value of a bar."""
    way = rng.choice(tuple(BARS))
    levels = _levels(rng, rng.randint(*BARS[way]))
    step, font = rng.choice(STEPS), rng.choice(fonts)
    bars = _bars(rng, levels, way)
    words = _words(bars, step, font, size_for(font, X_HEIGHT, side), side, way)
    ranked = {"highest": max(bars, key=lambda bar: bar.level), "lowest": min(bars, key=lambda bar: bar.level)}
    ranks = [Asked("rank", {"most": most}, bar.label) for most, bar in ranked.items()]
    # The first two levels are as frequent as all others; the rest was drawn to fit.
    values = [Asked("value", {"label": bar.label}, str(bar.level * step)) for bar in bars[:2]]
    return Drawn(_paint(rng, bars, words, side, way), ranks + values, words=words, bars=bars, step=step)


def _levels(rng: random.Random, count: int) -> list[int]:
    """Levels from 1 to 9 of which one is the highest and one the lowest. The first two are any two different ones."""
    first = rng.sample(range(1, LEVELS), 2)
    while True:
        levels = first + [rng.randrange(1, LEVELS) for _ in range(count - 2)]
        if levels.count(max(levels)) == levels.count(min(levels)) == 1:
            return levels


def _bars(rng: random.Random, levels: list[int], way: str) -> list[Bar]:
    left, top, right, bottom = PLOTS[way]
    slot = ((right - left) if way == "upright" else (bottom - top)) / len(levels)
    margin = slot * rng.uniform(0.15, 0.25)
    bars = []
    for label, level, place in zip(
        rng.sample(LABELS, len(levels)), levels, rng.sample(range(len(levels)), len(levels))
    ):
        if way == "upright":
            start = left + place * slot
            box = (start + margin, bottom - (bottom - top) * level / LEVELS, start + slot - margin, bottom)
        else:
            start = top + place * slot
            box = (left, start + margin, left + (right - left) * level / LEVELS, start + slot - margin)
        bars.append(Bar(label, level, box))
    return bars


def _words(bars: list[Bar], step: int, font: str, size: int, side: int, way: str) -> list[Word]:
    """The labels of the bars, and the numbers of every second line of the grid."""
    left, top, right, bottom = (share * side for share in PLOTS[way])
    below, digit = bottom + 0.085 * side, 0.7 * size  # a base line; height of a digit
    words = []

    def put(text: str, x: float, y: float, align: float) -> None:
        words.append(Word(text, x - align * width_of(text, font, size), y, font, size))

    for bar in bars:
        middle = [(bar.box[axis] + bar.box[axis + 2]) / 2 * side for axis in (0, 1)]
        if way == "upright":
            put(bar.label, middle[0], below, 0.5)
        else:
            put(bar.label, left - 0.02 * side, middle[1] + x_height(font) * size / 2, 1.0)
    for level in range(0, LEVELS + 1, 2):
        if way == "upright":
            put(str(level * step), left - 0.02 * side, bottom - (bottom - top) * level / LEVELS + digit / 2, 1.0)
        else:
            put(str(level * step), left + (right - left) * level / LEVELS, below, 0.5)
    return words


def _paint(rng: random.Random, bars: list[Bar], words: list[Word], side: int, way: str) -> Image.Image:
    paper, ink = rng.choice(PAPERS)
    image = Image.new("RGB", (side, side), paper)
    draw = ImageDraw.Draw(image)
    left, top, right, bottom = (round(share * side) for share in PLOTS[way])
    for level in range(LEVELS + 1):
        colour = _mixed(paper, ink, GRID if level else AXIS)
        if way == "upright":
            y = bottom - (bottom - top) * level / LEVELS
            draw.line((left, y, right, y), fill=colour)
        else:
            x = left + (right - left) * level / LEVELS
            draw.line((x, top, x, bottom), fill=colour)
    fills = rng.sample(FILLS, len(bars)) if rng.random() < 0.5 else [rng.choice(FILLS)] * len(bars)
    for bar, fill in zip(bars, fills):
        draw.rectangle([round(share * side) for share in bar.box], fill=fill)
    for word in words:
        write(draw, word, ink)
    return image


def _mixed(paper: str, ink: str, share: float) -> tuple[int, ...]:
    return tuple(
        round(one + share * (other - one)) for one, other in zip(ImageColor.getrgb(paper), ImageColor.getrgb(ink))
    )
