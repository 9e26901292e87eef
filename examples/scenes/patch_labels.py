"""Labels of the patches of a picture, which its renderer knows. A vision tower learns from them.

Each patch has eleven labels, see `HEADS`. 0 is "nothing of this" in all but the last two.
"""

import string

import numpy as np
from drawing import Drawn, Word
from fonts import font, x_height
from scenes import COLOURS, OUTLINES
from words import CITIES, ITEMS, JOBS, LABELS, NAMES, NOUNS


PATCHES = 14  # in a row: 224 pixels of 16
CHARACTERS = string.ascii_letters + string.digits + ":"
SLOTS = 3  # characters of which the middle may lie in one patch
SIZES = (0.05, 0.09)  # radii of objects: up to the first, up to the second, and above
VOCABULARY = sorted({*NAMES, *CITIES, *JOBS, *ITEMS, *NOUNS, *LABELS})
# How many labels each head tells apart.
HEADS = {
    "shape": len(OUTLINES) + 1,
    "colour": len(COLOURS) + 1,
    "size": len(SIZES) + 2,
    **{f"character {slot}": len(CHARACTERS) + 1 for slot in range(SLOTS)},
    "word": len(VOCABULARY) + 1,
    "level": 10,  # of the bar in this patch, or of the bar whose label is here
    "row": PATCHES,
    "column": PATCHES,
}


def label_patches(drawn: Drawn) -> np.ndarray:
    """Returns labels `(heads, PATCHES * PATCHES)`, in the order of `HEADS`."""
    labels = {name: np.zeros((PATCHES, PATCHES), np.int64) for name in HEADS}
    labels["row"][:] = np.arange(PATCHES)[:, None]
    labels["column"][:] = np.arange(PATCHES)
    centres = (np.arange(PATCHES) + 0.5) / PATCHES
    for thing in drawn.things:
        inside = (centres - thing.x) ** 2 + (centres[:, None] - thing.y) ** 2 <= thing.radius**2
        inside[int(thing.y * PATCHES), int(thing.x * PATCHES)] = True  # a small one may miss all centres
        labels["shape"][inside] = 1 + list(OUTLINES).index(thing.shape)
        labels["colour"][inside] = 1 + list(COLOURS).index(thing.colour)
        labels["size"][inside] = 1 + sum(thing.radius > size for size in SIZES)
    for bar in drawn.bars:
        left, top, right, bottom = bar.box
        across = (left <= centres) & (centres <= right)
        labels["level"][((top <= centres) & (centres <= bottom))[:, None] & across] = bar.level
    levels = {bar.label: bar.level for bar in drawn.bars}
    for word in drawn.words:
        _label_word(word, levels.get(word.text, 0), drawn.image.width, labels)
    return np.stack([each.reshape(-1) for each in labels.values()])


def _label_word(word: Word, level: int, side: int, labels: dict[str, np.ndarray]) -> None:
    row = int((word.baseline - x_height(word.font) * word.size / 2) / side * PATCHES)
    loaded = font(word.font, word.size)
    ends = [word.left + loaded.getlength(word.text[:count]) for count in range(len(word.text) + 1)]
    columns = [min(PATCHES - 1, int((start + end) / 2 / side * PATCHES)) for start, end in zip(ends, ends[1:])]
    for column in set(columns):
        here = [character for character, place in zip(word.text, columns) if place == column][:SLOTS]
        used = sum(labels[f"character {slot}"][row, column] > 0 for slot in range(SLOTS))  # by the word in front
        for slot, character in enumerate(here[: SLOTS - used], start=used):
            labels[f"character {slot}"][row, column] = 1 + CHARACTERS.index(character)
        if word.text in VOCABULARY:
            labels["word"][row, column] = 1 + VOCABULARY.index(word.text)
        if level:
            labels["level"][row, column] = level
