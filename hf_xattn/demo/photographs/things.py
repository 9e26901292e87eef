"""The photographs of Debian's package `tuxpaint-stamps-default` that are used, and what is on them.

`things.txt` has the kinds of things, each with a folder. A line is a thing: its name, the photographs that are trained
on, and behind a bar other pictures of it, which are held out: another photograph, or a drawing. Things behind `NEVER`
are never trained on: of them only the kind is asked.
"""

from __future__ import annotations

from pathlib import Path
from posixpath import normpath
from typing import NamedTuple


NEVER = "NEVER"


class Thing(NamedTuple):
    """Something that is asked about.

    Attributes:
        name (`str`): in English.
        kind (`str`): of thing.
        trained, others (`tuple[str, ...]`): its pictures, without their ending, below the folder of the stamps. Of a
            thing that is never trained on, all are `others`.
        known (`bool`): whether its name is trained.
    """

    name: str
    kind: str
    trained: tuple[str, ...]
    others: tuple[str, ...]
    known: bool

    @property
    def named(self) -> str:
        """With its article: "a zebra", "an apple", "the Earth"."""
        if self.kind == "planet":
            return "the Earth" if self.name == "Earth" else self.name
        return f"{'an' if self.name[0] in 'aeiou' else 'a'} {self.name}"

    @property
    def the(self) -> str:
        """ "the zebra"."""
        return self.named if self.kind == "planet" else f"the {self.name}"


def of_kind(kind: str) -> str:
    """ "an animal"."""
    return f"{'an' if kind[0] in 'aeiou' else 'a'} {kind}"


def read_table() -> list[Thing]:
    """All things, in the order of the table."""
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
