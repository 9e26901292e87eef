"""Asks a model questions in several ways. A share of right answers says little alone: what would it be by guessing?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm

from ..data.pictures import digest_of
from ..modeling_xattn import XAttnForConditionalGeneration
from .answers import Scores, Share, normalised
from .questions import Messages, Question, other_pictures


# Tokens of an answer beyond the longest expected one, before it counts as cut.
MARGIN = 8
MODEL, BLIND, ANOTHER = "the model", "without the picture", "with another picture"
FREQUENT = "always the most frequent answer"


@dataclass
class Evaluation:
    """What was measured. A part is empty, or None, if the data has no such questions."""

    ways: dict[str, Scores] = field(default_factory=dict)  # of the questions about pictures
    text: Scores | None = None  # of the questions without a picture
    as_base: Share | None = None  # of these: answered word for word as the base does
    cut: int = 0  # answers of the model that did not end within `max_new_tokens`
    max_new_tokens: int = 0

    def as_dict(self) -> dict[str, Any]:
        return {
            "pictures": {way: scores.as_dict() for way, scores in self.ways.items()},
            "text": None if self.text is None else self.text.as_dict(),
            "as_base": None if self.as_base is None else self.as_base.as_dict(),
            "cut": self.cut,
            "max_new_tokens": self.max_new_tokens,
        }


def evaluate(
    model: XAttnForConditionalGeneration,
    processor: Any,
    questions: Sequence[Question],
    batch_size: int = 8,
    max_new_tokens: int | None = None,
    content_of: Callable[[dict[str, Any]], Any] | None = None,
) -> Evaluation:
    """Asks the questions, and compares the greedy answers with the expected ones.

    Args:
        processor ([`XAttnProcessor`]): renders the chats.
        max_new_tokens (`int`, *optional*): of an answer. Default: of the longest expected one, and 8 more.
        content_of (`Callable`, *optional*): gives what is equal for equal pictures, of a part of a message. Default:
            the content of its file, or the object.

    Raises:
        ValueError: for no questions, or sizes below 1.
    """
    for name, value in (("batch_size", batch_size), ("max_new_tokens", max_new_tokens)):
        if value is not None and value < 1:
            raise ValueError(f"Expected `{name}` to be at least 1, got {value}.")
    if not questions:
        raise ValueError("Expected `questions` to hold one or more, got none.")
    tokenizer = processor.tokenizer
    if max_new_tokens is None:
        longest = max(len(tokenizer(each.answer, add_special_tokens=False)["input_ids"]) for each in questions)
        max_new_tokens = longest + MARGIN
    asked = Asker(model, processor, batch_size, max_new_tokens)
    found = Evaluation(max_new_tokens=max_new_tokens)
    about = [each for each in questions if each.pictures]
    alone = [each for each in questions if not each.pictures]
    if about:
        found.ways[MODEL] = Scores.of(asked(MODEL, about), _answers(about))
        found.cut = asked.cut
        blind = [each.with_pictures([]) for each in about]
        found.ways[BLIND] = Scores.of(asked(BLIND, blind), _answers(about))
        others = zip(about, other_pictures(about, content_of or _content))
        exchanged = [each.with_pictures(pictures) for each, pictures in others if pictures is not None]
        if exchanged:
            found.ways[ANOTHER] = Scores.of(asked(ANOTHER, exchanged), _answers(exchanged))
        frequent = _most_frequent(_answers(about))
        found.ways[FREQUENT] = Scores.of([frequent] * len(about), _answers(about))
    if alone:
        cut = asked.cut
        said = asked("text alone", alone)
        found.cut += asked.cut - cut
        found.text = Scores.of(said, _answers(alone))
        with _base_alone(model):
            base = asked("the base", alone)
        found.as_base = Share(sum(one == other for one, other in zip(said, base)), len(alone))
    return found


class Asker:
    """Gets the greedy answers of a model, and counts those that were cut off.

    Args:
        processor ([`XAttnProcessor`]): renders the chats.
        batch_size (`int`): chats at once.
        max_new_tokens (`int`): of an answer.
    """

    def __init__(self, model: Any, processor: Any, batch_size: int, max_new_tokens: int):
        self.model, self.processor = model, processor
        self.batch_size, self.max_new_tokens = batch_size, max_new_tokens
        self.cut = 0

    @torch.no_grad()
    def __call__(self, title: str, questions: Sequence[Question]) -> list[str]:
        said: list[str] = []
        chats: list[Messages] = [each.messages for each in questions]
        for start in tqdm(range(0, len(chats), self.batch_size), title, leave=False):
            inputs = self.processor.apply_chat_template(
                chats[start : start + self.batch_size],
                add_generation_prompt=True,
                tokenize=True,
                return_dict=True,
                return_tensors="pt",
                processor_kwargs={"padding": True},
            )
            length = inputs["input_ids"].shape[1]
            tokens = self.model.generate(
                **inputs.to(self.model.device), max_new_tokens=self.max_new_tokens, do_sample=False
            )[:, length:]
            self.cut += self._count_cut(tokens)
            said += self.processor.batch_decode(tokens, skip_special_tokens=True)
        return said

    def _count_cut(self, tokens: torch.Tensor) -> int:
        """How many rows have all tokens that they may have, and no end."""
        ends = self.model.generation_config.eos_token_id
        if tokens.shape[1] < self.max_new_tokens or ends is None:
            return 0
        ended = torch.isin(tokens, torch.as_tensor(ends, device=tokens.device)).any(dim=1)
        return int((~ended).sum())


@contextmanager
def _base_alone(model: XAttnForConditionalGeneration):
    active = model.active_cross_attention
    model.set_cross_attention(None)
    try:
        yield
    finally:
        model.set_cross_attention(active)


def _answers(questions: Sequence[Question]) -> list[str]:
    return [each.answer for each in questions]


def _most_frequent(answers: Sequence[str]) -> str:
    """The answer that is right most often, as the data writes it most often."""
    frequent = Counter(map(normalised, answers)).most_common(1)[0][0]
    return Counter(each for each in answers if normalised(each) == frequent).most_common(1)[0][0]


def _content(part: dict[str, Any]) -> Any:
    image = part.get("path", part.get("image"))
    return digest_of(image) if isinstance(image, (str, Path, bytes)) else id(image)
