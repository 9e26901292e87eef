"""Reads labelled pictures, and places one or two of them in a picture.

A source is a folder with Fashion-MNIST's four files (Debian's package `dataset-fashion-mnist` has them in
/usr/share/datasets/fashion-mnist), or a folder with a folder of pictures for each label: FOLDER/LABEL/*.png.
"""

import gzip
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageOps


# Fashion-MNIST's labels are numbers.
GARMENTS = (
    "T-shirt",
    "pair of trousers",
    "pullover",
    "dress",
    "coat",
    "sandal",
    "shirt",
    "sneaker",
    "bag",
    "ankle boot",
)
FILES = ("{}-images-idx3-ubyte.gz", "{}-labels-idx1-ubyte.gz")
SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif")
PATCH = 8  # pixels
HELD_OUT = 5  # in a folder, every fifth picture of a label is held out


class Source(NamedTuple):
    """Labelled pictures.

    Attributes:
        labels (`list[str]`): what the things are called.
        train, held_out (`list[list[np.ndarray | Path]]`): the pictures of each label: pixels, or files.
    """

    labels: list[str]
    train: list[list[np.ndarray | Path]]
    held_out: list[list[np.ndarray | Path]]


class Thing(NamedTuple):
    """What stands where.

    Attributes:
        label (`int`): its place in `Source.labels`.
        left, top (`int`): its upper left corner.
    """

    label: int
    left: int
    top: int


def read_source(folder: Path, chosen: list[str] | None = None) -> Source:
    """Reads the pictures of some labels, or of all."""
    if not folder.is_dir():
        raise ValueError(f"Expected a folder of labelled pictures, got {folder}, which is not a folder.")
    if (folder / FILES[0].format("train")).is_file():
        source = Source(list(GARMENTS), _read_idx(folder, "train"), _read_idx(folder, "t10k"))
    else:
        source = _read_folders(folder)
    if chosen is not None:
        if unknown := [label for label in chosen if label not in source.labels]:
            raise ValueError(f"Expected --labels of {folder}, which are {source.labels}, got {unknown}.")
        places = [source.labels.index(label) for label in chosen]
        source = Source(chosen, [source.train[place] for place in places], [source.held_out[place] for place in places])
    if len(source.labels) < 2:
        raise ValueError(f"Expected {folder} to hold two labels or more, got {source.labels}.")
    return source


def _read_idx(folder: Path, part: str) -> list[list[np.ndarray | Path]]:
    images, labels = (gzip.decompress((folder / name.format(part)).read_bytes()) for name in FILES)
    count, height, width = (int(number) for number in np.frombuffer(images, ">i4", 3, offset=4))
    pixels = np.frombuffer(images, np.uint8, offset=16).reshape(count, height, width)
    numbers = np.frombuffer(labels, np.uint8, offset=8)
    return [list(pixels[numbers == label]) for label in range(len(GARMENTS))]


def _read_folders(folder: Path) -> Source:
    labels, train, held_out = [], [], []
    for inner in sorted(path for path in folder.glob("*") if path.is_dir()):
        files = sorted(file for file in inner.iterdir() if file.suffix.lower() in SUFFIXES)
        if len(files) < 2:
            raise ValueError(
                f"Expected two pictures or more in {inner}, one to train on and one to hold out, got {len(files)}."
            )
        labels.append(inner.name.replace("_", " "))
        held_out.append(list(files[::HELD_OUT]))
        train.append([file for index, file in enumerate(files) if index % HELD_OUT])
    return Source(labels, train, held_out)


def place_things(
    pictures: list[list[np.ndarray | Path]], rng: np.random.Generator, size: int
) -> tuple[Image.Image, list[Thing]]:
    """One thing anywhere, or two different ones side by side, in a picture of `size` by twice `size` pixels.

    Returns:
        `tuple`: the picture, and its things from left to right.
    """
    side = size * 7 // 8
    labels = rng.permutation(len(pictures))[: rng.integers(1, 3)]
    room = size - side
    lefts = (
        [rng.integers(0, 2 * size - side + 1)]
        if len(labels) == 1
        else [rng.integers(0, room + 1), size + rng.integers(0, room + 1)]
    )
    canvas = Image.new("RGB", (2 * size, size))
    things = [Thing(int(label), int(left), int(rng.integers(0, room + 1))) for label, left in zip(labels, lefts)]
    for thing in things:
        chosen = pictures[thing.label][rng.integers(len(pictures[thing.label]))]
        picture = Image.open(chosen) if isinstance(chosen, Path) else Image.fromarray(chosen)
        canvas.paste(ImageOps.pad(picture.convert("RGB"), (side, side)), (thing.left, thing.top))
    return canvas, things


def patch_labels(things: list[Thing], size: int, nothing: tuple[int, int]) -> np.ndarray:
    """Labels `(2, patches)`: what stands at the centre of each patch, and which it is from the left, or `nothing`."""
    side = size * 7 // 8
    labels = np.tile(np.reshape(nothing, (2, 1, 1)), (1, size // PATCH, 2 * size // PATCH))
    for row, column in np.ndindex(*labels.shape[1:]):
        y, x = (row + 0.5) * PATCH, (column + 0.5) * PATCH
        for place, thing in enumerate(things):
            if thing.left <= x < thing.left + side and thing.top <= y < thing.top + side:
                labels[:, row, column] = thing.label, place
    return labels.reshape(2, -1)
