"""Scenes: objects of several shapes, colours and sizes, to count, compare, relate and locate.

What is asked for is drawn at random first, so that answers are equally frequent. A scene is then drawn again and again
until it has one right answer for each question, with a margin.
"""

import math
import random
from collections import Counter

from drawing import Asked, Drawn, Thing
from PIL import Image, ImageDraw


COLOURS = {
    "red": (214, 39, 40),
    "orange": (245, 140, 20),
    "yellow": (250, 218, 40),
    "green": (38, 160, 60),
    "blue": (40, 90, 220),
    "purple": (128, 50, 170),
    "pink": (246, 130, 188),
    "black": (24, 24, 24),
}
SHADE = 12  # a channel of an object's colour differs by at most so much
BACKGROUNDS = ((255, 255, 255), (238, 238, 238), (226, 236, 246), (240, 232, 220), (228, 242, 228))
NUMBERS = ("zero", "one", "two", "three", "four", "five", "six")
MOST = 6  # of what is counted
DIRECTIONS = {"left": (-1, 0), "right": (1, 0), "above": (0, -1), "below": (0, 1)}
ROWS, COLUMNS = ("top", "middle", "bottom"), ("left", "middle", "right")

GAP = 0.025  # between objects, and around the picture
THIRD_MARGIN = 0.055  # an object that is located is so far from the next third, with its centre
SLOPE = 0.4  # an object that is left of another is at most so much higher or lower, in shares of the distance
FURTHER = 0.03  # and the two have so much room between them, sideways
# Radii where one object is the largest, and where one is the smallest: of the others, and of that one.
RADII = {"largest": ((0.042, 0.064), (0.104, 0.13)), "smallest": ((0.066, 0.08), (0.036, 0.04))}
REACH = 1.25  # no outline goes further than so many radii
TRIES = 40  # to place an object before the scene is begun again


def _star() -> list[tuple[float, float]]:
    radii, turns = (1.25, 0.6875) * 5, [math.pi * (point / 5 - 0.5) for point in range(10)]
    return [(radius * math.cos(turn), radius * math.sin(turn)) for radius, turn in zip(radii, turns)]


def _heart() -> list[tuple[float, float]]:
    turns = [math.pi * point / 20 for point in range(40)]
    return [
        (
            1.08 * math.sin(turn) ** 3,
            -(13 * math.cos(turn) - 5 * math.cos(2 * turn) - 2 * math.cos(3 * turn) - math.cos(4 * turn)) / 15.5,
        )
        for turn in turns
    ]


def _cross(reach: float = 1.05, half: float = 0.42) -> list[tuple[float, float]]:
    corner = [(half, reach), (half, half), (reach, half)]
    turned = [(-y, x) for x, y in corner]
    quarter = [*corner[::-1], *turned[::-1]][:3]
    points = []
    for turn in range(4):
        cos, sin = ((1, 0), (0, 1), (-1, 0), (0, -1))[turn]
        points += [(x * cos - y * sin, x * sin + y * cos) for x, y in quarter]
    return points


# Corners in radii, from the centre. The areas are nearly equal, so that "largest" means one thing.
OUTLINES = {
    "circle": [(math.cos(math.pi * turn / 24), math.sin(math.pi * turn / 24)) for turn in range(48)],
    "square": [(-0.88, -0.88), (0.88, -0.88), (0.88, 0.88), (-0.88, 0.88)],
    "triangle": [(0, -1.25), (1.13, 0.83), (-1.13, 0.83)],
    "star": _star(),
    "cross": _cross(),
    "heart": _heart(),
}


def name_of(thing: Thing) -> str:
    return f"{thing.colour} {thing.shape}"


def place_of(row: int, column: int) -> str:
    """The name of one of nine parts of a picture."""
    return f"{ROWS[row]} {COLUMNS[column]}" if (row, column) != (1, 1) else "middle"


def plural(shape: str) -> str:
    return f"{shape}es" if shape == "cross" else f"{shape}s"


def draw_scene(rng: random.Random, side: int) -> Drawn:
    """A scene of 4 to 8 objects, with a question of each kind."""
    most = rng.choice(tuple(RADII))
    count = rng.randint(1, MOST)
    group = rng.choice([*COLOURS, *OUTLINES])
    direction = rng.choice(tuple(DIRECTIONS))
    row, column = rng.randrange(3), rng.randrange(3)
    found = None
    while found is None:
        found = _try_scene(rng, most, count, group, direction, (row, column))
    things, special, located, pair = found
    counted = f"{group} objects" if group in COLOURS else plural(group)
    asked = [
        Asked("count", {"group": counted}, NUMBERS[count]),
        Asked("compare", {"most": most}, name_of(special)),
        Asked("relate", {"one": name_of(pair[0]), "other": name_of(pair[1])}, direction),
        Asked("locate", {"one": name_of(located)}, place_of(row, column)),
    ]
    return Drawn(_paint(rng, things, side), asked, things=things)


def _try_scene(rng: random.Random, most: str, count: int, group: str, direction: str, cell: tuple[int, int]):
    """The objects, the largest or smallest one, the one in the cell, and a pair in that direction; or None."""
    looks = _looks(rng, group, count, count + rng.randint(max(2, 4 - count), min(5, 8 - count)))
    ordinary, extreme = RADII[most]
    special = rng.randrange(len(looks))
    radii = [rng.uniform(*(extreme if index == special else ordinary)) for index in range(len(looks))]
    located = rng.randrange(len(looks))
    seen = Counter(looks)
    if seen[looks[special]] > 1 or seen[looks[located]] > 1:
        return None
    places: dict[int, tuple[float, float]] = {}
    # The one whose place is asked for comes first, and then the large one: there is room.
    order = sorted(range(len(looks)), key=lambda index: (index != located, -radii[index]))
    for index in order:
        area = _inside(radii[index], cell if index == located else None)
        for _ in range(TRIES):
            x, y = rng.uniform(*area[0]), rng.uniform(*area[1])
            if all(
                math.hypot(x - places[other][0], y - places[other][1]) >= REACH * (radii[index] + radii[other]) + GAP
                for other in places
            ):
                places[index] = (x, y)
                break
        else:
            return None
    things = [Thing(*looks[index], *places[index], radii[index]) for index in range(len(looks))]
    unique = [thing for thing, look in zip(things, looks) if seen[look] == 1]
    pairs = [(one, other) for one in unique for other in unique if lies(one, other, direction)]
    return (things, things[special], things[located], rng.choice(pairs)) if pairs else None


def _looks(rng: random.Random, group: str, count: int, total: int) -> list[tuple[str, str]]:
    """Shapes and colours of `total` objects, of which `count` are of the group."""
    looks = []
    for index in range(total):
        shapes, colours = list(OUTLINES), list(COLOURS)
        for names in (shapes, colours):
            if group in names:
                names[:] = [group] if index < count else [name for name in names if name != group]
        looks.append((rng.choice(shapes), rng.choice(colours)))
    return looks


def _inside(radius: float, cell: tuple[int, int] | None) -> list[tuple[float, float]]:
    """Where the centre may be: lowest and highest x, and lowest and highest y."""
    edge = REACH * radius + GAP
    bounds = []
    for third in reversed(cell) if cell else (None, None):
        low, high = edge, 1 - edge
        if third is not None:
            low = max(low, third / 3 + THIRD_MARGIN) if third else low
            high = min(high, (third + 1) / 3 - THIRD_MARGIN) if third < 2 else high
        bounds.append((low, high))
    return bounds


def lies(one: Thing, other: Thing, direction: str) -> bool:
    """Whether one object is clearly in that direction from another one."""
    x, y = DIRECTIONS[direction]
    along = (one.x - other.x) * x + (one.y - other.y) * y
    across = abs(one.x - other.x) * abs(y) + abs(one.y - other.y) * abs(x)
    return along >= REACH * (one.radius + other.radius) + FURTHER and across <= SLOPE * along


def _paint(rng: random.Random, things: list[Thing], side: int) -> Image.Image:
    scale = 2 * side  # drawn twice as large, for smooth edges
    image = Image.new("RGB", (scale, scale), rng.choice(BACKGROUNDS))
    draw = ImageDraw.Draw(image)
    for thing in things:
        colour = tuple(min(255, max(0, channel + rng.randint(-SHADE, SHADE))) for channel in COLOURS[thing.colour])
        corners = [
            ((thing.x + thing.radius * x) * scale, (thing.y + thing.radius * y) * scale)
            for x, y in OUTLINES[thing.shape]
        ]
        draw.polygon(corners, fill=colour)
    return image.reduce(2)
