"""What an alignment reads of rows: pictures, and the words of their texts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from ..data.rows import IMAGE_SOURCES, read_row, text_of
from ..processing.chat_messages import IMAGES, parts_of
from ..processing_xattn import XAttnProcessor
from .word_states import WORD


MOST_WORDS = 4096  # the most frequent ones have a state
PROMPTS = 4  # different beginnings of answers, of which a word's state is the mean


class CannotAlign(ValueError):
    """A model or rows that no alignment suits. A row that is broken is another error."""


class Texts:
    """The words of the rows: those that pictures differ in, with the share of the pictures that have them."""

    def __init__(self, rows: Sequence[Any], processor: XAttnProcessor):
        counts: Counter[str] = Counter()
        self.pictures, self.prompts = 0, list[str]()
        for _, words, asked in grouped(rows):
            self.pictures += 1
            counts.update(words)
            if len(self.prompts) < PROMPTS:
                prompt = rendered(processor, asked, add_generation_prompt=True)
                self.prompts += [prompt] * (prompt not in self.prompts)
        if not self.pictures:
            raise CannotAlign(f"Expected `rows` with pictures and answers or captions, got none in {len(rows)} rows.")
        differing = Counter({word: count for word, count in counts.items() if count < self.pictures})
        self.words = sorted(word for word, _ in differing.most_common(MOST_WORDS))
        self.shares = {word: counts[word] / self.pictures for word in self.words}
        if len(self.words) < 2:
            raise CannotAlign(
                f"Expected `rows` whose texts name what pictures differ in, got {self.pictures} picture(s) whose texts "
                f"differ in {len(self.words)} word(s)."
            )


def rendered(processor: XAttnProcessor, messages: list[dict[str, Any]], where: str = "", **options: Any) -> str:
    """The text of a chat. Raises a `ValueError` if the template refuses it, whatever the template raises."""
    try:
        text: Any = processor.apply_chat_template(messages, tokenize=False, **options)
    except Exception as error:
        place = where or "One of `rows`"
        raise ValueError(f"{place}: expected messages that the chat template takes, got {messages}: {error}") from error
    return text


def grouped(rows: Sequence[Any]) -> Iterator[tuple[list[Any], set[str], list[dict[str, Any]]]]:
    """The pictures of rows that stand together, the words of their answers, and a chat that asks for one."""

    def read() -> Iterator[tuple[list[Any], set[str], list[dict[str, Any]]]]:
        for index in range(len(rows)):
            try:
                conversation = read_row(rows[index])
            except (TypeError, ValueError) as error:
                if hasattr(rows, "where"):  # `Rows` say where the row is
                    raise
                raise type(error)(f"`rows[{index}]`: {error}") from error
            parts = [part for message in conversation.messages for part in parts_of(message) if part["type"] in IMAGES]
            pictures = [next(part[name] for name in IMAGE_SOURCES if name in part) for part in parts]
            said = [text_of(conversation.messages[answer]) for answer in conversation.answers]
            words = set(WORD.findall(" ".join(said)))
            if pictures and words:
                before = conversation.messages[: conversation.answers[0]]
                yield pictures, words, [{"role": each["role"], "content": text_of(each)} for each in before]

    def name(read_one: tuple[list[Any], set[str], Any]) -> list[Any]:
        return [each if isinstance(each, (str, bytes, Path)) else id(each) for each in read_one[0]]

    for _, group in groupby(read(), key=name):
        alike = list(group)
        yield alike[0][0], set().union(*(words for _, words, _ in alike)), alike[0][2]
