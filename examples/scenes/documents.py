"""Documents: forms, whose fields are read, and notes of six lines, in which a word is found."""

import random
from functools import cache

from drawing import PAPERS, Asked, Drawn, Word, size_for, width_of, write
from PIL import Image, ImageDraw
from words import CITIES, ITEMS, JOBS, NAMES, NOUNS


FIELDS = ("name", "city", "job", "item", "price", "room", "year")
VALUES = {"name": NAMES, "city": CITIES, "job": JOBS, "item": ITEMS}
NUMBERS = {"price": (11, 99), "room": (101, 499), "year": (1950, 2029)}
LINES = ("first", "second", "third", "fourth", "fifth", "sixth")
QUESTIONS = 4  # about a picture

X_HEIGHT = (0.036, 0.046)  # of a small x, in shares of the side: at least 8 pixels of 224
EDGE = 0.04  # without text, around a picture


def draw_form(rng: random.Random, side: int, fonts: tuple[str, ...]) -> Drawn:
    """Four to six fields with their values."""
    fields = rng.sample(FIELDS, rng.randint(QUESTIONS, 6))
    values = [str(rng.randint(*NUMBERS[name])) if name in NUMBERS else rng.choice(VALUES[name]) for name in fields]
    font = rng.choice(fonts)
    heads = [f"{name.capitalize()}:" for name in fields]
    aligned = rng.random() < 0.5
    for size in _sizes(rng, font, side):
        gap = 0.6 * size
        widths = [width_of(head, font, size) + gap for head in heads]
        columns = [max(widths)] * len(heads) if aligned else widths
        ends = [column + width_of(value, font, size) for column, value in zip(columns, values)]
        if max(ends) <= (1 - 2 * EDGE) * side:
            break
    left, baselines = _place(rng, side, max(ends), len(fields))
    words = []
    for head, value, column, baseline in zip(heads, values, columns, baselines):
        words += [Word(head, left, baseline, font, size), Word(value, left + column, baseline, font, size)]
    chosen = rng.sample(range(len(fields)), QUESTIONS)
    asked = [Asked("read", {"field": fields[index]}, values[index]) for index in chosen]
    return Drawn(_paint(rng, side, words), asked, words=words)


def draw_note(rng: random.Random, side: int, fonts: tuple[str, ...]) -> Drawn:
    """Six lines of two or three words each, all different."""
    font = rng.choice(fonts)
    size = next(iter(_sizes(rng, font, side)))
    gap, room = 0.6 * size, (1 - 2 * EDGE) * side
    words = _different(rng, 3 * len(LINES))
    lines, ends = [], []
    for _ in LINES:
        line: list[tuple[str, float]] = []
        end = -gap
        wanted = rng.choice((2, 3))
        while len(line) < wanted and end + gap + width_of(words[-1], font, size) <= room:
            line.append((words[-1], end + gap))
            end += gap + width_of(words.pop(), font, size)
        lines.append(line)
        ends.append(end)
    left, baselines = _place(rng, side, max(ends), len(lines))
    placed = [
        [Word(text, left + start, baseline, font, size) for text, start in line]
        for line, baseline in zip(lines, baselines)
    ]
    asked = [
        Asked("find", {"word": rng.choice(placed[line]).text}, LINES[line])
        for line in rng.sample(range(len(lines)), QUESTIONS)
    ]
    flat = [word for line in placed for word in line]
    return Drawn(_paint(rng, side, flat), asked, words=flat)


def _sizes(rng: random.Random, font: str, side: int) -> list[int]:
    """A size at random, and the smaller ones that can be read."""
    smallest = size_for(font, X_HEIGHT[0], side)
    return list(range(max(smallest, size_for(font, rng.uniform(*X_HEIGHT), side)), smallest - 1, -1))


def _different(rng: random.Random, count: int) -> list[str]:
    """Words of which none is easily taken for another one."""
    chosen: list[str] = []
    while len(chosen) < count:
        word = rng.choice(NOUNS)
        if not any(word in other or other in word or _without_one(word) & _without_one(other) for other in chosen):
            chosen.append(word)
    return chosen


@cache
def _without_one(word: str) -> set[str]:
    """A word, and what is left of it without one of its letters: words that differ in one letter share some of it."""
    return {word, *(word[:place] + word[place + 1 :] for place in range(len(word)))}


def _place(rng: random.Random, side: int, width: float, count: int) -> tuple[float, list[float]]:
    """The left end of all lines, and the base line of each."""
    left = rng.uniform(EDGE, max(EDGE, 1 - EDGE - width / side)) * side
    pitch = rng.uniform(0.135, 0.15)
    first = rng.uniform(EDGE + 0.08, 1 - EDGE - 0.03 - pitch * (count - 1))
    return left, [(first + pitch * line) * side for line in range(count)]


def _paint(rng: random.Random, side: int, words: list[Word]) -> Image.Image:
    paper, ink = rng.choice(PAPERS)
    image = Image.new("RGB", (side, side), paper)
    draw = ImageDraw.Draw(image)
    if rng.random() < 0.5:
        draw.rectangle((1, 1, side - 2, side - 2), outline=ink)
    for word in words:
        write(draw, word, ink)
    return image
