"""What a [`cached_talk.Talk`] takes away from its cache: text, rows, or all of it."""

from typing import Any

import torch

from helpers.conversations.conversations import Over, Row


class TakesAway:
    """Methods of a `Talk`, which has the attributes."""

    rows: list[Any]
    pending: list[list[int]]

    def crop(self, count: int) -> None:
        self.log.append(f"crop {count}")
        try:
            self.cache.crop(-count)
        except RuntimeError as error:  # transformers' word for a sliding window that has dropped text
            raise Over from error
        for row in self.rows:
            row.crop(count)
        self.pending = [[] for _ in self.rows]
        self.croppable = 0 if self.windowed else self.croppable - count

    def select(self) -> None:
        indices = [self.rng.randrange(len(self.rows)) for _ in range(self.rng.randint(1, 3))]
        self.log.append(f"batch_select_indices {indices}")
        self.cache.batch_select_indices(torch.tensor(indices))
        self._take(indices, 1)

    def reorder(self) -> None:
        """Within the text rows of an image row, as beams do."""
        count = self.repeats
        indices = [index // count * count + self.rng.randrange(count) for index in range(len(self.rows))]
        self.log.append(f"reorder_cache {indices}")
        self.cache.reorder_cache(torch.tensor(indices))
        self._take(indices, count)

    def repeat(self) -> None:
        self.log.append("batch_repeat_interleave 2")
        self.cache.batch_repeat_interleave(2)
        self._take([index for index in range(len(self.rows)) for _ in range(2)], self.repeats * 2)

    def reset(self) -> None:
        self.log.append("reset")
        self.cache.reset()
        self.rows = [Row(self.rule) for _ in self.image_rows]
        self.pending = [[] for _ in self.rows]
        self.repeats, self.own_masks, self.croppable = 1, False, 0

    def _take(self, indices: list[int], repeats: int) -> None:
        self.rows = [self.rows[index].copy() for index in indices]
        self.pending = [list(self.pending[index]) for index in indices]
        self.repeats = repeats
