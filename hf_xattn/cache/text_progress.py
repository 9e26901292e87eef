"""The progress of the text: what the text in a cache has seen of the images.

Text of a later call needs three things from earlier calls: the number of image markers, the row of a caller's mask
that still applies, and the rows of a caller's mask for text that has not come yet. All three belong to text rows, so
they follow beams, selection and repetition of rows.

A progress never changes. A call makes a new one, and the cache stores it when the call has succeeded. When text is
removed (assisted decoding, a turn that is undone), the history gives the progress at any earlier position.

No dataclass here is frozen, because transformers' exporters set attributes to move the tensors of a cache to the
model's device.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from .image_layout import rows_to
from .pytrees import Unexported, dataclass_node


def count_markers(
    past: torch.Tensor | None, markers: torch.Tensor, total: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Counts image markers in new text, and continues from the counts of earlier text.

    Args:
        past (`torch.LongTensor`, *optional*): `(B, 3)`, the counts after earlier text: the number of counted markers,
            the number of counted markers before the latest run of adjacent markers, and whether the text ends with a
            counted marker.
        markers (`torch.BoolTensor`): `(B, T)`, True where the new text holds a marker.
        total (`torch.LongTensor`, *optional*): `(B or 1, 1)`, number of images. None if every marker has an image.

    Returns:
        Four tensors. The first three are `(B, T)`: the markers that count, the number of markers up to and including
        each token, and the number of markers before the latest run of markers. The fourth is `(B, 3)`: the counts
        after the new text.
    """
    rows, length = markers.shape
    past = markers.new_zeros(rows, 3, dtype=torch.long) if past is None else rows_to(past, rows)
    counts = markers.cumsum(dim=-1) + past[:, :1]
    counted = markers
    if total is not None:
        # A marker without an image, for example a generated one, must not count for an image that comes later.
        counted = markers & (counts <= total)
        counts = torch.minimum(counts, torch.maximum(total, past[:, :1]))
    follows = torch.cat([past[:, 2:] > 0, counted[:, :-1]], dim=-1)
    starts = torch.where(counted & ~follows, counts - 1, past[:, 1:2])
    before_group = starts.cummax(dim=-1).values
    after = torch.stack([counts[:, -1], before_group[:, -1], counted[:, -1].long()], dim=-1) if length else past
    return counted, counts, before_group, after


@dataclass_node
@dataclass(eq=False)
class CallersMask:
    """Rows of a mask that the caller has passed. Image tokens outside of its columns follow `image_visibility`."""

    rows: torch.Tensor  # `(rows, text_len, columns)`, where `rows` divides the batch size
    first: int = 0  # index of the image token in the first column
    # `(B,)`. The last row of a mask applies to later text until the next marker: True where that marker has come.
    over: torch.Tensor | None = None

    @property
    def text_len(self) -> int:
        return self.rows.shape[1]

    def decides(self, text_len: int, num_image_tokens: int) -> bool:
        """Whether the mask covers the next `text_len` text tokens and all image tokens."""
        return self.text_len >= text_len and self.first == 0 and self.rows.shape[2] == num_image_tokens

    def split(self, text_len: int) -> tuple[CallersMask | None, CallersMask | None]:
        """Returns the part for the next `text_len` text tokens, and the rest. The rest is None if it is empty."""
        if self.text_len <= text_len:
            return self, None
        return self.part(0, text_len), self.part(text_len)

    def part(self, first: int, last: int | None = None) -> CallersMask:
        """Returns the rows from `first` to `last`, without `last`."""
        return replace(self, rows=self.rows[:, first:last])

    def copied(self) -> CallersMask:
        return replace(self, rows=self.rows.clone(), over=None if self.over is None else self.over.clone())

    def take(self, indices: torch.Tensor, batch_size: int) -> CallersMask:
        return CallersMask(
            _take_shared(self.rows, indices, batch_size),
            self.first,
            None if self.over is None else _take_shared(self.over, indices, batch_size),
        )


@dataclass(eq=False)
class History(Unexported):
    """Gives the progress at earlier positions of the text."""

    __slots__ = ("counted", "masks", "length")

    counted: torch.Tensor | None  # `(B, length)`, True for markers that count
    masks: tuple[tuple[int, CallersMask], ...]  # the callers' masks, each with the text position of its first row
    length: int  # number of text tokens

    @property
    def is_lost(self) -> bool:
        """Whether the values are missing, because an exported program has continued the text."""
        return not hasattr(self, "length")

    def add(self, counted: torch.Tensor | None, mask: CallersMask | None, text_len: int) -> History:
        """Returns the history after `text_len` more tokens. A lost history stays lost."""
        if self.is_lost:
            return self
        if counted is not None:
            before = self.counted
            if before is None:
                before = counted.new_zeros(counted.shape[0], self.length)
            counted = torch.cat([rows_to(before, counted.shape[0]), counted], dim=1)
        masks = self.masks if mask is None else (*self.masks, (self.length, mask))
        return History(counted, masks, self.length + text_len)

    def until(self, length: int) -> History:
        """Returns the history of the first `length` tokens.

        If the history is shorter, it is extended as if the missing text had neither markers nor masks.
        """
        counted, masks = self.counted, self.masks
        if length >= self.length:
            if counted is not None:
                counted = torch.nn.functional.pad(counted, (0, length - self.length))
            return History(counted, masks, length)
        left = tuple((start, mask.part(0, length - start)) for start, mask in masks if start < length)
        return History(None if counted is None else counted[:, :length], left, length)

    def progress(self) -> TextProgress:
        """Returns the progress at the end of this history."""
        counts = held = None
        if self.counted is not None:
            counts = count_markers(None, self.counted, None)[-1]
        if self.masks:
            start, mask = self.masks[-1]
            held = mask.part(-1)
            if self.counted is not None:
                held = replace(held, over=self.counted[:, start + mask.text_len :].any(dim=-1))
        return TextProgress(counts, held, None, self)

    def take(self, indices: torch.Tensor, batch_size: int) -> History:
        if self.is_lost:
            return self
        masks = tuple((start, mask.take(indices, batch_size)) for start, mask in self.masks)
        counted = None if self.counted is None else _take_shared(self.counted, indices, batch_size)
        return History(counted, masks, self.length)


@dataclass(eq=False)
class TextProgress:
    """What later text needs to know about earlier text."""

    counts: torch.Tensor | None = None  # `(B, 3)`, see [`count_markers`]. None if no call has looked for markers
    held: CallersMask | None = None  # the last row of a caller's mask, which applies until the next marker
    coming: CallersMask | None = None  # rows of a caller's mask for text that will come. `generate` passes them
    history: History | None = None  # None if the text cannot be cropped. Lost if an exported program has continued it

    @property
    def known_history(self) -> History | None:
        """The history. None if the progress at earlier positions is unknown."""
        return None if self.history is None or self.history.is_lost else self.history

    @property
    def is_blank(self) -> bool:
        """Whether the progress is the same at every position, because there were neither markers nor masks.

        The history may then be shorter than the text. [`at`] extends it.
        """
        return self.counts is None and self.held is None and self.coming is None

    def at(self, length: int) -> TextProgress:
        """Returns the progress for a text half of `length` tokens, which `crop` may have shortened."""
        history = self.history
        if history is None or getattr(history, "length", length) == length:  # a lost history has no length
            return self
        earlier = history.until(length).progress()
        return replace(earlier, coming=self.coming if length > history.length else None)

    def copied(self) -> TextProgress:
        """Returns a copy in tensors of its own, without the history."""
        return TextProgress(
            None if self.counts is None else self.counts.clone(),
            None if self.held is None else self.held.copied(),
            None if self.coming is None else self.coming.copied(),
        )

    def after(
        self,
        counts: torch.Tensor | None,
        counted: torch.Tensor | None,
        covered: CallersMask | None,
        coming: CallersMask | None,
        held: CallersMask | None,
        text_len: int,
    ) -> TextProgress:
        """Returns the progress after a call.

        Args:
            counts (`torch.LongTensor`, *optional*): `(B, 3)`, the new counts. None if the call did not look for
                markers: the old counts then stay.
            counted (`torch.BoolTensor`, *optional*): `(B, text_len)`, the markers of the new text that count.
            covered, coming, held ([`CallersMask`], *optional*): the rows of a caller's mask for the new text, for text
                that will come, and the row that still applies.
            text_len (`int`): number of new text tokens.
        """
        history = None if self.history is None else self.history.add(counted, covered, text_len)
        return TextProgress(counts if counts is not None else self.counts, held, coming, history)

    def take(self, indices: torch.Tensor, batch_size: int) -> TextProgress:
        return TextProgress(
            None if self.counts is None else _take_shared(self.counts, indices, batch_size),
            None if self.held is None else self.held.take(indices, batch_size),
            None if self.coming is None else self.coming.take(indices, batch_size),
            None if self.history is None else self.history.take(indices, batch_size),
        )


def _take_shared(tensor: torch.Tensor, indices: torch.Tensor, batch_size: int) -> torch.Tensor:
    """Selects text rows from a tensor with fewer, shared rows. Returns the tensor itself if nothing moves."""
    rows = tensor.shape[0]
    wanted = indices.to(tensor.device) // (batch_size // rows)
    count = wanted.shape[0]
    if rows == 1 and count == batch_size:
        return tensor
    if count == batch_size and rows < batch_size:
        kept = torch.arange(rows, device=tensor.device).repeat_interleave(count // rows)
        if torch.equal(wanted, kept):
            return tensor
    return tensor[wanted]
