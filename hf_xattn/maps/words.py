"""The words of a text, and the tokens that each was generated as."""

from __future__ import annotations

import os
import re
from typing import Any, NamedTuple


class Word(NamedTuple):
    """A word of a text."""

    text: str  # with its punctuation
    start: int  # where it begins in the text, in characters
    tokens: range


def words_of(ids: list[int], tokenizer: Any) -> list[Word]:
    """Splits a text at white space, and finds the tokens that each word was generated as. Special tokens have no word.

    A token's characters are those that it adds to the text of the tokens before it: some tokenizers write the space
    into the token, some between tokens, and some need several tokens for one character.
    """
    text = tokenizer.decode(ids, skip_special_tokens=True)
    ends: list[int] = []
    for index in range(len(ids)):
        # An incomplete character is decoded as a replacement character. The token that completes it adds it.
        known = tokenizer.decode(ids[: index + 1], skip_special_tokens=True).rstrip("\ufffd")
        ends.append(max(len(os.path.commonprefix([known, text])), ends[-1] if ends else 0))
    special = set(getattr(tokenizer, "all_special_ids", ()))
    words = []
    for match in re.finditer(r"\S+", text):
        before = max((end for end in ends if end <= match.start()), default=0)
        # Tokens that add nothing belong to the character that they begin.
        first = ends.index(before) + 1 if before else 0
        last = next((index for index, end in enumerate(ends) if end >= match.end()), len(ids) - 1)
        while first < last and ids[first] in special:
            first += 1
        words.append(Word(match.group(), match.start(), range(first, last + 1)))
    return words
