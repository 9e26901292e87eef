"""Compares answers, and counts the right ones."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple


NUMBERS = {
    "none": "0",
    "zero": "0",
    "one": "1",
    "two": "2",
    "three": "3",
    "four": "4",
    "five": "5",
    "six": "6",
    "seven": "7",
    "eight": "8",
    "nine": "9",
    "ten": "10",
}
ARTICLES = ("a", "an", "the")
PUNCTUATION = ';/[]"{}()=+\\_-><@`,?!'
# What VQA leaves in a word: Markdown's emphasis, typographic quotes and dots, a colon that is not between two digits.
MARKS = re.compile(r"[*…“”«»]|(?<!\d):|:(?!\d)")
# Of a normal distribution: 95 % of it lie between its negative and it.
QUANTILE = 1.959964


def normalised(answer: str) -> str:
    """An answer as the evaluation of VQA compares it: lower case, numbers as digits, no articles, no punctuation.

    See https://visualqa.org/evaluation.html. Two steps are ours: VQA puts missing apostrophes into contractions, by a
    table, and here apostrophes are taken out; an answer of articles or punctuation alone keeps them, as the choice "A".
    """
    words = _words(answer.lower())
    return " ".join([word for word in words if word not in ARTICLES] or words) or answer.strip()


def _words(answer: str) -> list[str]:
    """The words of an answer, with numbers as digits and without punctuation."""
    text = answer.replace("\n", " ").replace("\t", " ").strip()
    # A mark between two letters separates words; beside a space, or if digits are grouped by commas, it is nothing.
    grouped = re.search(r"\d,\d", text) is not None
    for mark in PUNCTUATION:
        beside_space = f"{mark} " in text or f" {mark}" in text
        text = text.replace(mark, "" if beside_space or grouped else " ")
    text = re.sub(r"\.(?!\d)", "", text).replace("'", "")
    return [NUMBERS.get(word, word) for word in text.split()]


@dataclass(frozen=True)
class Share:
    """How many of some questions."""

    count: int
    of: int

    @property
    def value(self) -> float:
        return self.count / self.of

    @property
    def interval(self) -> tuple[float, float]:
        """Lowest and highest share that 95 % of such samples allow: Wilson's score interval, good for few questions.

        Source: E. B. Wilson, "Probable inference, the law of succession, and statistical inference", 1927.
        """
        square = QUANTILE**2 / self.of
        middle = (self.value + square / 2) / (1 + square)
        spread = QUANTILE * math.sqrt(self.value * (1 - self.value) / self.of + square / (4 * self.of)) / (1 + square)
        return max(0.0, middle - spread), min(1.0, middle + spread)

    def __str__(self) -> str:
        low, high = self.interval
        return f"{self.value:.1%} [{low:.1%}, {high:.1%}]"

    def as_dict(self) -> dict[str, Any]:
        return {"count": self.count, "of": self.of, "share": self.value, "interval": list(self.interval)}


class Scores(NamedTuple):
    exact: Share  # the same characters, but for white space around them
    normalised: Share  # the same by [`normalised`], or by another form
    contained: Share  # the same, or the words of that form stand in the answer, as `paris` in `it is **paris**`

    @classmethod
    def of(cls, said: Sequence[str], expected: Sequence[str], form: Callable[[str], str] | None = None) -> Scores:
        """Compares answers with the expected ones, one by one.

        `form` gives what is equal for equal answers. Default: [`normalised`].
        """
        form = form or normalised
        pairs = list(zip(said, expected, strict=True))
        formed = [(form(one), form(other)) for one, other in pairs]
        contained = [contains(*each) for each in formed]
        if form is normalised:
            contained = [found or _contains_words(*each) for found, each in zip(contained, pairs)]
        return cls(
            Share(sum(one.strip() == other.strip() for one, other in pairs), len(pairs)),
            Share(sum(one == other for one, other in formed), len(pairs)),
            Share(sum(contained), len(pairs)),
        )

    def as_dict(self) -> dict[str, Any]:
        return {name: share.as_dict() for name, share in self._asdict().items()}


def contains(said: str, expected: str) -> bool:
    """Whether the words of the expected answer stand in an answer, side by side. `cat` is not in `category`."""
    return said == expected or (bool(expected) and f" {expected} " in f" {said} ")


def _contains_words(said: str, expected: str) -> bool:
    """The same for answers as they were given: without [`MARKS`], and for the choice "A", which stands in "it is A"."""
    said, expected = (MARKS.sub(" ", each.replace("’", "'")) for each in (said, expected))
    words = _words(expected)
    if not words:
        return False
    if all(word.lower() in ARTICLES for word in words):
        return contains(" ".join(_words(said)), " ".join(words))
    return contains(normalised(said), normalised(expected))
