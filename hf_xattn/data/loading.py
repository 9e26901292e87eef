"""`load_rows`: the rows of one source or of several, read when they are asked for."""

from __future__ import annotations

import bisect
import hashlib
import itertools
import os
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .forms import CAPTION_PROMPT, is_caption, row_of
from .sources import Source, open_source
from .units import OpenUnit, Unit


# Units that are held open in a process, and their bytes in memory. One unit is for the source that `Shuffled` spreads.
OPEN_UNITS, OPEN_BYTES = 33, 2**27


class Block(NamedTuple):
    """A unit with the source and the file that it is of."""

    source: int
    file: int
    unit: Unit


class Rows(Sequence[dict[str, Any]]):
    """Rows to train on or to ask about, for `XAttnDataCollator` and `Trainer`. Made by [`load_rows`].

    `rows[i]` reads row `i`, and holds the last few units of the files that it read from. Pictures are paths, or the
    bytes of their files. Raises a `ValueError` that names the source, the file and the row for one that is broken.
    """

    def __init__(self, sources: Sequence[Source], prompt: str, left: Mapping[int, np.ndarray] | None = None):
        self.sources = list(sources)
        self.prompt = prompt
        self.blocks = [
            Block(number, index, unit)
            for number, source in enumerate(self.sources)
            for index, file in enumerate(source.files)
            for unit in file.units
        ]
        self._left = dict(left or {})  # the places that are left of a block, if not all
        self._ends = list(itertools.accumulate(self.rows_of(number) for number in range(len(self.blocks))))
        self._open: OrderedDict[int, OpenUnit] = OrderedDict()
        self._process = os.getpid()

    def first_of(self, block: int) -> int:
        """The index of the first row of a block."""
        return self._ends[block] - self.rows_of(block)

    def rows_of(self, block: int) -> int:
        return len(self._left[block]) if block in self._left else self.blocks[block].unit.rows

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        try:
            return self.read(index)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{self.where(index)}: {error}") from error

    def __repr__(self) -> str:
        return f"Rows({len(self):,} of {', '.join(source.name for source in self.sources)})"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": OrderedDict()}

    def read(self, index: int) -> dict[str, Any]:
        """Row `index`; an error of it does not say where the row is."""
        try:
            return row_of(self.example(index), self.folder_of(index), self.prompt)
        except RecursionError:
            raise ValueError("its values are nested too deeply") from None

    def example(self, index: int) -> Mapping[str, Any]:
        """What the file holds for a row, before it becomes one."""
        block, place = self._place(index)
        return self._opened(block).example(place)

    def where(self, index: int) -> str:
        """Names a row for errors: its file, and its place there."""
        file, place = self.place_of(index)
        return f"{file}, {place}"

    def place_of(self, index: int) -> tuple[str, str]:
        """The file of a row, and its name there."""
        block, place = self._place(index)
        number, file, unit = self.blocks[block]
        try:
            name = self._opened(block).name(place)
        except ValueError:  # the unit is broken
            name = f"row {unit.first + place}"
        return self.sources[number].files[file].path, name

    def folder_of(self, index: int) -> Path:
        """Where names of pictures begin, for a row."""
        block = self.blocks[self._place(index)[0]]
        return self.sources[block.source].folder_of(block.file)

    def source_of(self, index: int) -> str:
        return self.sources[self.blocks[self._place(index)[0]].source].name

    def is_caption(self, index: int) -> bool:
        """Whether `prompt` is the question of a row. False for one that is broken."""
        try:
            return is_caption(self.example(index))
        except ValueError:
            return False

    @property
    def fingerprint(self) -> str:
        """Changes if the sources change, as far as lines, sizes and names of files tell. Pictures are not read."""
        digest = hashlib.sha256()
        for source in self.sources:
            digest.update(f"{source.weight} {[file.digest for file in source.files]}".encode())
        return digest.hexdigest()

    def split(self, chosen: Sequence[int]) -> tuple[Rows, Rows]:
        """The rows without the chosen ones, and the chosen ones."""
        indices = np.unique(np.asarray(chosen, dtype=np.int64))
        bounds = np.searchsorted(indices, [0, *self._ends])
        kept, taken = {}, {}
        for number in range(len(self.blocks)):
            own = indices[bounds[number] : bounds[number + 1]] - self.first_of(number)
            places = self._left.get(number, np.arange(self.blocks[number].unit.rows))
            kept[number], taken[number] = np.delete(places, own), places[own]
        return Rows(self.sources, self.prompt, kept), Rows(self.sources, self.prompt, taken)

    def with_source(self, source: Source) -> Rows:
        """The same rows, and behind them those of one more source."""
        return Rows([*self.sources, source], self.prompt, self._left)

    def as_dataset(self) -> Any:
        """The same rows as a `datasets.Dataset`, which TRL's trainers ask for. A row is read when it is asked for."""
        from datasets import Dataset

        def read(batch: dict[str, list[int]]) -> dict[str, list[Any]]:
            rows = [self[index] for index in batch["index"]]
            return {name: [row.get(name) for row in rows] for name in dict.fromkeys(itertools.chain(*rows))}

        return Dataset.from_dict({"index": np.arange(len(self))}).with_transform(read)

    def _place(self, index: int) -> tuple[int, int]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"Expected an index below {len(self)}, got {index}.")
        index %= len(self)
        block = bisect.bisect_right(self._ends, index)
        place = index - self.first_of(block)
        return block, int(self._left[block][place]) if block in self._left else place

    def _opened(self, number: int) -> OpenUnit:
        """The unit of a block. The units used last stay open, in each process its own."""
        if self._process != os.getpid():
            self._process, self._open = os.getpid(), OrderedDict()
        if number not in self._open:
            source, file, unit = self.blocks[number]
            found = self.sources[source].files[file]
            self._open[number] = found.open(found.path, unit)
            held = sum(self.blocks[each].unit.nbytes for each in self._open)
            while len(self._open) > 1 and (len(self._open) > OPEN_UNITS or held > OPEN_BYTES):
                held -= self.blocks[self._open.popitem(last=False)[0]].unit.nbytes
        self._open.move_to_end(number)
        return self._open[number]


def load_rows(
    source: str | Path | Sequence[str | Path], pictures: str | Path | None = None, prompt: str = CAPTION_PROMPT
) -> Rows:
    """Opens a source of rows, or several, for `XAttnDataCollator`, `Trainer` and, `as_dataset()`, `SFTTrainer`.

    Nothing is read but where rows begin; a row is read when it is asked for, and pictures later. `examples/data` has
    the kinds of sources and the forms of examples.

    Args:
        source (`str`, `Path`, or a list of them): a folder, a `.json`, `.jsonl`, `.parquet` or `.tar` file (also as
            `shards-{000..127}.tar` or `*.parquet`), a data set that `datasets` saved, or a Hub id.
        pictures (`str` or `Path`, *optional*): the folder that names of pictures are relative to. Default: the folder
            of each file.
        prompt (`str`): the question for pictures that have only a caption.

    Raises:
        TypeError: for a source that is no path.
        ValueError: for a source that is none, a file that cannot be read, and no rows.
        ImportError: for a source that needs the extra `data`.
    """
    names = [source] if isinstance(source, (str, Path)) or not isinstance(source, Sequence) else list(source)
    for name in names:
        if not isinstance(name, (str, Path)):
            raise TypeError(f"Expected `source` to be a path, a Hub id or a list of them, got {type(name).__name__}.")
    if not names:
        raise ValueError("Expected `source` to name one source or more, got an empty list.")
    if not isinstance(prompt, str) or not prompt.strip():
        raise ValueError(f"`prompt` must be a text that is not empty, got {prompt!r}.")
    return Rows([open_source(name, pictures) for name in names], prompt)


def load_rows_once(
    option: str, source: str | Path, pictures: str | Path | None = None, prompt: str = CAPTION_PROMPT
) -> Rows:
    """[`load_rows`] for `option`, which reads each row once: a `ValueError` for a source with a weight."""
    rows = load_rows(source, pictures, prompt)
    if rows.sources[0].weight != 1:
        raise ValueError(
            f"Expected a source without a weight for `{option}`, which reads each row once, got {str(source)!r}. Leave "
            "out what is behind the colon."
        )
    return rows


__all__ = ["Rows", "load_rows"]
