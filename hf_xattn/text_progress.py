"""What the text has seen of the images: state of text rows, beside the text's own keys and values.

A call leaves three things behind for the text that follows: how many image markers were counted, which row of a caller's mask still
holds, and which rows of a caller's mask are for text to come. All of them belong to text rows, so they follow beams, selection and
repetition. A progress never changes: a call makes the next one, and the cache takes it over when the call has succeeded.

Where text can be cropped away again (rejected candidates of assisted decoding, a turn that is taken back), the history tells the
progress at any earlier place.

No class here forbids to set an attribute: transformers' exporters bring the tensors of a cache to the model's device that way.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from .image_layout import rows_to
from .pytrees import Unexported, dataclass_node


@dataclass(eq=False)
class MarkerCounts:
    """Image markers of the text so far.

    Attributes:
        state (`torch.LongTensor`): `(B, 3)`: markers counted, those before the latest run of markers, and whether the text ends with
            a counted marker.
    """

    state: torch.Tensor

    @classmethod
    def none(cls, markers: torch.Tensor) -> MarkerCounts:
        """No marker yet, in the rows of `markers`."""
        return cls(torch.zeros(markers.shape[0], 3, dtype=torch.long, device=markers.device))

    def rows_to(self, rows: int) -> MarkerCounts:
        return MarkerCounts(rows_to(self.state, rows))

    def count_on(
        self, markers: torch.Tensor, total: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Counts on, over `(B, T)` more text.

        Args:
            markers (`torch.BoolTensor`): `(B, T)`, where the new text holds a marker.
            total (`torch.LongTensor`, *optional*): `(B or 1, 1)`, number of images; None where `markers` all have one.

        Returns:
            three tensors `(B, T)`: the markers that count, the number of markers up to and with each token, and that of those
            before the latest run of markers.
        """
        counts = markers.cumsum(dim=-1) + self.state[:, :1]
        counted = markers
        if total is not None:
            # An extra marker, as a model may generate, must not take a later image's place.
            counted = markers & (counts <= total)
            counts = torch.minimum(counts, torch.maximum(total, self.state[:, :1]))
        follows = torch.cat([self.state[:, 2:] > 0, counted[:, :-1]], dim=-1)
        starts = torch.where(counted & ~follows, counts - 1, self.state[:, 1:2])
        return counted, counts, starts.cummax(dim=-1).values


@dataclass_node
@dataclass(eq=False)
class CallersMask:
    """Rows of a caller's mask, which decides what text sees.

    Attributes:
        rows (`torch.BoolTensor`): `(rows, text_len, columns)`, with rows that divide the batch.
        first (`int`): the image token of its first column. Image tokens before and after follow `image_visibility`.
        over (`torch.BoolTensor`, *optional*): `(B,)`, of a row that holds on: where a marker has come since.
    """

    rows: torch.Tensor
    first: int = 0
    over: torch.Tensor | None = None

    @property
    def text_len(self) -> int:
        return self.rows.shape[1]

    def decides(self, text_len: int, num_image_tokens: int) -> bool:
        """Whether it covers all of the next `text_len` text tokens and all image tokens."""
        return self.text_len >= text_len and self.first == 0 and self.rows.shape[2] == num_image_tokens

    def split(self, text_len: int) -> tuple[CallersMask | None, CallersMask | None]:
        """The part for the next `text_len` text tokens, and the rest."""
        if self.text_len <= text_len:
            return self, None
        return replace(self, rows=self.rows[:, :text_len]), replace(self, rows=self.rows[:, text_len:])

    def last_row(self) -> CallersMask:
        return replace(self, rows=self.rows[:, -1:])

    def until(self, over: torch.Tensor) -> CallersMask:
        return replace(self, over=over)

    def take(self, indices: torch.Tensor, batch_size: int) -> CallersMask:
        """The text rows `indices` of `batch_size`."""
        return CallersMask(
            _take_shared(self.rows, indices, batch_size),
            self.first,
            None if self.over is None else _take_shared(self.over, indices, batch_size),
        )


class Segment(NamedTuple):
    """Text that was read at once: its end, the image tokens that there were, and the caller's mask for its first tokens."""

    start: int
    stop: int
    num_image_tokens: int
    mask: CallersMask | None


@dataclass(eq=False)
class History(Unexported):
    """What is needed to tell the progress at an earlier place of the text.

    Attributes:
        counted (`torch.BoolTensor`, *optional*): `(B, text so far)`, markers that count.
        segments (`tuple[Segment, ...]`): in the order of the text.
        length (`int`): text so far.
    """

    __slots__ = ("counted", "segments", "length")

    counted: torch.Tensor | None
    segments: tuple[Segment, ...]
    length: int

    @classmethod
    def empty(cls) -> History:
        """Before the first text."""
        return cls(None, (), 0)

    @property
    def is_lost(self) -> bool:
        """Whether an exported program took the text on."""
        return not hasattr(self, "length")

    def add(self, counted: torch.Tensor | None, mask: CallersMask | None, num_tokens: int, text_len: int) -> History:
        segment = Segment(self.length, self.length + text_len, num_tokens, mask)
        segments = self.segments
        last = segments[-1] if segments else None
        if last is not None and mask is None and last.mask is None and last.num_image_tokens == num_tokens:
            segments = (*segments[:-1], last._replace(stop=segment.stop))
        else:
            segments = (*segments, segment)
        if counted is not None:
            before = self.counted
            if before is None:
                before = counted.new_zeros(counted.shape[0], self.length)
            counted = torch.cat([rows_to(before, counted.shape[0]), counted], dim=1)
        return History(counted, segments, segment.stop)

    def until(self, length: int) -> History:
        """Without the text from `length` on; with unknown text up to there, where the text half holds more."""
        if length >= self.length:
            counted = self.counted
            if counted is not None:
                counted = torch.nn.functional.pad(counted, (0, length - self.length))
            return History(counted, self.segments, length)
        segments = []
        for segment in self.segments:
            if segment.start >= length:
                break
            mask = segment.mask
            if mask is not None:
                mask, _ = mask.split(length - segment.start)
            segments.append(segment._replace(stop=min(segment.stop, length), mask=mask))
        counted = None if self.counted is None else self.counted[:, :length]
        return History(counted, tuple(segments), length)

    def progress(self) -> TextProgress:
        """The progress at the end of this history."""
        counts = held = None
        if self.counted is not None:
            counts = MarkerCounts.none(self.counted)
            if self.length:
                counted, seen, before_group = counts.count_on(self.counted, None)
                counts = MarkerCounts(torch.stack([seen[:, -1], before_group[:, -1], counted[:, -1].long()], dim=-1))
        masked = [(segment.start, segment.mask) for segment in self.segments if segment.mask is not None]
        if masked:
            start, mask = masked[-1]
            held = mask.last_row()
            if self.counted is not None:
                held = held.until(self.counted[:, start + mask.text_len :].any(dim=-1))
        return TextProgress(counts, held, None, self)

    def take(self, indices: torch.Tensor, batch_size: int) -> History:
        segments = tuple(
            segment if segment.mask is None else segment._replace(mask=segment.mask.take(indices, batch_size))
            for segment in self.segments
        )
        counted = None if self.counted is None else _take_shared(self.counted, indices, batch_size)
        return History(counted, segments, self.length)


@dataclass(eq=False)
class TextProgress:
    """What text that was read leaves behind for the text that follows.

    Attributes:
        counts ([`MarkerCounts`], *optional*): None where no marker was ever looked for.
        held ([`CallersMask`], *optional*): the last row of a caller's mask, which holds until the next marker.
        coming ([`CallersMask`], *optional*): rows for text to come, from `generate`.
        history ([`History`], *optional*): None where the text cannot be cropped; lost where an exported program took it on.
    """

    counts: MarkerCounts | None = None
    held: CallersMask | None = None
    coming: CallersMask | None = None
    history: History | None = None

    @property
    def known_history(self) -> History | None:
        """The history, where the progress at earlier places can be told."""
        return None if self.history is None or self.history.is_lost else self.history

    @property
    def is_blank(self) -> bool:
        """Whether it is the same at every place of the text: there were neither markers nor masks to remember."""
        return self.counts is None and self.held is None

    def at(self, length: int) -> TextProgress:
        """The progress where the text half of the cache holds `length` tokens, after a crop as well."""
        history = self.history
        if history is None or history.is_lost or history.length == length:
            return self
        earlier = history.until(length).progress()
        return replace(earlier, coming=self.coming if length > history.length else None)

    def with_coming(self, mask: CallersMask | None) -> TextProgress:
        return replace(self, coming=mask)

    def without_history(self) -> TextProgress:
        return replace(self, history=None)

    def after(
        self,
        counts: MarkerCounts | None,
        counted: torch.Tensor | None,
        covered: CallersMask | None,
        coming: CallersMask | None,
        held: CallersMask | None,
        num_image_tokens: int,
        batch_size: int,
        text_len: int,
    ) -> TextProgress:
        """The progress when `text_len` more tokens were read."""
        history = self.history
        if history is not None and not history.is_lost:
            history = history.add(counted, covered, num_image_tokens, text_len)
        return TextProgress(counts if counts is not None else self.counts, held, coming, history)

    def take(self, indices: torch.Tensor, batch_size: int) -> TextProgress:
        """The text rows `indices` of `batch_size`."""
        return TextProgress(
            None if self.counts is None else MarkerCounts(_take_shared(self.counts.state, indices, batch_size)),
            None if self.held is None else self.held.take(indices, batch_size),
            None if self.coming is None else self.coming.take(indices, batch_size),
            self.history if self.history is None or self.history.is_lost else self.history.take(indices, batch_size),
        )


def _take_shared(tensor: torch.Tensor, indices: torch.Tensor, batch_size: int) -> torch.Tensor:
    """Rows for the text rows `indices`, of a tensor whose rows are shared by groups of text rows; itself where nothing moves."""
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
