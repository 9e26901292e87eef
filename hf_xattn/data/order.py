"""The order of rows in training: a permutation by a seed, so that the row of each place of a run is known at once.

A run that was killed goes on at its place and reads nothing of what came before. For that the order is no buffer that
fills while one reads: it is a function of the place.

    epoch     all units (shards, row groups, blocks of lines), in a random order, cut into shares
    share     one of `STREAMS` for each process. Batches come from the shares in turn, so that each process, and each
              of 1, 2, 4 or 8 workers in it, opens units of its own
    window    a few units of a share; their rows are in a random order

One source may be `spread`: each window gets its part of the source's rows. As units of their own, the few rows of a
small source would stand together, between large units.

The order does not depend on the number of workers. In an epoch each row comes once; `weight` of a source decides how
many of its rows come, and those that did not come first in the next epoch.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from .loading import OPEN_BYTES, OPEN_UNITS, Rows


STREAMS = 8  # of each process
WINDOW_UNITS, WINDOW_BYTES = OPEN_UNITS // STREAMS, OPEN_BYTES // STREAMS
ROUNDS = 16  # batches of a share in an epoch; with fewer rows all processes share all units
UNITS, PLACES, PIECES, WINDOW = range(4)  # what a permutation is of, for its seed


class Piece(NamedTuple):
    """A part of a block, in the block's own random order of a pass through its source."""

    block: int
    turn: int  # of the source: how often it was read before
    start: int
    stop: int


class Shuffled:
    """The rows of a run, in their order, as a data set for `TrainingArguments(train_sampling_strategy="sequential")`.

    Args:
        rows ([`Rows`]): with the weights of their sources.
        length (`int`): number of rows that the run reads.
        seed (`int`): of the order.
        batch_size (`int`): rows of a batch of one process.
        processes (`int`): number of processes; batch `i` is for process `i % processes`, as accelerate deals them.
        spread (`int`, *optional*): number of the source whose rows are spread evenly among those of the others.
    """

    def __init__(
        self,
        rows: Rows,
        length: int,
        seed: int = 0,
        batch_size: int = 1,
        processes: int = 1,
        spread: int | None = None,
    ):
        self.rows, self.length, self.seed, self.batch_size, self.spread = rows, length, seed, batch_size, spread
        self.blocks_of: list[list[int]] = [[] for _ in rows.sources]
        for number, block in enumerate(rows.blocks):
            if rows.rows_of(number):
                self.blocks_of[block.source].append(number)
        held = [sum(map(rows.rows_of, blocks)) for blocks in self.blocks_of]
        self.counts = [
            max(1, round(source.weight * count)) if count else 0 for source, count in zip(rows.sources, held)
        ]
        self.epoch_rows = sum(self.counts)
        self._spread_rows = 0 if spread is None else self.counts[spread]
        streams, others = STREAMS * processes, self.epoch_rows - self._spread_rows
        large = self.epoch_rows >= streams * batch_size * ROUNDS and others >= 2 * streams
        self.streams = streams if large else 1
        self._pieces = functools.lru_cache(2)(self._make_pieces)
        self._windows = functools.lru_cache(2 * self.streams)(self._make_windows)
        self._order = functools.lru_cache(2 * self.streams)(self._make_order)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_pieces", "_windows", "_order")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["rows"], state["length"])  # type: ignore[misc]  # makes the caches anew
        self.__dict__.update(state)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, place: int) -> dict[str, Any]:
        if not 0 <= place < self.length:  # what ends a loop over the rows
            raise IndexError(f"Expected a place from 0 to {self.length - 1}, got {place}.")
        return self.rows[self.index(place)]

    def index(self, place: int) -> int:
        """The row at a place of the run."""
        epoch, inside = divmod(place, self.epoch_rows)
        size, streams = self.batch_size, self.streams
        head = -epoch * self.epoch_rows % size  # rows that complete the last batch of the epoch before
        rounds = max(0, self.epoch_rows - head) // (size * streams)
        body = rounds * size * streams
        if head <= inside < head + body:
            turn, batch = (inside - head) // (size * streams), place // size
            return self._at(epoch, batch % streams, turn * size + place % size)
        left = inside if inside < head else inside - body
        for stream in range(streams):  # what is left of each share, one after another
            start, stop = self._share(stream)
            rest = stop - start - rounds * size
            if left < rest:
                return self._at(epoch, stream, rounds * size + left)
            left -= rest
        raise AssertionError("all rows of an epoch are in a share")

    def _share(self, stream: int) -> tuple[int, int]:
        """The places of the epoch, before batches are made, that are of a stream."""
        return self._part(self.epoch_rows, stream)

    def _part(self, count: int, stream: int) -> tuple[int, int]:
        return count * stream // self.streams, count * (stream + 1) // self.streams

    def _at(self, epoch: int, stream: int, position: int) -> int:
        ends, _ = self._windows(epoch, stream)
        window = int(np.searchsorted(ends, position, side="right"))
        first = int(ends[window - 1]) if window else 0
        return int(self._order(epoch, stream, window)[position - first])

    def _make_order(self, epoch: int, stream: int, window: int) -> np.ndarray:
        """The rows of a window, in their order."""
        _, windows = self._windows(epoch, stream)
        rows = np.concatenate([self._rows_of(piece) for piece in windows[window]])
        return rows[self._permutation(len(rows), WINDOW, epoch, stream, window)]

    def _rows_of(self, piece: Piece) -> np.ndarray:
        first = self.rows.first_of(piece.block)
        order = self._permutation(self.rows.rows_of(piece.block), PLACES, piece.turn, piece.block)
        return first + order[piece.start : piece.stop]

    def _make_windows(self, epoch: int, stream: int) -> tuple[np.ndarray, list[list[Piece]]]:
        """The windows of a share, and where each ends in it."""
        windows: list[list[Piece]] = []
        nbytes = 0
        first, last = self._part(self._spread_rows, stream)
        start, stop = self._share(stream)
        for piece in _cut(self._pieces(epoch), start - first, stop - last):
            held = self.rows.blocks[piece.block].unit.nbytes
            if not windows or len(windows[-1]) == WINDOW_UNITS or nbytes + held > WINDOW_BYTES:
                windows.append([])
                nbytes = 0
            windows[-1].append(piece)
            nbytes += held
        ends = np.cumsum([sum(piece.stop - piece.start for piece in window) for window in windows])
        if self.spread is None:
            return ends, windows
        bounds = [first, *(first + (last - first) * int(end) // int(ends[-1]) for end in ends)]
        for window, low, high in zip(windows, bounds, bounds[1:]):
            passed = epoch * self._spread_rows
            window.extend(self._of_source(self.spread, passed + low, passed + high))
        return ends + np.array(bounds[1:]) - first, windows

    def _make_pieces(self, epoch: int) -> list[Piece]:
        """What an epoch reads, in a random order of units, without the source that is spread."""
        pieces = [
            piece
            for source, count in enumerate(self.counts)
            if count and source != self.spread
            for piece in self._of_source(source, epoch * count, (epoch + 1) * count)
        ]
        return [pieces[each] for each in self._permutation(len(pieces), PIECES, epoch)]

    def _of_source(self, source: int, start: int, stop: int) -> Iterator[Piece]:
        """A part of the endless row of passes through a source."""
        blocks = self.blocks_of[source]
        sizes = list(map(self.rows.rows_of, blocks))
        whole = sum(sizes)
        for turn in range(start // whole, -(-stop // whole)):
            order = self._permutation(len(blocks), UNITS, turn, source)
            pieces = [Piece(blocks[each], turn, 0, sizes[each]) for each in order]
            yield from _cut(pieces, start - turn * whole, stop - turn * whole)

    def _permutation(self, size: int, *key: int) -> np.ndarray:
        return np.random.default_rng((self.seed, *key)).permutation(size)


def _cut(pieces: list[Piece], start: int, stop: int) -> Iterator[Piece]:
    """The rows from `start` to `stop` of pieces that lie one behind another."""
    ends = itertools.accumulate(piece.stop - piece.start for piece in pieces)
    for piece, end in zip(pieces, ends):
        first = end - (piece.stop - piece.start)
        low, high = max(start, first), min(stop, end)
        if low < high:
            yield piece._replace(start=piece.start + low - first, stop=piece.start + high - first)
