"""`load_rows`: the rows of one source or of several, read when they are asked for. And their order in training.

The order is a permutation by a seed, so that the row of each place of a run is known at once ([`Shuffled`]). `Trainer`
reads the places in turn, accelerate deals them to processes and skips those before a resumed step. A run that was
killed therefore goes on with the next row, and reads nothing of what came before. The order does not depend on the
number of processes or workers.

In an epoch each row comes once, in any order with those of all sources. `weight` of a source decides how many of its
rows come, and those that did not come are the first of the next epoch.
"""

from __future__ import annotations

import bisect
import functools
import hashlib
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .forms import CAPTION_PROMPT, is_caption, row_of
from .sources import DataFile, Source, open_source


# Saved with a run: one that was begun in another order cannot go on.
ORDER = "each epoch a permutation of all rows, also of bad ones"
WITHOUT_BAD = "each epoch a permutation of all rows"  # of earlier versions, which left out the bad rows that they found
EPOCH, PASS = range(2)  # what a permutation is of, for its seed


class Rows(Sequence[dict[str, Any]]):
    """Rows to train on or to ask about, for `XAttnDataCollator` and `Trainer`. Made by [`load_rows`].

    `rows[i]` reads row `i`, and holds nothing. Images are paths, or the bytes of their files. Raises a `ValueError`
    that names the source, the file and the row for one that is broken.
    """

    def __init__(self, sources: Sequence[Source], prompt: str, chosen: np.ndarray | None = None):
        self.sources = list(sources)
        self.prompt = prompt
        self._files = [(source, number, file) for source in self.sources for number, file in enumerate(source.files)]
        self._ends = list(itertools.accumulate(len(file) for *_, file in self._files))
        self._chosen = chosen  # the rows of the sources that are left, if not all

    def sizes(self) -> list[int]:
        """The number of rows of each source."""
        ends = list(itertools.accumulate(source.rows for source in self.sources))
        if self._chosen is not None:
            ends = np.searchsorted(self._chosen, ends).tolist()
        return [end - start for start, end in zip([0, *ends], ends)]

    def __len__(self) -> int:
        return self._ends[-1] if self._chosen is None else len(self._chosen)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        try:
            return self.read(index)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{self.where(index)}: {error}") from error

    def __repr__(self) -> str:
        return f"Rows({len(self):,} of {', '.join(source.name for source in self.sources)})"

    def read(self, index: int) -> dict[str, Any]:
        """Row `index`; an error of it does not say where the row is."""
        try:
            return row_of(self.example(index), self.folder_of(index), self.prompt)
        except RecursionError:
            raise ValueError("its values are nested too deeply") from None

    def example(self, index: int) -> Mapping[str, Any]:
        """What the file holds for a row, before it becomes one."""
        _, _, file, place = self._place(index)
        return file.example(place)

    def where(self, index: int) -> str:
        """Names a row for errors: its file, and its place there."""
        file, place = self.place_of(index)
        return f"{file}, {place}"

    def place_of(self, index: int) -> tuple[str, str]:
        """The file of a row, and its name there."""
        _, _, file, place = self._place(index)
        return file.path, file.name(place)

    def folder_of(self, index: int) -> Path:
        """Where names of images begin, for a row."""
        source, number, _, _ = self._place(index)
        return source.folder_of(number)

    def source_of(self, index: int) -> str:
        return self._place(index)[0].name

    def is_caption(self, index: int) -> bool:
        """Whether `prompt` is the question of a row. False for one that is broken."""
        try:
            return is_caption(self.example(index))
        except ValueError:
            return False

    @property
    def fingerprint(self) -> str:
        """Changes if the sources change, as far as lines, sizes and names of files tell. Images are not read."""
        digest = hashlib.sha256()
        for source in self.sources:
            digest.update(f"{source.weight} {[file.digest for file in source.files]}".encode())
        return digest.hexdigest()

    def split(self, chosen: Sequence[int]) -> tuple[Rows, Rows]:
        """The rows without the chosen ones, and the chosen ones."""
        indices = np.unique(np.asarray(chosen, dtype=np.int64))
        rows = np.arange(len(self)) if self._chosen is None else self._chosen
        return Rows(self.sources, self.prompt, np.delete(rows, indices)), Rows(self.sources, self.prompt, rows[indices])

    def with_source(self, source: Source) -> Rows:
        """The same rows, and behind them those of one more source."""
        chosen, total = self._chosen, self._ends[-1]
        if chosen is not None:
            chosen = np.concatenate([chosen, np.arange(total, total + source.rows)])
        return Rows([*self.sources, source], self.prompt, chosen)

    def as_dataset(self) -> Any:
        """The same rows as a `datasets.Dataset`, which TRL's trainers ask for. A row is read when it is asked for."""
        from datasets import Dataset

        def read(batch: dict[str, list[int]]) -> dict[str, list[Any]]:
            rows = [self[index] for index in batch["index"]]
            return {name: [row.get(name) for row in rows] for name in dict.fromkeys(itertools.chain(*rows))}

        return Dataset.from_dict({"index": np.arange(len(self))}).with_transform(read)

    def _place(self, index: int) -> tuple[Source, int, DataFile, int]:
        """The source of a row, the file and its number there, and the place of the row in the file."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"Expected an index below {len(self)}, got {index}.")
        index %= len(self)
        row = index if self._chosen is None else int(self._chosen[index])
        at = bisect.bisect_right(self._ends, row)
        source, number, file = self._files[at]
        return source, number, file, row - self._ends[at] + len(file)


def load_rows(
    source: str | Path | Sequence[str | Path], pictures: str | Path | None = None, prompt: str = CAPTION_PROMPT
) -> Rows:
    """Opens a source of rows, or several, for `XAttnDataCollator`, `Trainer` and, `as_dataset()`, `SFTTrainer`.

    Nothing is read but where rows begin; a row is read when it is asked for, and images later. `examples/data` has
    the kinds of sources and the forms of examples.

    Args:
        source (`str`, `Path`, or a list of them): a folder, a `.json`, `.jsonl`, `.parquet` or `.tar` file (also as
            `shards-{000..127}.tar` or `*.parquet`), a data set that `datasets` saved, or a Hub id.
        pictures (`str` or `Path`, *optional*): the folder that names of images are relative to. Default: the folder
            of each file.
        prompt (`str`): the question for images that have only a caption.

    Raises:
        ValueError: for a source that is none, a file that cannot be read, and no rows.
        ImportError: for a source that needs the extra `data`.
    """
    names = [source] if isinstance(source, (str, Path)) or not isinstance(source, Sequence) else list(source)
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


class Shuffled:
    """The rows of a run, in their order, as a data set for `TrainingArguments(train_sampling_strategy="sequential")`.

    Args:
        rows ([`Rows`]): with the weights of their sources.
        length (`int`): number of rows that the run reads.
        seed (`int`): of the order.
    """

    def __init__(self, rows: Rows, length: int, seed: int = 0):
        self.rows, self.length, self.seed = rows, length, seed
        self._sizes = rows.sizes()
        self.counts = [
            max(1, round(source.weight * size)) if size else 0 for source, size in zip(rows.sources, self._sizes)
        ]
        self.epoch_rows = sum(self.counts)
        self._order = functools.lru_cache(2)(self._make_order)

    def __getstate__(self) -> dict[str, Any]:
        return {"rows": self.rows, "length": self.length, "seed": self.seed}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]  # makes the cache anew

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, place: int) -> dict[str, Any]:
        if not 0 <= place < self.length:  # what ends a loop over the rows
            raise IndexError(f"Expected a place from 0 to {self.length - 1}, got {place}.")
        return self.rows[self.index(place)]

    def index(self, place: int) -> int:
        """The row at a place of the run."""
        epoch, inside = divmod(place, self.epoch_rows)
        return int(self._order(epoch)[inside])

    def _make_order(self, epoch: int) -> np.ndarray:
        """The rows of an epoch, in their order."""
        starts = np.cumsum([0, *self._sizes])
        chosen = [starts[source] + self._of_source(source, epoch) for source in range(len(self.counts))]
        return self._permutation(np.concatenate(chosen), EPOCH, epoch)

    def _of_source(self, source: int, epoch: int) -> np.ndarray:
        """The part of an epoch in the endless row of passes through a source."""
        size, count = self._sizes[source], self.counts[source]
        if not count:
            return np.arange(0)
        turn, start = divmod(epoch * count, size)
        turns = range(turn, turn + -(-(start + count) // size))
        passes = [self._permutation(np.arange(size), PASS, source, turn) for turn in turns]
        return np.concatenate(passes)[start : start + count]

    def _permutation(self, rows: np.ndarray, *key: int) -> np.ndarray:
        return np.random.default_rng((self.seed, *key)).permutation(rows)


__all__ = ["Rows", "load_rows"]
