"""Composes the pictures of the demo: one to four photographed things, cut out of their background, on a ground.

The photographs come from Debian's package `tuxpaint-stamps-default`. The file `things.txt` lists the kinds of things,
each with its folder. A line describes a thing: its name, the photographs to train on, and behind a bar other pictures
of it, which are held out. These are other photographs or drawings. The things behind `NEVER` are never trained on, and
only questions about their kind are asked.

A package is read from its .deb file, from a folder into which it was unpacked (`dpkg -x`), or from [`INSTALLED`], where
Debian installs it.
"""

from __future__ import annotations

import io
import random
import tarfile
from collections.abc import Iterable
from pathlib import Path
from posixpath import normpath
from typing import NamedTuple

from PIL import Image, ImageEnhance, ImageFilter


NEVER = "NEVER"
INSTALLED = Path("/")
MAGIC = b"!<arch>\n"  # begins an `ar` archive
TRAINED_GROUNDS = ("Aqua.jpg", "Blinds.jpg", "GreenMeadow.jpg", "Storm.jpg", "Wood.jpg")
OTHER_GROUNDS = ("Dune.jpg", "RainDrops.jpg")
SIDE = 448  # width and height of a picture in pixels
SHARE_OF_PHOTOGRAPHS = 0.5  # share of the grounds that are photographs. The others have one or two colours


class Thing(NamedTuple):
    """Something that is asked about.

    Attributes:
        name (`str`): its English name.
        kind (`str`): the kind of thing that it is.
        trained, others (`tuple[str, ...]`): the files of the pictures to train on and of all other pictures, without
            their ending, in the folder of the stamps. All pictures of a thing that is never trained on are `others`.
        known (`bool`): whether its name is trained.
    """

    name: str
    kind: str
    trained: tuple[str, ...]
    others: tuple[str, ...]
    known: bool

    @property
    def named(self) -> str:
        """The name with its article: "a zebra", "an apple", "the Earth"."""
        if self.kind == "planet":
            return "the Earth" if self.name == "Earth" else self.name
        return f"{'an' if self.name[0] in 'aeiou' else 'a'} {self.name}"

    @property
    def the(self) -> str:
        """The name with the definite article: "the zebra"."""
        return self.named if self.kind == "planet" else f"the {self.name}"


def of_kind(kind: str) -> str:
    """Returns a kind with its article: "an animal"."""
    return f"{'an' if kind[0] in 'aeiou' else 'a'} {kind}"


def read_table() -> list[Thing]:
    """Returns all things, in the order of the table."""
    things = []
    for part in Path(__file__).with_name("things.txt").read_text(encoding="utf-8").split("\n\n"):
        heading, folder, *lines = part.strip().splitlines()
        kind, known = heading.strip("[]"), True
        for line in lines:
            if line == NEVER:
                known = False
                continue
            name, _, files = line.partition(": ")
            trained, _, others = files.partition(" | ")
            own, held_out = _paths(folder, trained), _paths(folder, others)
            things.append(Thing(name, kind, own if known else (), held_out if known else own, known))
    return things


def _paths(folder: str, files: str) -> tuple[str, ...]:
    return tuple(normpath(f"{folder}{file}") for file in files.split())


class Package(NamedTuple):
    """A package of Debian, and the folder in it that has the pictures."""

    name: str
    folder: str


STAMPS = Package("tuxpaint-stamps-default", "usr/share/tuxpaint/stamps")
GROUNDS = Package("mate-backgrounds", "usr/share/backgrounds/mate/nature")


class Placed(NamedTuple):
    """A thing in a picture.

    Attributes:
        thing ([`Thing`]): the thing.
        file (`str`): the file of its picture.
        box (`tuple[int, int, int, int]`): its left, upper, right and lower edge in the picture.
    """

    thing: Thing
    file: str
    box: tuple[int, int, int, int]


def read_bytes(source: Path, package: Package, names: Iterable[str]) -> dict[str, bytes]:
    """Returns files of a package, by name. Raises a `ValueError` that says what is missing, and how to get it."""
    wanted = {f"{package.folder}/{name}": name for name in names}
    if source.is_file():
        read = _read_deb(source, wanted)
    else:
        read = {name: (source / path).read_bytes() for path, name in wanted.items() if (source / path).is_file()}
    if missing := sorted(set(wanted.values()) - read.keys()):
        where = source / package.folder if source == INSTALLED else f"{package.folder} in {source}"
        raise ValueError(
            f"Expected the files of {package.name} in {where}, got no {missing[0]} ({len(missing)} of {len(wanted)} "
            f"files are missing). {how_to_get(package)}"
        )
    return read


def read_pictures(source: Path, package: Package, names: Iterable[str]) -> dict[str, Image.Image]:
    """Returns pictures of a package, by name. Raises a `ValueError` as [`read_bytes`] does."""
    return {name: Image.open(io.BytesIO(data)) for name, data in read_bytes(source, package, names).items()}


def how_to_get(package: Package) -> str:
    """Returns a sentence that says how to get a package, on Debian and elsewhere."""
    option = "--stamps" if package is STAMPS else "--grounds"
    return (
        f"On Debian, `apt-get download {package.name}` gets the file; elsewhere, download it from "
        f"packages.debian.org/{package.name}. Pass the .deb file as `{option}`: Python opens it."
    )


def _read_deb(file: Path, wanted: dict[str, str]) -> dict[str, bytes]:
    """Returns files of a .deb, which is an `ar` archive of `tar` archives. Raises a `ValueError` for any other file."""
    data, place, found = file.read_bytes(), len(MAGIC), {}
    if not data.startswith(MAGIC):
        raise ValueError(f"Expected {file} to be a .deb file, got another one. Download the package again.")
    while place < len(data):
        name, size = data[place : place + 16].decode().strip(), int(data[place + 48 : place + 58])
        place += 60
        if name.startswith("data.tar"):
            try:
                archive = tarfile.open(fileobj=io.BytesIO(data[place : place + size]))
            except tarfile.TarError as error:
                raise ValueError(
                    f"{file}: this Python cannot open {name.rstrip('/')}. Unpack the file (`dpkg -x`), and pass the "
                    "folder."
                ) from error
            with archive:
                for member in archive:
                    if (path := member.name.removeprefix("./")) in wanted:
                        found[wanted[path]] = archive.extractfile(member).read()  # type: ignore[union-attr]
        place += size + size % 2
    return found


class Pictures:
    """Reads the photographs and the grounds, and composes pictures of them.

    Args:
        stamps (`Path`): source of the photographs of things.
        grounds (`Path`, *optional*): source of the photographs for grounds. Without it, all grounds are plain colours.
        things (`list[Thing]`): the things whose photographs are read.
    """

    def __init__(self, stamps: Path, grounds: Path | None, things: list[Thing]):
        files = {file for thing in things for file in (*thing.trained, *thing.others)}
        read = read_pictures(stamps, STAMPS, [f"{file}.png" for file in sorted(files)])
        self._cut: dict[str, Image.Image] = {}
        for name, picture in read.items():
            whole = picture.convert("RGBA")
            self._cut[name.removesuffix(".png")] = whole.crop(whole.getchannel("A").getbbox())
        names = (*TRAINED_GROUNDS, *OTHER_GROUNDS)
        self._grounds = {} if grounds is None else read_pictures(grounds, GROUNDS, names)
        for name, picture in self._grounds.items():
            smaller = picture.convert("RGB")
            smaller.thumbnail((3 * SIDE, 3 * SIDE))
            self._grounds[name] = smaller

    def ground(self, rng: random.Random, trained: bool) -> Image.Image:
        """Returns a ground of one colour, of two colours, or from a part of a photograph."""
        if self._grounds and rng.random() < SHARE_OF_PHOTOGRAPHS:
            picture = self._grounds[rng.choice(TRAINED_GROUNDS if trained else OTHER_GROUNDS)]
            side = rng.randint(SIDE // 2, min(picture.size))
            left, top = (rng.randint(0, length - side) for length in picture.size)
            part = picture.crop((left, top, left + side, top + side)).resize((SIDE, SIDE))
            return part.filter(ImageFilter.GaussianBlur(rng.uniform(0, 4)))
        colours = [tuple(rng.randint(40, 250) for _ in range(3)) for _ in range(2)]
        if rng.random() < 0.5:
            return Image.new("RGB", (SIDE, SIDE), colours[0])
        two = Image.new("RGB", (1, 2))
        two.putdata(colours)
        return two.resize((SIDE, SIDE), Image.Resampling.BILINEAR)

    def compose(
        self, rng: random.Random, chosen: list[tuple[Thing, str]], trained_ground: bool
    ) -> tuple[Image.Image, list[Placed]]:
        """Puts things side by side on a ground, or into its corners if there are more than two.

        Args:
            rng: source of all random choices.
            chosen: the things, each with the file of its photograph.
            trained_ground: whether a photograph for the ground is one of those to train on.

        Returns:
            the picture, and its things in reading order.
        """
        picture = self.ground(rng, trained_ground)
        half = SIDE // 2
        cells = {
            1: [(0, 0, SIDE, SIDE)],
            2: [(0, 0, half, SIDE), (half, 0, SIDE, SIDE)],
        }.get(len(chosen), [(x, y, x + half, y + half) for y in (0, half) for x in (0, half)])
        kept = sorted(rng.sample(range(len(cells)), len(chosen)))
        placed = []
        for (thing, file), number in zip(chosen, kept):
            left, top, right, bottom = cells[number]
            cut = self._cut[file]
            if rng.random() < 0.5:
                cut = cut.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
            cut = ImageEnhance.Brightness(cut).enhance(rng.uniform(0.85, 1.1))
            room = rng.uniform(0.55, 0.9) if len(chosen) == 1 else rng.uniform(0.75, 0.97)
            scale = room * min((right - left) / cut.width, (bottom - top) / cut.height)
            cut = cut.resize((max(1, round(cut.width * scale)), max(1, round(cut.height * scale))))
            x, y = rng.randint(left, right - cut.width), rng.randint(top, bottom - cut.height)
            picture.paste(cut, (x, y), cut)
            placed.append(Placed(thing, file, (x, y, x + cut.width, y + cut.height)))
        return picture, placed
