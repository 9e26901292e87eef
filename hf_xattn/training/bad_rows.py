"""Finds rows that cannot be trained on, before a run and while it reads them.

A usual data set raises an error at its first bad row, perhaps hours after the start. Here some rows are checked before
the run. With `--bad-rows skip` bad rows are left out, and a file names each of them with the reason.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
from tqdm.auto import tqdm

from ..data.loading import Rows
from ..data.pictures import picture_parts, what_is_wrong
from .launch import is_first_process


BAD_ROWS_FILE = "bad_rows.jsonl"
MAX_PROBLEMS = 20
SUBSTITUTES = 1000  # most rows that are tried if all rows of a batch are bad

Collate = Callable[[list[dict[str, Any]]], Any]


class Problem(NamedTuple):
    """A bad row, by its index, and why it cannot be trained on."""

    row: int
    reason: str


def reason_of(row: dict[str, Any], error: Exception, folder: Path) -> str:
    """Returns why a row cannot be trained on: all images that cannot be read, or else the error of the collator."""
    wrong = [what_is_wrong(part, folder) for part in picture_parts(row)]
    reasons = "; ".join(dict.fromkeys(reason for reason in wrong if reason))
    return reasons or str(error).partition(": ")[2]  # without "Row 0 of the batch"


def list_problems(rows: Rows, problems: Sequence[Problem]) -> str:
    """Lists the rows that cannot be used, grouped by file."""
    files: dict[str, list[str]] = {}
    for index, reason in problems:
        file, place = rows.place_of(index)
        files.setdefault(file, []).append(f"{place}: {reason}")
    told = []
    for file, lines in files.items():
        more = f"\n  and {len(lines) - MAX_PROBLEMS} more" if len(lines) > MAX_PROBLEMS else ""
        shown = "".join(f"\n  {line}" for line in lines[:MAX_PROBLEMS])
        kind = lines[0].partition(" ")[0]  # "line", "row", "sample" or "object"
        told.append(f"{file} has {len(lines)} {kind}(s) that cannot be used:{shown}{more}")
    return "\n".join(told)


class BadRowsFile:
    """The file that names the rows that were left out, one a line. Several processes write to the same file.

    Args:
        folder (`Path`): the folder of the run.
        limit (`float`): largest share of all rows that may be bad.
    """

    def __init__(self, folder: Path, limit: float):
        self.path, self.limit = folder / BAD_ROWS_FILE, limit
        self._size, self._found = 0, set[str]()

    def add(self, rows: Rows, problem: Problem) -> None:
        file, place = rows.place_of(problem.row)
        told = {"source": rows.source_of(problem.row), "file": file, "row": place, "reason": problem.reason}
        line = json.dumps(told)
        if self.count() and line in self._found:  # the row was named in another epoch, or before the run was resumed
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path, "ab", buffering=0) as out:  # one write appends a whole line, beside other processes too
            out.write(f"{line}\n".encode())

    def count(self) -> int:
        """Returns the number of different rows in the file."""
        size = self.path.stat().st_size if self.path.is_file() else 0
        if size != self._size:
            self._size, self._found = size, set(self.path.read_text(encoding="utf-8").splitlines())
        return len(self._found)

    def check(self, rows: int) -> None:
        """Raises a `ValueError` if more rows than allowed are bad. `rows` is the number of rows of all sources."""
        if self.count() > self.limit * rows:
            raise ValueError(
                f"Expected at most {self.limit:.2%} of {rows} rows to be bad (`--bad-rows-limit`), got {self.count()}. "
                f"{self.path} names them, with the reasons."
            )


class BadRowError(RuntimeError):
    """A row that cannot be trained on. It is no `ValueError`, after which the other rows of a batch are tried.

    torch turns an error of a data loader's worker into one long text and makes the error anew from it. Only the part
    behind the name of this class is kept.
    """

    def __init__(self, text: str):
        super().__init__(text.rpartition(f"{type(self).__name__}: ")[2])


class Place(NamedTuple):
    """A row that is not read yet. It is read by the collator, which can then leave it out."""

    rows: Any  # [`Rows`] or [`Shuffled`]
    place: int


class Places(torch.utils.data.Dataset):
    """A data set whose items are places, which [`RowReader`] reads."""

    def __init__(self, rows: Any):
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, place: int) -> Place:
        return Place(self.rows, place)


class RowReader:
    """Reads the rows of a batch and collates them. A bad row is left out, or raises an error that names it.

    A batch from which rows are left out is smaller. If all its rows are bad, the rows behind it are read instead.

    Args:
        collate (`XAttnDataCollator`): makes the batch.
        on_bad (`Callable`, *optional*): is called with each bad row, such as [`BadRowsFile.add`], and the row is left
            out. Without it, a bad row raises an error.
    """

    def __init__(self, collate: Collate, on_bad: Callable[[Rows, Problem], Any] | None):
        self.collate, self.on_bad = collate, on_bad

    def __call__(self, places: Sequence[Place]) -> Any:
        batch = self.read(places)
        rows, last = places[-1]
        for place in range(last + 1, last + 1 + SUBSTITUTES):
            if batch is not None:
                return batch
            batch = self.read([Place(rows, place % len(rows))])
        raise BadRowError(f"Expected a good row in {SUBSTITUTES} rows, got none.")

    def read(self, places: Sequence[Place]) -> dict[str, torch.Tensor] | None:
        """Returns the batch of the good rows, or None if all rows are bad."""
        return self._collated([row for place in places if (row := self._read(place)) is not None])

    def _read(self, place: Place) -> tuple[Place, dict[str, Any]] | None:
        rows, index = resolved(place)
        try:
            return place, rows.read(index)
        except (TypeError, ValueError) as error:
            self._bad(place, str(error))
            return None

    def _collated(self, read: Sequence[tuple[Place, dict[str, Any]]]) -> Any:
        """Returns the batch of the good rows, or None if there is no good row."""
        if not read:
            return None
        try:
            return self.batch_of(read)
        except (TypeError, ValueError):
            good = []
            for place, row in read:
                try:
                    self.batch_of([(place, row)])
                    good.append((place, row))
                except (TypeError, ValueError) as error:
                    rows, index = resolved(place)
                    self._bad(place, reason_of(row, error, rows.folder_of(index)))
            if len(good) == len(read):  # each row is good alone, but they do not fit together
                raise
            return self.batch_of(good) if good else None

    def batch_of(self, read: Sequence[tuple[Place, dict[str, Any]]]) -> dict[str, torch.Tensor]:
        """Collates rows that were read."""
        return self.collate([row for _, row in read])

    def _bad(self, place: Place, reason: str) -> None:
        if self.on_bad is None:
            self.refuse(place, reason)
        else:
            rows, index = resolved(place)
            self.on_bad(rows, Problem(index, reason))

    def refuse(self, place: Place, reason: str) -> NoReturn:
        rows, index = resolved(place)
        raise BadRowError(
            f"{rows.where(index)}: {reason}. To leave the row out, add `--bad-rows skip` and continue with `--resume`. "
            "A run on repaired data starts in a new folder."
        )


def find_problems(rows: Rows, chosen: Sequence[int], collate: Collate) -> tuple[list[Problem], int]:
    """Reads the chosen rows one by one, as [`RowReader`] does.

    Returns the problems that it finds, and the number of tokens of the longest row.
    """
    longest, found = 0, list[Problem]()
    reader = RowReader(collate, lambda _, problem: found.append(problem))
    title = f"Checking {len(chosen)} rows"
    for index in tqdm(chosen, title, leave=False, disable=not is_first_process() or not chosen):
        batch = reader.read([Place(rows, index)])
        longest = longest if batch is None else max(longest, batch["input_ids"].shape[1])
    return found, longest


def check_pictures(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Checks whether the images of rows can be read. [`find_problems`] calls it like a collator."""
    for wrong in (what_is_wrong(part, Path()) for row in rows for part in picture_parts(row)):
        if wrong:
            raise ValueError(f": {wrong}")
    return {"input_ids": torch.empty(len(rows), 0)}


def resolved(place: Place) -> tuple[Rows, int]:
    """Returns the rows of a place, and the index of the row in them."""
    rows, index = place
    return (rows, index) if isinstance(rows, Rows) else (rows.rows, rows.index(index))
