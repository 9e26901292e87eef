"""The order of rows in training: a permutation by a seed, so that the row of each place of a run is known at once.

`Trainer` reads the places in turn, accelerate deals them to processes and skips those before a resumed step. A run that
was killed therefore goes on with the next row, and reads nothing of what came before. The order does not depend on the
number of processes or workers.

In an epoch each row comes once, in any order with those of all sources. `weight` of a source decides how many of its
rows come, and those that did not come are the first of the next epoch.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from .loading import Rows


# Saved with a run: one that was begun in another order cannot go on.
ORDER = "each epoch a permutation of all rows, also of bad ones"
WITHOUT_BAD = "each epoch a permutation of all rows"  # of earlier versions, which left out the bad rows that they found
EPOCH, PASS = range(2)  # what a permutation is of, for its seed


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
