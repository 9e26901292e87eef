"""A part of a file that is read at once, and what each kind of file has to tell."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol


ROWS_OF_A_UNIT = 256


class Unit(NamedTuple):
    """Rows that lie together in a file: lines, a row group, a shard. They are read at once, and shuffled as a whole."""

    rows: int
    first: int  # what errors call the first row: a line counted from 1, a row counted from 0
    start: int  # where it begins in the file: a byte, a row group, a row
    end: int  # where it ends; for errors and the file's own use
    nbytes: int = 0  # held in memory while the unit is open


class OpenUnit(Protocol):
    """The rows of a unit, by their place in it."""

    def example(self, place: int) -> Mapping[str, Any]:
        """What the file holds for a row. Raises a `ValueError` for a row that is broken."""

    def name(self, place: int) -> str:
        """What errors call the row: "line 12", "row 3", "sample 000012"."""


class DataFile(NamedTuple):
    """A file, cut into units without reading its pictures."""

    path: str
    units: list[Unit]
    digest: str  # changes if the file changes, as far as its index tells
    open: Callable[[str, Unit], OpenUnit]
