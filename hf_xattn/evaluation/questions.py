"""Makes questions of the rows of a data set: one for each answer of the assistant, with the messages before it."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any, NamedTuple

from ..data.rows import image_parts, in_front, read_row, text_of
from ..processing.chat_messages import IMAGES, VIDEOS, parts_of


Messages = list[dict[str, Any]]


class Question(NamedTuple):
    """A question with its expected answer."""

    messages: Messages  # the messages in front of the answer, whose parts hold the images
    answer: str
    group: str | None = None  # for example its kind; shares are also counted for each group

    @property
    def pictures(self) -> list[dict[str, Any]]:
        """The parts of the messages that are images."""
        return image_parts(self.messages)

    def with_pictures(self, pictures: Sequence[dict[str, Any]]) -> Question:
        """Returns the same question about other images: as many as it has, or none."""
        left = iter(pictures)
        messages = []
        for message in self.messages:
            if parts := parts_of(message):
                kept = [part if part.get("type") not in IMAGES else next(left, None) for part in parts]
                message = {**message, "content": [part for part in kept if part is not None]}
            messages.append(message)
        return self._replace(messages=messages)

    def beside(self, picture: dict[str, Any]) -> Question:
        """Returns the same question with an image in front of the text of the first user message.

        Raises a `ValueError` if there is no user message in front of the answer.
        """
        return self._replace(messages=in_front(self.messages, [picture]))


def questions_of(rows: Iterable[Any], by: str | None = None) -> list[Question]:
    """Returns the questions of rows.

    Args:
        rows (`Iterable`): rows as for [`XAttnDataCollator`].
        by (`str`, *optional*): the column that names the group of a question. A row may lack it.

    Raises:
        ValueError: for a row without an answer, or with a video.
        TypeError, ValueError: for a row that [`read_row`] cannot read.

    Example:

    ```python
    >>> import hf_xattn

    >>> rows = [{"messages": [{"role": "user", "content": "which colour ?"}, {"role": "assistant", "content": "red"}]}]
    >>> (question,) = hf_xattn.questions_of(rows)
    >>> question.answer
    'red'
    ```
    """
    questions = []
    for number, row in enumerate(rows):
        messages, answers = read_row(row)
        if not answers:
            raise ValueError(f"Expected row {number} to have an answer of the assistant, got none.")
        if any(part.get("type") in VIDEOS for message in messages for part in parts_of(message)):
            raise ValueError(f"Expected row {number} to have no video, got one. Give its frames as images.")
        group = None if by is None or row.get(by) is None else str(row[by])
        questions += [Question(messages[:index], text_of(messages[index]), group) for index in answers]
    return questions


def other_pictures(
    questions: Sequence[Question], content_of: Callable[[dict[str, Any]], Any]
) -> list[list[dict[str, Any]] | None]:
    """Finds for each question the images of the next question with equally many, but different images.

    Questions of the same group are preferred. The entry is None if there is no such question.

    Args:
        questions (`Sequence[Question]`): the questions.
        content_of (`Callable`): maps an image part to a value that is equal for equal images.
    """
    contents = [[content_of(part) for part in question.pictures] for question in questions]
    found: list[list[dict[str, Any]] | None] = []
    for index, own in enumerate(contents):
        following = [*range(index + 1, len(contents)), *range(index)]
        same = (each for each in following if questions[each].group == questions[index].group)
        asked = (each for each in chain(same, following) if len(contents[each]) == len(own))
        other = next((each for each in asked if all(map(operator.ne, contents[each], own))), None)
        found.append(None if other is None else questions[other].pictures)
    return found


def beside_pictures(alone: Sequence[Question], about: Sequence[Question]) -> list[Question | None]:
    """Returns the questions `alone`, which have no image, each with an image of one of the questions `about` images.

    The first image of each of these is used in turn. The entry is None for a question without a user message, because
    an image needs one.
    """
    pictures = [each.pictures[0] for each in about]
    return [
        each.beside(pictures[index % len(pictures)]) if any(m["role"] == "user" for m in each.messages) else None
        for index, each in enumerate(alone)
    ]
