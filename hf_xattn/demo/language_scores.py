"""Measures a language model that has learned to see: answers about held-out canvases, and what became of its text."""

from __future__ import annotations

import re
import time
from collections import Counter
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from ..processing_xattn import XAttnProcessor
from .canvases import WORDS, DigitPool, picture_of
from .questions import KINDS, Question, ask
from .text_prompts import TEST_PROMPTS


AT_ONCE = 50
ANSWER_TOKENS = 32  # generated for an answer about a canvas; the longest right one has 17 in SmolLM2
TEXT_TOKENS = 24  # generated for a question that no picture concerns


def held_out_questions(pool: DigitPool, count: int, new_phrasing: bool, seed: int) -> list[Question]:
    """Draws `count` questions of each kind about canvases of held-out digits."""
    rng = np.random.default_rng((seed, 5, new_phrasing))
    return [ask(kind, pool, rng, new_phrasing) for kind in KINDS for _ in range(count)]


def answers(model, processor: XAttnProcessor, questions: list[Question], see: bool = True) -> list[str]:
    """Generates the answers to questions, greedily, with or without their pictures."""
    pictures = [picture_of(question.canvas) for question in questions] if see else None
    return _generate(model, processor, [question.text for question in questions], pictures, ANSWER_TOKENS)


def accuracy_by_kind(questions: list[Question], said: list[str]) -> dict[str, float]:
    """Returns the share of whole answers that are right, for each kind of question."""
    right: dict[str, list[bool]] = {}
    for question, answer in zip(questions, said):
        right.setdefault(question.kind, []).append(is_right(question, answer))
    return {kind: sum(each) / len(each) for kind, each in right.items()}


def most_frequent_by_kind(questions: list[Question]) -> dict[str, float]:
    """Returns the accuracy of always giving the most frequent answer, with the digit words that the question names, to as many words."""
    shares = {}
    for kind in KINDS:
        forms = Counter(_form(question) for question in questions if question.kind == kind)
        best: dict[int, int] = {}  # for each number of words that the question names
        for form, count in forms.items():
            best[form.count("...")] = max(count, best.get(form.count("..."), 0))
        shares[kind] = sum(best.values()) / forms.total()
    return shares


def is_right(question: Question, answer: str) -> bool:
    """Whether a whole answer is right. Capitals, outer spaces and a last full stop do not count."""
    return _normal(answer) == _normal(question.answer)


def _normal(answer: str) -> str:
    return answer.strip().lower().removesuffix(".")


def _form(question: Question) -> str:
    """The answer without the digit words that the question names."""
    named = WORDS if question.kind == "check" else [question.asked] if question.asked else []
    if not named:
        return question.answer
    return re.sub(rf"\b({'|'.join(named)})\b", "...", question.answer).replace("An ", "A ")


def holds(answer: str, word: str) -> bool:
    """Whether an answer holds a word, as a word: `ice` is not in `juice`."""
    return re.search(rf"\b{re.escape(word)}\b", answer, re.IGNORECASE) is not None


def compare_texts(
    model, base: PreTrainedModel, processor: XAttnProcessor, pool: DigitPool, seed: int
) -> dict[str, Any]:
    """Asks what no picture concerns: the base, the model without a picture, and the model with one in the chat.

    Returns:
        `dict`: counts of the answers that are token for token the base's, of those that hold the right word, and whether the
        logits without a picture are the base's bit for bit.
    """
    prompts = [prompt for prompt, _ in TEST_PROMPTS]
    rng = np.random.default_rng((seed, 6))
    pictures = [picture_of(pool.canvas(rng)) for _ in prompts]
    of_base = _generate(base, processor, prompts, None, TEXT_TOKENS)
    alone = _generate(model, processor, prompts, None, TEXT_TOKENS)
    beside = _generate(model, processor, prompts, pictures, TEXT_TOKENS)

    def right(said: list[str]) -> int:
        return sum(holds(answer, word) for answer, (_, word) in zip(said, TEST_PROMPTS))

    return {
        "text-only questions": len(prompts),
        "answered token for token as the base": sum(map(str.__eq__, alone, of_base)),
        "the same, beside a picture that does not matter": sum(map(str.__eq__, beside, of_base)),
        "right, base": right(of_base),
        "right, with sight": right(alone),
        "right, with sight, beside a picture": right(beside),
        "text-only logits bit-identical": same_logits(model, base, processor),
    }


@torch.no_grad()
def same_logits(model, base: PreTrainedModel, processor: XAttnProcessor) -> bool:
    """Whether the logits of all test questions without a picture are the base's, bit for bit."""
    for start in range(0, len(TEST_PROMPTS), AT_ONCE):
        inputs = _inputs(processor, [prompt for prompt, _ in TEST_PROMPTS[start : start + AT_ONCE]], None)
        inputs = {name: tensor.to(model.device) for name, tensor in inputs.items()}
        if not torch.equal(model(**inputs).logits, base(**inputs).logits):
            return False
    return True


def own_answers(base: PreTrainedModel, processor: XAttnProcessor, prompts: tuple[str, ...]) -> dict[str, str]:
    """The text model's own answers, cut at `TEXT_TOKENS`."""
    return dict(zip(prompts, _generate(base, processor, list(prompts), None, TEXT_TOKENS)))


def images_a_second(model, processor: XAttnProcessor, questions: list[Question]) -> float:
    """How many pictures the model reads a second, in batches, from pixels to the answer."""
    start = time.perf_counter()
    answers(model, processor, questions)
    return len(questions) / (time.perf_counter() - start)


def _generate(
    model, processor: XAttnProcessor, texts: list[str], pictures: list | None, max_new_tokens: int
) -> list[str]:
    said: list[str] = []
    for start in range(0, len(texts), AT_ONCE):
        part = slice(start, start + AT_ONCE)
        inputs = _inputs(processor, texts[part], None if pictures is None else pictures[part]).to(model.device)
        tokens = model.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False)
        said += processor.batch_decode(tokens[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return said


def _inputs(processor: XAttnProcessor, texts: list[str], pictures: list | None):
    chats = [
        [
            {
                "role": "user",
                "content": [
                    *([] if pictures is None else [{"type": "image", "image": pictures[index]}]),
                    {"type": "text", "text": text},
                ],
            }
        ]
        for index, text in enumerate(texts)
    ]
    return processor.apply_chat_template(
        chats, tokenize=True, return_dict=True, add_generation_prompt=True, processor_kwargs={"padding": True}
    )
