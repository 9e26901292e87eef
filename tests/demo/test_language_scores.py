"""Scores of the demo over a language model: what counts as a right answer."""

from collections import Counter

import numpy as np

from hf_xattn.demo.canvases import DigitPool
from hf_xattn.demo.language_scores import (
    accuracy_by_kind,
    holds,
    most_frequent_by_kind,
    places_right,
    verdicts_right,
)
from hf_xattn.demo.questions import KINDS, ask


def test_scores_count_whole_answers():
    """Half-right answers that count, and capitals or a full stop that do not."""
    pool, rng = DigitPool(held_out=True), np.random.default_rng(0)
    questions = [ask("leftmost", pool, rng) for _ in range(4)]
    said = [questions[0].answer, f"{questions[1].answer.capitalize()}.", questions[2].answer + ", one", ""]
    assert accuracy_by_kind(questions, said) == {"leftmost": 0.5}
    asked = [ask(kind, pool, rng) for kind in KINDS for _ in range(10)]
    best = most_frequent_by_kind(asked)
    numbers = Counter(len(question.canvas.digits) for question in asked if question.kind == "how many")
    assert best["how many"] == max(numbers.values()) / 10


def test_a_verdict_counts_alone():
    """A digit misread beside a right yes, that counts as a wrong yes; a no that counts as a yes."""
    pool, rng = DigitPool(held_out=True), np.random.default_rng(0)
    asked = [ask("is there", pool, rng) for _ in range(4)] + [ask("read", pool, rng)]
    verdict = ["yes" if "yes" in question.answer else "no" for question in asked[:4]]
    other = {"yes": "no", "no": "yes"}
    assert verdicts_right(asked, [f"one no, two {each}" for each in verdict] + [""]) == 1
    assert verdicts_right(asked, [f"one no, two {other[each]}" for each in verdict] + [""]) == 0


def test_a_place_counts_alone():
    """A place that is wrong in one of its two words; a right one behind a digit misread."""
    pool, rng = DigitPool(held_out=True), np.random.default_rng(0)
    asked = [ask("where", pool, rng) for _ in range(4)] + [ask("read", pool, rng)]
    places = [question.answer.split()[-2:] for question in asked]
    assert places_right(asked, [f"one no, two {row} {column}." for row, column in places]) == 1
    other = {"top": "bottom", "bottom": "top"}
    assert places_right(asked[:2], [f"two {other[row]} {column}" for row, column in places[:2]]) == 0
    assert places_right(asked[:2], ["", places[1][1]]) == 0


def test_the_most_frequent_answer_knows_the_digits_that_are_asked_for():
    """A baseline that counts `six top left` and `two top left` as two answers: it would look weaker than guessing the
    place.
    """
    pool, rng = DigitPool(held_out=True), np.random.default_rng(0)
    asked = [ask(kind, pool, rng) for kind in KINDS for _ in range(60)]
    best = most_frequent_by_kind(asked)
    rest = (question.answer.split() for question in asked if question.kind == "where")
    places = Counter(" ".join([*words[:-3], *words[-2:]]) for words in rest)  # without the digit that was asked for
    assert best["where"] == max(places.values()) / 60


def test_a_right_word_is_a_whole_word():
    """`ice` found in `juice`: a wrong answer that counts."""
    assert holds("It is called Ice.", "ice") and holds("H2O!", "H2O") and holds("the Sun's light", "Sun")
    assert not holds("It is called juice.", "ice") and not holds("A million animals.", "lion")
