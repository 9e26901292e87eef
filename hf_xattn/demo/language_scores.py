"""Measures a language model that has learned to see: answers about held-out canvases, and what became of its text."""

from __future__ import annotations

import re
import time
from collections import Counter
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from ..evaluation.evaluation import Asker, inputs_of
from ..evaluation.questions import Question as Asked
from ..processing_xattn import XAttnProcessor
from .canvases import DigitPool, picture_of
from .questions import KINDS, NEW_PHRASINGS, PHRASINGS, Question, ask, ask_about, chat
from .text_prompts import TEST_PROMPTS


AT_ONCE = 50
ANSWER_TOKENS = 16  # generated for an answer about a canvas; the longest right one has 8 in SmolLM2
TEXT_TOKENS = 24  # generated for a question that no picture concerns


def held_out_questions(pool: DigitPool, count: int, new_phrasing: bool, seed: int) -> list[Question]:
    """Draws `count` questions of each kind about canvases of held-out digits."""
    rng = np.random.default_rng((seed, 5, new_phrasing))
    phrasings = NEW_PHRASINGS if new_phrasing else PHRASINGS
    return [ask(kind, pool, rng, phrasings) for kind in KINDS for _ in range(count)]


def answers(
    model,
    processor: XAttnProcessor,
    questions: list[Question],
    see: bool = True,
    earlier: list[tuple[str, str]] | None = None,
) -> list[str]:
    """Generates the answers to questions, greedily; with `see`, about their pictures.

    `earlier` has, for each one, a question and its answer that come before.
    """
    pictures = [picture_of(question.canvas) for question in questions] if see else None
    tokens = _tokens(model, processor, [question.text for question in questions], pictures, ANSWER_TOKENS, earlier)
    return processor.batch_decode(tokens, skip_special_tokens=True)


def second_right(model, processor: XAttnProcessor, questions: list[Question], seed: int) -> float:
    """Asks every fifth question again, after another one about the same canvas and the model's own answer to it.

    Returns the share of whole answers that are right.
    """
    rng = np.random.default_rng((seed, 8))
    asked = questions[::5]
    first = [ask_about(question.canvas, rng) for question in asked]
    earlier = [(each.text, answer) for each, answer in zip(first, answers(model, processor, first))]
    second = answers(model, processor, asked, earlier=earlier)
    return sum(is_right(question, answer) for question, answer in zip(asked, second)) / len(asked)


def accuracy_by_kind(questions: list[Question], said: list[str]) -> dict[str, float]:
    """Returns the share of whole answers that are right, for each kind of question."""
    right: dict[str, list[bool]] = {}
    for question, answer in zip(questions, said):
        right.setdefault(question.kind, []).append(is_right(question, answer))
    return {kind: sum(each) / len(each) for kind, each in right.items()}


def most_frequent_by_kind(questions: list[Question]) -> dict[str, float]:
    """Returns the accuracy of always giving the most frequent answer, which repeats the digit word of the question."""
    shares = {}
    for kind in KINDS:
        forms = Counter(
            question.answer.replace(question.asked, "...") if question.asked else question.answer
            for question in questions
            if question.kind == kind
        )
        shares[kind] = max(forms.values()) / forms.total()
    return shares


def verdicts_right(questions: list[Question], said: list[str]) -> float:
    """Returns the share of the answers to "is there" that say yes where yes is right, and no where no is."""
    asked = [(question.answer, answer) for question, answer in zip(questions, said) if question.kind == "is there"]
    return sum(holds(right, "yes") == holds(answer, "yes") for right, answer in asked) / len(asked)


def places_right(questions: list[Question], said: list[str]) -> float:
    """Returns the share of the answers to "where" that end with the right place, whatever digits they name."""
    asked = [(question.answer, answer) for question, answer in zip(questions, said) if question.kind == "where"]
    return sum(plain(answer).split()[-2:] == right.split()[-2:] for right, answer in asked) / len(asked)


def is_right(question: Question, answer: str) -> bool:
    """Whether a whole answer is right. Capitals, outer spaces and a last full stop do not count."""
    return plain(answer) == plain(question.answer)


def plain(answer: str) -> str:
    """What counts of an answer."""
    return answer.strip().lower().removesuffix(".")


def holds(answer: str, word: str) -> bool:
    """Whether an answer holds a word, as a word: `ice` is not in `juice`."""
    return re.search(rf"\b{re.escape(word)}\b", answer, re.IGNORECASE) is not None


def compare_texts(
    model, base: PreTrainedModel, processor: XAttnProcessor, pool: DigitPool, seed: int
) -> dict[str, Any]:
    """Asks what no picture concerns: the base, the model without a picture, and the model with one in the chat.

    Returns how many answers are token for token the base's, how many hold the right word, and whether the logits
    without a picture are the base's bit for bit.
    """
    prompts = [prompt for prompt, _ in TEST_PROMPTS]
    rng = np.random.default_rng((seed, 6))
    pictures = [picture_of(pool.canvas(rng)) for _ in prompts]
    of_base = _tokens(base, processor, prompts, None, TEXT_TOKENS)
    alone = _tokens(model, processor, prompts, None, TEXT_TOKENS)
    beside = _tokens(model, processor, prompts, pictures, TEXT_TOKENS)

    def right(tokens: list[list[int]]) -> int:
        said = processor.batch_decode(tokens, skip_special_tokens=True)
        return sum(holds(answer, word) for answer, (_, word) in zip(said, TEST_PROMPTS))

    return {
        "text-only questions": len(prompts),
        "answered token for token as the base": sum(map(list.__eq__, alone, of_base)),
        "the same, beside a picture that does not matter": sum(map(list.__eq__, beside, of_base)),
        "right, base": right(of_base),
        "right, with sight": right(alone),
        "right, with sight, beside a picture": right(beside),
        "text-only logits bit-identical": same_logits(model, base, processor),
    }


@torch.no_grad()
def same_logits(model, base: PreTrainedModel, processor: XAttnProcessor) -> bool:
    """Whether the logits of all test questions without a picture are the base's, bit for bit."""
    for start in range(0, len(TEST_PROMPTS), AT_ONCE):
        prompts = [prompt for prompt, _ in TEST_PROMPTS[start : start + AT_ONCE]]
        inputs = inputs_of(processor, _chats(prompts, None))
        inputs = {name: tensor.to(model.device) for name, tensor in inputs.items()}
        if not torch.equal(model(**inputs).logits, base(**inputs).logits):
            return False
    return True


def own_answers(base: PreTrainedModel, processor: XAttnProcessor, prompts: tuple[str, ...]) -> dict[str, str]:
    """The text model's own answers. A prompt that gets an empty one is left out: it has nothing to train."""
    tokens = _tokens(base, processor, list(prompts), None, TEXT_TOKENS)
    said = zip(prompts, processor.batch_decode(tokens, skip_special_tokens=True))
    return {prompt: answer for prompt, answer in said if answer.strip()}


def images_a_second(model, processor: XAttnProcessor, questions: list[Question]) -> float:
    """In batches, from pixels to the answer."""
    start = time.perf_counter()
    answers(model, processor, questions)
    return len(questions) / (time.perf_counter() - start)


def _tokens(
    model,
    processor: XAttnProcessor,
    texts: list[str],
    pictures: list | None,
    max_new_tokens: int,
    earlier: list[tuple[str, str]] | None = None,
) -> list[list[int]]:
    """The tokens of the answers, without the padding behind the shorter ones."""
    asker = Asker(model, processor, AT_ONCE, max_new_tokens)
    return asker.tokens("Asking", [Asked(each, "") for each in _chats(texts, pictures, earlier)])


def _chats(
    texts: list[str], pictures: list | None, earlier: list[tuple[str, str]] | None = None
) -> list[list[dict[str, Any]]]:
    before = [()] * len(texts) if earlier is None else earlier
    seen = [None] * len(texts) if pictures is None else pictures
    return [chat([*turns, text], picture) for turns, text, picture in zip(before, texts, seen)]
