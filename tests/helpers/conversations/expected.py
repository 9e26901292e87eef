"""What each text token of a conversation may see, decided one token at a time in plain Python.

The expected side of random conversations. It holds the rules a second time, as lists, without caches and without the
code under test: a row is its tokens, its images, and for each token the image tokens that it saw when it was read. One
uncached forward with that as an explicit mask gives the logits that every cached way to read the same text must give.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from helpers.conversations.bank import MARKER, Bank


TOLERANCE = 1e-4
Seen = dict[int, tuple[bool, ...]]  # number of an image -> which of its tokens


@dataclass(frozen=True)
class Image:
    """One image of one row: which picture, how many tokens it has, and what of it is padding."""

    picture: int
    size: int
    real: bool = True
    tokens: tuple[bool, ...] | None = None

    @property
    def visible(self) -> tuple[bool, ...]:
        return tuple(self.real and (self.tokens is None or self.tokens[index]) for index in range(self.size))

    @property
    def content(self) -> tuple[int, int] | None:
        """What a cache compares; None for padding."""
        return (self.picture, self.size) if self.real else None

    def __str__(self) -> str:
        mask = "" if self.tokens is None else ":" + "".join(str(int(token)) for token in self.tokens)
        return (f"p{self.picture}" if self.real else f"(p{self.picture})") + mask


class State(NamedTuple):
    """What the text so far leaves behind for the text that follows.

    Attributes:
        counted: image markers that count.
        before: counted markers before the latest run of adjacent ones.
        in_run: the last token is a counted marker.
        held: what the last row of an explicit mask allows, for the images that it covered.
    """

    counted: int = 0
    before: int = 0
    in_run: bool = False
    held: Seen = {}


@dataclass
class Row:
    """One row of text, of which the first `left` tokens are padding, and its images."""

    rule: str
    left: int = 0
    images: list[Image] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    sees: list[Seen] = field(default_factory=list)
    states: list[State] = field(default_factory=list)
    logits: list[torch.Tensor | None] = field(default_factory=list)

    def copy(self) -> Row:
        lists = (self.images, self.tokens, self.sees, self.states, self.logits)
        return Row(self.rule, self.left, *(list(entries) for entries in lists))

    def unread(self) -> Row:
        """The same images, no text."""
        return Row(self.rule, self.left, list(self.images))

    @property
    def real(self) -> list[tuple[int, int]]:
        """The images that are no padding, by content."""
        return [(image.picture, image.size) for image in self.images if image.real]

    def read(self, token: int, explicit: Seen | None = None) -> None:
        """One more token. `explicit`: the row of the caller's own mask, for the images that it covers."""
        counted, before, in_run, held = self.states[-1] if self.states else State()
        if token == MARKER and counted < len(self.real):
            before = before if in_run else counted
            counted, in_run = counted + 1, True
            held = held if self.rule == "all" else {}
        else:
            in_run = False
        decided = {**held, **(explicit or {})}
        seen: Seen = {}
        order = 0
        for index, image in enumerate(self.images):
            order += image.real
            allowed = decided.get(index, (self._rule(order, counted, before),) * image.size)
            seen[index] = tuple(a and b for a, b in zip(allowed, image.visible))
        self.tokens.append(token)
        self.sees.append(seen)
        self.states.append(State(counted, before, in_run, decided))
        self.logits.append(None)

    def _rule(self, order: int, counted: int, before: int) -> bool:
        if self.rule == "all":
            return True
        if self.rule == "previous":
            return order <= counted
        if self.rule == "latest":
            return order == counted
        return before < order <= counted

    def crop(self, count: int) -> None:
        """Takes the last `count` tokens back."""
        for entries in (self.tokens, self.sees, self.states, self.logits):
            del entries[len(entries) - count :]


def given_again(cached: list[list[Image]], given: list[list[Image]]) -> bool:
    """Whether a call gives all images of a cache again, each in its slot, perhaps with others behind them."""
    contents = [[[image.content for image in images] for images in rows] for rows in (cached, given)]
    return all(there == images[: len(there)] for there, images in zip(*contents))


def mask_of(rows: list[list[Seen]]) -> torch.Tensor:
    """`(batch, text_len, image_tokens)`: what each text token of each row sees."""
    return torch.tensor([[[flag for image in seen.values() for flag in image] for seen in row] for row in rows])


def attention_mask(rows: list[Row], length: int) -> torch.Tensor:
    """`(batch, length)`, zero over the padding of the text."""
    return torch.tensor([[step >= row.left for step in range(length)] for row in rows]).long()


@torch.no_grad()
def reference_logits(bank: Bank, kind: str, rows: list[Row]) -> torch.Tensor:
    """`(batch, text_len, vocab)` of one uncached forward, each token seeing what its row says."""
    inputs = {}
    length = max(sum(image.size for image in row.images) for row in rows)
    if length:
        width = bank.features.shape[-1]
        states = torch.zeros(len(rows), length, width)
        mask = torch.zeros(len(rows), len(rows[0].tokens), length, dtype=torch.bool)
        for states_of_row, mask_of_row, row in zip(states, mask, rows):
            start = 0
            for index, image in enumerate(row.images):
                states_of_row[start : start + image.size] = bank.features_of(kind, image.picture, image.size)
                nothing = (False,) * image.size
                mask_of_row[:, start : start + image.size] = torch.tensor([s.get(index, nothing) for s in row.sees])
                start += image.size
        inputs = {"cross_attention_states": states, "cross_attention_mask": mask}
    if any(row.left for row in rows):
        inputs["attention_mask"] = attention_mask(rows, len(rows[0].tokens))
    return bank.model(torch.tensor([row.tokens for row in rows]), use_cache=False, **inputs).logits


def compare(bank: Bank, kind: str, rows: list[Row]) -> None:
    """Every noted logit against the reference.

    Raises:
        AssertionError: with the rows and tokens that differ, and what they should have seen.
    """
    if not rows[0].tokens:
        return
    expected = reference_logits(bank, kind, rows)
    wrong = []
    for number, row in enumerate(rows):
        for step, logits in enumerate(row.logits):
            if logits is None or step < row.left:
                continue
            wanted = expected[number, step]
            difference = (logits - wanted).abs().max().item() / max(1.0, wanted.abs().max().item())
            if not difference <= TOLERANCE:
                seen = {str(row.images[i]): "".join(str(int(t)) for t in s) for i, s in row.sees[step].items()}
                wrong.append(
                    f"row {number}, token {step} (id {row.tokens[step]}): off by {difference:.1e}, sees {seen}"
                )
    assert not wrong, "logits differ from one uncached forward:\n  " + "\n  ".join(wrong[:6])
