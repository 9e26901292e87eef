"""`load_rows` opens one source of rows or several, and `Shuffled` gives the rows their order in training.

A row is read when it is asked for; nothing is kept in memory.

A streamed data set usually has a shuffle buffer, which a resumed run has to fill again. Here the order is a permutation
that follows from a seed, so the row at each place of a run is known at once. `Trainer` reads the places in turn, and
accelerate deals them to processes and skips those before a resumed step. A run that was killed therefore continues with
the next row, and reads no earlier row again. The order does not depend on the number of processes or workers.

The rows of all sources are mixed, and each row comes once in an epoch. If a source has a weight, the weight decides how
many of its rows an epoch reads, and the next epoch continues with the rows that were not read.
"""

from __future__ import annotations

import bisect
import functools
import hashlib
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .forms import CAPTION_PROMPT, is_caption, row_of
from .sources import Source, open_source
from .tables import Lines, Table


if TYPE_CHECKING:
    from datasets import Dataset

# The order is saved with a run. A run that began in another order cannot be resumed.
ORDER = "each epoch a permutation of all rows, also of bad ones"
WITHOUT_BAD = "each epoch a permutation of all rows"  # earlier versions: bad rows found before the run were left out
EPOCH, PASS = range(2)  # part of the seed: whether an epoch or the rows of a source are permuted


class Rows(Sequence[dict[str, Any]]):
    """Rows to train on or to ask about, for `XAttnDataCollator` and `Trainer`. [`load_rows`] makes them.

    `rows[i]` reads row `i` from its file each time. In a row, images are paths or the bytes of files. A broken row
    raises a `ValueError` that names the file and the row.
    """

    def __init__(self, sources: Sequence[Source], prompt: str, chosen: np.ndarray | None = None):
        self.sources = list(sources)
        self.prompt = prompt
        self._files = [(source, number, file) for source in self.sources for number, file in enumerate(source.files)]
        self._ends = list(itertools.accumulate(len(file) for *_, file in self._files))
        self._chosen = chosen  # indices of the rows that are used; None for all

    def sizes(self) -> list[int]:
        """Returns the number of rows of each source."""
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
        """Reads row `index`. In contrast to `rows[index]`, an error does not say where the row is."""
        try:
            return row_of(self.example(index), self.folder_of(index), self.prompt)
        except RecursionError:
            raise ValueError("its values are nested too deeply") from None

    def example(self, index: int) -> Mapping[str, Any]:
        """Returns what the file holds for a row."""
        _, _, file, place = self._place(index)
        return file.example(place)

    def where(self, index: int) -> str:
        """Names a row for errors: its file, and its place in the file."""
        file, place = self.place_of(index)
        return f"{file}, {place}"

    def place_of(self, index: int) -> tuple[str, str]:
        """Returns the file of a row, and the name of the row in this file, such as "line 12"."""
        _, _, file, place = self._place(index)
        return file.path, file.name(place)

    def folder_of(self, index: int) -> Path:
        """Returns the folder that the names of a row's images are relative to."""
        source, number, _, _ = self._place(index)
        return source.folder_of(number)

    def source_of(self, index: int) -> str:
        return self._place(index)[0].name

    def is_caption(self, index: int) -> bool:
        """Whether a row is a caption, whose question is `prompt`. False for a broken row."""
        try:
            return is_caption(self.example(index))
        except ValueError:
            return False

    @property
    def fingerprint(self) -> str:
        """A hash that changes with the sources, as far as lines, sizes and names of files show. Reads no images."""
        digest = hashlib.sha256()
        for source in self.sources:
            digest.update(f"{source.weight} {[file.digest for file in source.files]}".encode())
        return digest.hexdigest()

    def split(self, chosen: Sequence[int]) -> tuple[Rows, Rows]:
        """Returns two [`Rows`]: those without the chosen ones, and the chosen ones."""
        indices = np.unique(np.asarray(chosen, dtype=np.int64))
        rows = np.arange(len(self)) if self._chosen is None else self._chosen
        return Rows(self.sources, self.prompt, np.delete(rows, indices)), Rows(self.sources, self.prompt, rows[indices])

    def with_source(self, source: Source) -> Rows:
        """Returns the same rows, followed by those of one more source."""
        chosen, total = self._chosen, self._ends[-1]
        if chosen is not None:
            chosen = np.concatenate([chosen, np.arange(total, total + source.rows)])
        return Rows([*self.sources, source], self.prompt, chosen)

    def as_dataset(self) -> Dataset:
        """Returns the rows as a `datasets.Dataset`, for TRL's trainers. A row is still read when it is asked for."""
        from datasets import Dataset

        def read(batch: dict[str, list[int]]) -> dict[str, list[Any]]:
            rows = [self[index] for index in batch["index"]]
            return {name: [row.get(name) for row in rows] for name in dict.fromkeys(itertools.chain(*rows))}

        return Dataset.from_dict({"index": np.arange(len(self))}).with_transform(read)

    def _place(self, index: int) -> tuple[Source, int, Table | Lines, int]:
        """Returns the source of a row, the number of the file in the source, the file, and the row's place in it."""
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
    """Opens one source of rows or several, for `XAttnDataCollator` and `Trainer`.

    Only the places of the rows are looked up. A row is read when it is asked for, and its images when a batch is made.
    TRL's `SFTTrainer` takes `load_rows(...).as_dataset()`. `examples/data/README.md` describes the kinds of sources and
    the forms of examples.

    Args:
        source (`str`, `Path`, or a list of them): a folder, a `.json`, `.jsonl`, `.parquet` or `.tar` file (also as
            `shards-{000..127}.tar` or `*.parquet`), a data set that `datasets` saved, or a Hub id.
        pictures (`str` or `Path`, *optional*): the folder that names of images are relative to. Default: the folder
            of each file.
        prompt (`str`, defaults to `"Describe the image."`): the question for images that have only a caption.

    Returns:
        [`Rows`]: the rows of all sources, in the order of the sources.

    Raises:
        ValueError: for a source that does not exist, for a file that cannot be read, and if there are no rows.
        ImportError: for a source that needs the extra `data`.

    Example:

    ```python
    >>> import hf_xattn

    >>> rows = hf_xattn.load_rows("pictures")  # a folder with pictures and `metadata.jsonl`
    >>> len(rows)
    3
    >>> rows[0]["messages"][-1]  # the caption of the first row became the answer to `prompt`
    {'role': 'assistant', 'content': 'a red circle'}
    ```
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
    """Calls [`load_rows`] for an `option` that reads each row once. A source with a weight is a `ValueError`."""
    rows = load_rows(source, pictures, prompt)
    if rows.sources[0].weight != 1:
        raise ValueError(
            f"Expected a source without a weight for `{option}`, which reads each row once, got {str(source)!r}. "
            "Remove the colon and what follows it."
        )
    return rows


class Shuffled:
    """The rows of a run in their order: a data set for `TrainingArguments(train_sampling_strategy="sequential")`.

    Args:
        rows ([`Rows`]): the rows, whose sources may have weights.
        length (`int`): number of rows that the run reads in all epochs.
        seed (`int`, defaults to 0): seed of the order.

    Example:

    ```python
    >>> import hf_xattn

    >>> rows = hf_xattn.load_rows("pictures")
    >>> order = hf_xattn.Shuffled(rows, length=2 * len(rows), seed=0)  # two epochs
    >>> len(order)
    6
    ```
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
        self.__init__(**state)  # type: ignore[misc]  # a cache cannot be pickled, so it is made anew

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, place: int) -> dict[str, Any]:
        if not 0 <= place < self.length:  # an `IndexError` ends a loop over the rows
            raise IndexError(f"Expected a place from 0 to {self.length - 1}, got {place}.")
        return self.rows[self.index(place)]

    def index(self, place: int) -> int:
        """Returns the index in `rows` of the row at a place of the run."""
        epoch, inside = divmod(place, self.epoch_rows)
        return int(self._order(epoch)[inside])

    def _make_order(self, epoch: int) -> np.ndarray:
        """Returns the indices of the rows of an epoch, in their order."""
        starts = np.cumsum([0, *self._sizes])
        chosen = [starts[source] + self._of_source(source, epoch) for source in range(len(self.counts))]
        return self._permutation(np.concatenate(chosen), EPOCH, epoch)

    def _of_source(self, source: int, epoch: int) -> np.ndarray:
        """Returns the rows of a source that an epoch reads.

        Passes through the source follow one another without end, each in another order. An epoch reads the next part.
        """
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
