"""What can be asked about a picture, as statements in the words of answers: many more than its four questions."""

import random
from collections import Counter
from itertools import groupby, permutations

from documents import LINES
from drawing import Asked, Drawn, Thing
from scenes import DIRECTIONS, NUMBERS, THIRD_MARGIN, lies, name_of, place_of, plural


COUNTS, RELATIONS = 4, 2  # of a scene; what is asked about it comes on top
UNSURE = THIRD_MARGIN / 2  # an object this near to the next third is not located


def statements_of(drawn: Drawn, rng: random.Random) -> str:
    """All answers that the picture gives, in any order: `red star: top left; blue objects: three`.

    A pair of objects is related in one direction, as the other one would follow from the words.
    """
    every = [answered(each) for each in drawn.asked]
    every += _of_scene(drawn.things, drawn.asked, rng) if drawn.things else _of_page(drawn)
    said = list(dict.fromkeys(every))
    rng.shuffle(said)
    return "; ".join(said)


def answered(asked: Asked) -> str:
    """An answer that first says what it is about."""
    return f"{' from '.join(asked.words.values())}: {asked.answer}"


def _of_scene(things: list[Thing], asked: list[Asked], rng: random.Random) -> list[str]:
    seen = Counter(map(name_of, things))
    unique = [thing for thing in things if seen[name_of(thing)] == 1]
    sure = [thing for thing in unique if _is_sure(thing.x) and _is_sure(thing.y)]
    located = [f"{name_of(thing)}: {place_of(int(3 * thing.y), int(3 * thing.x))}" for thing in sure]
    colours, shapes = Counter(thing.colour for thing in things), Counter(plural(thing.shape) for thing in things)
    counted = {**{f"{colour} objects": count for colour, count in colours.items()}, **shapes}
    numbers = [f"{group}: {NUMBERS[count]}" for group, count in counted.items() if count < len(NUMBERS)]
    related = {frozenset(each.words.values()) for each in asked if each.kind == "relate"}
    pairs = [(*pair, way) for pair in permutations(unique, 2) for way in DIRECTIONS if lies(*pair, way)]
    rng.shuffle(pairs)
    relations: list[str] = []
    for one, other, way in pairs:
        pair = frozenset((name_of(one), name_of(other)))
        if len(relations) < RELATIONS and pair not in related:
            related.add(pair)
            relations.append(f"{name_of(one)} from {name_of(other)}: {way}")
    return [*located, *rng.sample(numbers, min(COUNTS, len(numbers))), *relations]


def _is_sure(share: float) -> bool:
    return all(abs(share - edge) >= UNSURE for edge in (1 / 3, 2 / 3))


def _of_page(drawn: Drawn) -> list[str]:
    """The values of a chart, the lines of a note's words, or the fields of a form."""
    if drawn.bars:
        return [f"{bar.label}: {bar.level * drawn.step}" for bar in drawn.bars]
    if any(each.kind == "find" for each in drawn.asked):
        lines = groupby(drawn.words, key=lambda word: word.baseline)
        return [f"{word.text}: {name}" for name, (_, line) in zip(LINES, lines) for word in line]
    words = [word.text for word in drawn.words]
    return [f"{head.rstrip(':').lower()}: {value}" for head, value in zip(words[::2], words[1::2])]
