"""The questions of the demo over a language model, and what training must not hold."""

import re

import numpy as np
import pytest

from hf_xattn.demo.canvases import HEIGHT, WIDTH, WORDS, DigitPool
from hf_xattn.demo.questions import KINDS, NEW_PHRASINGS, NUMBERS, PHRASINGS, ask
from hf_xattn.demo.text_prompts import TEST_PROMPTS, TRAINING_PROMPTS


@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_right(kind):
    """An answer about another digit, a place on the wrong side, a question that its canvas does not allow."""
    pool, rng = DigitPool(held_out=False), np.random.default_rng(0)
    seen = set()
    for _ in range(100):
        question = ask(kind, pool, rng, (PHRASINGS, NEW_PHRASINGS)[rng.integers(2)])
        canvas, text = question.canvas, question.text
        seen.add(question.answer)
        named = [word for word in re.findall(r"[a-z]+", text) if word in WORDS][-1:]
        if kind == "is there":
            there = WORDS.index(named[0]) in canvas.digits
            pairs = [pair.split() for pair in question.answer.split(", ")]
            assert [WORDS.index(word) for word, _ in pairs] == canvas.digits
            assert all((verdict == "yes") == (word == named[0]) for word, verdict in pairs)
            assert there == ("yes" in question.answer)
            assert ("an eight" in text) == (named[0] == "eight" and "digit eight" not in text and "any" not in text)
        elif kind == "where":
            row, column = canvas.corners[canvas.digits.index(WORDS.index(named[0]))]
            *others, last = question.answer.split(", ")
            before = [pair.split() for pair in others]
            assert [WORDS.index(word) for word, _ in before] == canvas.digits[: len(before)]
            assert all(verdict == "no" and word != named[0] for word, verdict in before)
            start, vertical, horizontal = last.split()
            assert start == named[0]
            assert (vertical == "bottom") == (row >= HEIGHT // 2)
            assert horizontal == ("left" if column < WIDTH / 3 else "right" if column >= 2 * WIDTH / 3 else "middle")
            assert canvas.digits.count(WORDS.index(named[0])) == 1
        elif kind == "sum":
            assert len(canvas.digits) == 2
            assert question.answer == "{} plus {} is {}".format(
                *[WORDS[digit] for digit in canvas.digits], NUMBERS[sum(canvas.digits)]
            )
        elif kind == "read":
            assert [WORDS.index(word) for word in question.answer.split(", ")] == canvas.digits
        else:
            first = sorted(canvas.digits)
            expected = {
                "how many": len(first),
                "leftmost": canvas.digits[0],
                "largest": first[-1],
                "smallest": first[0],
            }
            assert WORDS.index(question.answer) == expected[kind]
    assert len(seen) > 1


def test_phrasings_and_prompts_for_the_test_are_not_trained_on():
    """A new phrasing that training holds too: the accuracy on new phrasings would then mean nothing."""
    for kind in KINDS:
        assert not set(PHRASINGS[kind]) & set(NEW_PHRASINGS[kind])
    asked = {prompt for prompt, _ in TEST_PROMPTS}
    assert len(asked) == len(TEST_PROMPTS) and not asked & set(TRAINING_PROMPTS)
    assert len(set(TRAINING_PROMPTS)) == len(TRAINING_PROMPTS)
