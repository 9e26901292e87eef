"""Compares answers, and counts the right ones.

A share of right answers is kept with its 95 % interval, because a data set has few questions of each kind.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
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
# Marks that the evaluation of VQA does not remove: emphasis of Markdown, typographic quotes and dots, and a colon that
# is not between two digits.
MARKS = re.compile(r"[*…“”«»]|(?<!\d):|:(?!\d)")
# Quantile of the normal distribution: 95 % of it lie between this number and its negative.
QUANTILE = 1.959964


def normalised(answer: str) -> str:
    """Normalises an answer as VQA does: lower case, numbers as digits, no articles, no punctuation.

    Source: https://visualqa.org/evaluation.html. Two steps differ from it. VQA adds missing apostrophes to
    contractions, and here all apostrophes are removed. An answer that has only articles or punctuation keeps them, such
    as the choice "A".
    """
    words = _words(answer.lower())
    return " ".join([word for word in words if word not in ARTICLES] or words) or answer.strip()


def _words(answer: str) -> list[str]:
    """Returns the words of an answer, with numbers as digits and without punctuation."""
    text = answer.replace("\n", " ").replace("\t", " ").strip()
    # A mark between two letters becomes a space. Next to a space, and if commas group digits, it is removed.
    grouped = re.search(r"\d,\d", text) is not None
    for mark in PUNCTUATION:
        beside_space = f"{mark} " in text or f" {mark}" in text
        text = text.replace(mark, "" if beside_space or grouped else " ")
    text = re.sub(r"\.(?!\d)", "", text).replace("'", "")
    return [NUMBERS.get(word, word) for word in text.split()]


@dataclass(frozen=True)
class Share:
    """A number of questions out of all, such as those that were answered right."""

    count: int
    of: int

    @property
    def value(self) -> float:
        return self.count / self.of

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % interval of the share: Wilson's score interval, which is also good for few questions.

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
    """Shares of right answers, counted in three ways."""

    exact: Share  # the characters are equal, except for white space around them
    normalised: Share  # the answers are equal after [`normalised`]
    contained: Share  # equal, or the expected words stand in the answer, as `paris` in `it is **paris**`

    @classmethod
    def of(cls, said: Sequence[str], expected: Sequence[str]) -> Scores:
        """Compares answers with the expected ones, one by one and in the same order."""
        pairs = list(zip(said, expected, strict=True))
        plain = [(normalised(one), normalised(other)) for one, other in pairs]
        found = [contains(*each) or _contains_words(*whole) for each, whole in zip(plain, pairs)]
        return cls(
            Share(sum(one.strip() == other.strip() for one, other in pairs), len(pairs)),
            Share(sum(one == other for one, other in plain), len(pairs)),
            Share(sum(found), len(pairs)),
        )

    def as_dict(self) -> dict[str, Any]:
        return {name: share.as_dict() for name, share in self._asdict().items()}


def contains(said: str, expected: str) -> bool:
    """Whether the words of the expected answer stand side by side in an answer. `cat` is not in `category`."""
    return said == expected or (bool(expected) and f" {expected} " in f" {said} ")


def _contains_words(said: str, expected: str) -> bool:
    """The same as [`contains`] for answers that are not normalised. [`MARKS`] are removed, and a choice "A" counts."""
    said, expected = (MARKS.sub(" ", each.replace("’", "'")) for each in (said, expected))
    words = _words(expected)
    if not words:
        return False
    if all(word.lower() in ARTICLES for word in words):
        return contains(" ".join(_words(said)), " ".join(words))
    return contains(normalised(said), normalised(expected))
