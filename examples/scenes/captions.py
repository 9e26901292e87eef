"""What a picture shows, in words: objects of a scene with their places, lines of a page, bars of a chart."""

from itertools import groupby

from drawing import Drawn, Thing
from scenes import COLUMNS, ROWS, name_of


def caption_of(drawn: Drawn) -> str:
    """A caption that names what is drawn, from the top down."""
    if drawn.things:
        return ", ".join(_placed(thing) for thing in sorted(drawn.things, key=lambda thing: (thing.y, thing.x)))
    if drawn.bars:
        return ", ".join(f"{bar.label} is {bar.level * drawn.step}" for bar in drawn.bars)
    lines = groupby(drawn.words, key=lambda word: word.baseline)
    return ", ".join(" ".join(word.text for word in line) for _, line in lines)


def _placed(thing: Thing) -> str:
    name, cell = name_of(thing), (int(3 * thing.y), int(3 * thing.x))
    place = "in the middle" if cell == (1, 1) else f"at the {ROWS[cell[0]]} {COLUMNS[cell[1]]}"
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name} {place}"
