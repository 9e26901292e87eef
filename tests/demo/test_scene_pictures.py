"""The answers of `examples/scenes`, found again in the pixels of its pictures, with room for doubt measured."""

import random

import charts
import documents
import fonts
import numpy as np
import pytest
from drawing import PAPERS, SIDES, write
from make_scenes import QUALITY, draw
from PIL import Image, ImageColor, ImageDraw
from scenes import draw_scene
from scipy import ndimage
from splits import open_split
from words import LABELS


# What people call these colours: https://www.w3.org/TR/css-color-4/#named-colors, purple and green by their names there
PURE = {
    "red": "red",
    "orange": "darkorange",
    "yellow": "gold",
    "green": "forestgreen",
    "blue": "royalblue",
    "purple": "rebeccapurple",
    "pink": "hotpink",
    "black": "black",
}
ORDINALS = ["first", "second", "third", "fourth", "fifth", "sixth"]
NUMBERS = ["zero", "one", "two", "three", "four", "five", "six"]
SCENES = 150


class Blob:
    """An object as the pixels show it. Places are shares of the side."""

    def __init__(self, pixels, mask):
        side = len(mask)
        rows, columns = np.nonzero(mask)
        self.x, self.y = (columns.mean() + 0.5) / side, (rows.mean() + 0.5) / side
        self.left, self.right = columns.min() / side, (columns.max() + 1) / side
        self.top, self.bottom = rows.min() / side, (rows.max() + 1) / side
        self.area = mask.sum() / side**2
        self.extent = max(self.right - self.left, self.bottom - self.top)
        inner = pixels[ndimage.binary_erosion(mask, iterations=2)].mean(0)
        distances = {name: np.abs(inner - ImageColor.getrgb(pure)).sum() for name, pure in PURE.items()}
        self.colour = min(distances, key=distances.get)


def blobs_of(drawn):
    """Each object with the shape that the renderer says stands there."""
    pixels = np.asarray(drawn.image).astype(int)
    labelled, count = ndimage.label(np.abs(pixels - pixels[0, 0]).sum(2) > 40)
    assert count == len(drawn.things), "objects touch, or one hides another"
    blobs = [Blob(pixels, labelled == number) for number in range(1, count + 1)]
    for thing in drawn.things:
        blob = min(blobs, key=lambda each: abs(each.x - thing.x) + abs(each.y - thing.y))
        assert not hasattr(blob, "shape")
        blob.shape = thing.shape
    return blobs


@pytest.fixture(scope="module")
def scenes():
    drawn = [draw_scene(random.Random(f"margins {seed}"), SIDES[seed % len(SIDES)]) for seed in range(SCENES)]
    return [(each, blobs_of(each), {asked.kind: asked for asked in each.asked}) for each in drawn]


def the_only(blobs, name):
    found = [blob for blob in blobs if f"{blob.colour} {blob.shape}" == name]
    assert len(found) == 1, f"{len(found)} objects are a {name}"
    return found[0]


def test_objects_are_whole_and_apart(scenes):
    """An object that is cut, hidden, too small to see, or so near to another that they look like one."""
    for drawn, blobs, _ in scenes:
        for thing, blob in zip(drawn.things, blobs):
            assert min(blob.left, blob.top, 1 - blob.right, 1 - blob.bottom) >= 0.015
            assert blob.extent * 224 >= 14 and blob.area * 224**2 >= 100
            assert 0.03 < thing.radius < 0.14
        assert 4 <= len(blobs) <= 8


def test_answers_to_counts_are_found_in_the_pixels(scenes):
    """A count that leaves out what has the colour or shape, or takes in what has not."""
    for _, blobs, asked in scenes:
        group = asked["count"].words["group"]
        if group.endswith(" objects"):
            count = sum(blob.colour == group.removesuffix(" objects") for blob in blobs)
        else:
            count = sum(blob.shape in (group[:-1], group[:-2]) for blob in blobs)
        assert NUMBERS[count] == asked["count"].answer


def test_the_largest_is_clearly_larger(scenes):
    """A largest object that is only wider than another one, not larger; or that has a twin in name."""
    for _, blobs, asked in scenes:
        special = the_only(blobs, asked["compare"].answer)
        for other in blobs:
            if other is not special:
                large, small = (special, other) if asked["compare"].words["most"] == "largest" else (other, special)
                assert large.extent >= 1.12 * small.extent and large.area >= 1.5 * small.area


def test_relations_have_room(scenes):
    """A pair that lies as much below as to the left, or side by side in part only."""
    for _, blobs, asked in scenes:
        one, other = (the_only(blobs, asked["relate"].words[name]) for name in ("one", "other"))
        right, below = one.x - other.x, one.y - other.y
        assert max(abs(right), abs(below)) >= 2 * min(abs(right), abs(below))
        if abs(right) > abs(below):
            assert asked["relate"].answer == ("right" if right > 0 else "left")
            assert one.left - other.right > 0.02 or other.left - one.right > 0.02
        else:
            assert asked["relate"].answer == ("below" if below > 0 else "above")
            assert one.top - other.bottom > 0.02 or other.top - one.bottom > 0.02


def test_places_are_inside_their_third(scenes):
    """An object on the line between two parts of the picture."""
    for _, blobs, asked in scenes:
        blob = the_only(blobs, asked["locate"].words["one"])
        row, column = int(3 * blob.y), int(3 * blob.x)
        for value in (blob.x, blob.y):
            assert min(abs(value - 1 / 3), abs(value - 2 / 3)) > 0.04
        name = f"{('top', 'middle', 'bottom')[row]} {('left', 'middle', 'right')[column]}"
        assert asked["locate"].answer == ("middle" if name == "middle middle" else name)


def contrast(one, other):
    """Contrast of two colours: https://www.w3.org/TR/WCAG21/#dfn-contrast-ratio"""

    def luminance(colour):
        channels = [channel / 255 for channel in ImageColor.getrgb(colour)]
        linear = [each / 12.92 if each <= 0.04045 else ((each + 0.055) / 1.055) ** 2.4 for each in channels]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_ink_stands_out():
    """Text that cannot be told from its paper: WCAG asks for 4.5, and for 7 in its strictest level."""
    assert min(contrast(*pair) for pair in PAPERS) >= 7


def ink_box(word, side):
    image = Image.new("L", (side, side))
    write(ImageDraw.Draw(image), word, "white")
    return image.getbbox()


# Also those that are left for the sealed test: all others of matplotlib have no letters.
LEFT = "DejaVuSansMono-BoldOblique DejaVuSerif-BoldItalic STIXGeneralBolIta cmss10 cmti10 cmtt10".split()
EVERY_FONT = (*fonts.TRAIN, *fonts.DEVELOPMENT, fonts.PILLOW, *LEFT)


@pytest.mark.parametrize("name", EVERY_FONT)
def test_text_can_be_read(name):
    """Words that are cut, that touch, or whose letters are a blur of few pixels; a sign that a font does not have."""
    missing = fonts.font(name, 60).getmask("\uffff").getbbox()
    blank = bytes(fonts.font(name, 60).getmask("\uffff"))
    for character in sorted(set("".join(LABELS) + "0123456789:")):
        mask = fonts.font(name, 60).getmask(character)
        assert mask.getbbox() and (mask.getbbox() != missing or bytes(mask) != blank), (name, character)
    for seed in range(6):
        side = SIDES[seed % len(SIDES)]
        rng = random.Random(f"{name} {seed}")
        for draw_any in (documents.draw_form, documents.draw_note, charts.draw_chart):
            drawn = draw_any(rng, side, (name,))
            boxes = [ink_box(word, 2 * side) for word in drawn.words]
            for index, (left, top, right, bottom) in enumerate(boxes):
                assert 0 <= left and 0 <= top and right <= side and bottom <= side, drawn.words[index]
                for other in boxes[:index]:
                    apart = max(left - other[2], other[0] - right, top - other[3], other[1] - bottom)
                    assert apart >= 0.008 * side, (drawn.words[index], other)
                colours = np.asarray(drawn.image.convert("L").crop((left, top, right, bottom)))
                assert np.ptp(colours.astype(int)) > 100
            x_top = fonts.font(name, drawn.words[0].size).getbbox("x", anchor="ls")[1]
            assert -x_top / side * 224 >= 7


def test_a_field_stands_once_and_its_value_behind_it():
    """A value of another field, or a question about a field that is not there."""
    for seed in range(100):
        drawn = documents.draw_form(random.Random(f"form {seed}"), 256, fonts.TRAIN)
        lines = {}
        for word in drawn.words:
            lines.setdefault(word.baseline, []).append(word)
        page = {
            head.text: value.text for head, value in (sorted(line, key=lambda w: w.left) for line in lines.values())
        }
        assert len(page) == len(lines) >= len(drawn.asked) == 4
        for asked in drawn.asked:
            assert page[f"{asked.words['field'].capitalize()}:"] == asked.answer
        assert len({asked.words["field"] for asked in drawn.asked}) == 4


def edits(one, other):
    """Letters to put in, take out or exchange, until two words are equal (Levenshtein)."""
    last = list(range(len(other) + 1))
    for row, a in enumerate(one, start=1):
        costs = [row]
        for column, b in enumerate(other):
            costs.append(min(last[column] + (a != b), last[column + 1] + 1, costs[-1] + 1))
        last = costs
    return last[-1]


def test_a_word_stands_on_one_line():
    """A word on two lines, beside one that differs in a single letter, or inside another one."""
    for seed in range(100):
        drawn = documents.draw_note(random.Random(f"note {seed}"), 256, fonts.TRAIN)
        baselines = sorted({word.baseline for word in drawn.words})
        assert len(baselines) == 6 and min(np.diff(baselines)) >= 0.13 * 256
        texts = [word.text for word in drawn.words]
        assert 12 <= len(texts) == len(set(texts)) <= 18
        for asked in drawn.asked:
            (word,) = [word for word in drawn.words if word.text == asked.words["word"]]
            assert ORDINALS[baselines.index(word.baseline)] == asked.answer
        for index, one in enumerate(texts):
            assert not [other for other in texts[:index] if one in other or other in one or edits(one, other) < 2]


def values_in_pixels(drawn):
    """The value of each bar: its length in pixels over that of the axis, and the numbers beside the axis."""
    pixels = np.asarray(drawn.image).astype(int)
    side = len(pixels)
    ticks = [word for word in drawn.words if word.text.isdigit()]
    upright = len({round(ink_box(word, 2 * side)[2]) for word in ticks}) < len(ticks) / 2
    last = max(ticks, key=lambda word: int(word.text))
    middles = {word.text: np.array(ink_box(word, 2 * side)).reshape(2, 2).mean(0) for word in ticks}
    scale = (middles[last.text] - middles["0"])[int(upright)] / int(last.text)  # pixels a unit
    found = {}
    for bar in drawn.bars:
        (word,) = [word for word in drawn.words if word.text == bar.label]
        middle = np.array(ink_box(word, 2 * side)).reshape(2, 2).mean(0)
        # Along the middle of the bar, from the axis on: how far its own colour goes.
        place = int((bar.box[0] + bar.box[2]) / 2 * side if upright else (bar.box[1] + bar.box[3]) / 2 * side)
        assert abs(place - middle[1 - int(upright)]) < 0.03 * side, "a label that stands beside another bar"
        line = pixels[::-1, place] if upright else pixels[place]
        axis = round((1 - bar.box[3] if upright else bar.box[0]) * side) + 2
        same = np.abs(line[axis:] - line[axis]).sum(1) < 5
        length = int(np.argmin(same)) + 2
        found[bar.label] = length / abs(scale)
    return found, int(last.text) // 10


def test_bars_end_on_a_line_of_the_grid():
    """A bar between two values, a value of another bar, or two bars that share the highest value."""
    for seed in range(60):
        drawn = charts.draw_chart(random.Random(f"chart {seed}"), SIDES[seed % len(SIDES)], fonts.TRAIN)
        found, step = values_in_pixels(drawn)
        for asked in drawn.asked:
            if asked.kind == "value":
                assert abs(found[asked.words["label"]] - int(asked.answer)) < 0.3 * step
                continue
            sign = 1 if asked.words["most"] == "highest" else -1
            first, second = sorted(found, key=lambda label: -sign * found[label])[:2]
            assert first == asked.answer and sign * (found[first] - found[second]) > 0.7 * step


def test_pictures_keep_their_colours_as_jpeg(tmp_path):
    """Objects that JPEG mixes with others, so that what was checked above is not what a model sees."""
    split = open_split("train", 0)
    for index in range(0, 80, 2):
        drawn = draw(split, index)
        drawn.image.save(tmp_path / "a.jpg", quality=QUALITY)
        pixels = np.asarray(Image.open(tmp_path / "a.jpg")).astype(int)
        assert pixels.shape == (*drawn.image.size, 3) and drawn.image.size[0] in range(224, 337)
        for thing, blob in zip(drawn.things, blobs_of(drawn)):
            assert blob.colour in {each.colour for each in drawn.things}
            x, y = int(thing.x * len(pixels)), int(thing.y * len(pixels))
            distances = {name: np.abs(pixels[y, x] - ImageColor.getrgb(pure)).sum() for name, pure in PURE.items()}
            assert min(distances, key=distances.get) == thing.colour
