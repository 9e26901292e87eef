"""What a picture that does not matter does to text ability: questions without a picture, asked beside one.

Without a picture the blocks change nothing, so the model answers as its base. Beside a picture nothing ensures that:
this measures how much of the base's answers is left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .answers import Scores, Share
from .questions import Question, beside_pictures


BESIDE = "text beside a picture"
NO_PICTURE = "the data has no picture"
NO_TEXT = "the data has no question without a picture"
NO_USER = "no question without a picture has a user message, the place of a picture"


@dataclass
class TextBesidePicture:
    """The same questions, answered by the model beside a picture of another row, and by its base without one."""

    as_base: Share  # answered word for word as the base answers without the picture
    model: Scores
    base: Scores
    left_out: int = 0  # questions without a user message, the place of a picture

    def as_dict(self) -> dict[str, Any]:
        return {
            "as_base": self.as_base.as_dict(),
            "model": self.model.as_dict(),
            "base": self.base.as_dict(),
            "left_out": self.left_out,
        }


def ask_beside(
    asker: Any, alone: Sequence[Question], about: Sequence[Question], base: Sequence[str]
) -> TextBesidePicture | str:
    """Asks the questions `alone` beside the pictures of those that are `about` one, or says why that cannot be.

    Args:
        asker ([`Asker`]): asks the model.
        base (`list[str]`): the answers of the base to `alone`.
    """
    if not about:
        return NO_PICTURE
    if not alone:
        return NO_TEXT
    asked = beside_pictures(alone, about)
    pairs = [(question, said) for question, said in zip(asked, base, strict=True) if question is not None]
    if not pairs:
        return NO_USER
    said, without = asker(BESIDE, [question for question, _ in pairs]), [said for _, said in pairs]
    expected = [question.answer for question, _ in pairs]
    same = Share(sum(one == other for one, other in zip(said, without, strict=True)), len(pairs))
    return TextBesidePicture(
        same, Scores.of(said, expected), Scores.of(without, expected), left_out=len(alone) - len(pairs)
    )
