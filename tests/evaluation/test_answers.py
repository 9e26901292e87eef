"""How answers are compared and counted."""

import math

import pytest

from hf_xattn.evaluation.answers import QUANTILE, Scores, Share, normalised


@pytest.mark.parametrize(
    "one, other",
    [
        ("Yes.", "yes"),
        ("two dogs", "2 dogs"),
        ("the red car", "red car"),
        ("a cat, and a dog", "cat and dog"),
        ("10,000", "10000"),
        ("dont know", "don't know"),
        ("black-white", "black white"),
        ("What\nis it?", "what is it"),
    ],
)
def test_equal_for_vqa(one, other):
    """An answer that VQA's evaluation counts as right."""
    assert normalised(one) == normalised(other)


@pytest.mark.parametrize(
    "one, other",
    [
        ("3.5", "35"),
        (".5", "5"),
        ("cat", "cats"),
        ("1", "11"),
        ("left", "right"),
        ("no", "none"),
        ("-", "+"),
        ("", "?"),
    ],
)
def test_normalisation_keeps_different_answers_apart(one, other):
    """Normalisation that takes away what an answer says."""
    assert normalised(one) != normalised(other)


@pytest.mark.parametrize("count, of", [(0, 5), (5, 5), (1, 3), (70, 100), (999, 1000)])
def test_the_interval_ends_at_its_quantile(count, of):
    """Ends of the interval: the shares from which the measured one is `QUANTILE` standard deviations away."""
    share = Share(count, of)
    for end in share.interval:
        if end not in (0.0, 1.0):
            assert abs(share.value - end) == pytest.approx(QUANTILE * math.sqrt(end * (1 - end) / of))
    low, high = share.interval
    assert 0 <= low <= share.value <= high <= 1 and low < high


def test_scores_count_exact_normalised_and_contained_answers():
    """An answer that is right only without its full stop, in a sentence, or in a part of a word; lists of different
    lengths.
    """
    scores = Scores.of(
        ["Two.", " red ", "blue", "It is New\nYork.", "a category"], ["2", "red", "green", "New York", "cat"]
    )
    assert [share.count for share in scores] == [1, 2, 3] and {share.of for share in scores} == {5}
    articles = Scores.of(["a word", "The.", "York, new"], ["the", "the", "New York"])
    assert [share.count for share in articles] == [0, 1, 1]
    with pytest.raises(ValueError, match="argument 2"):
        Scores.of(["a"], ["a", "b"])


def test_marks_around_the_words():
    """A right answer that is missed for the Markdown, the colon or the quotes that a chat model writes around it."""
    said = ["It is **Paris**.", "Paris: the capital", "It is “Paris”…", "*Paris*", "**Par**is", "Comparison: none"]
    assert [Scores.of([each], ["Paris"]).contained.count for each in said] == [1, 1, 1, 1, 0, 0]
    others = {("**Three** dogs", "3"): 1, ("at 3:45", "3:45"): 1, ("at 3:45", "3"): 0, ("it is **A**", "A"): 1}
    others |= {("I don’t know", "I don't know"): 1, (":", "*"): 0, ("*", "*"): 1}
    assert {pair: Scores.of([pair[0]], [pair[1]]).contained.count for pair in others} == others
    assert Scores.of(["**Paris**"], ["Paris"]).normalised.count == 0  # as VQA compares


@pytest.mark.parametrize("choice", ["A", "B"])
def test_choices_are_scored_alike(choice):
    """The choice "A" taken for an article: equal to no answer at all, and found in none."""
    said = [choice, f"{choice}.", choice.lower(), f"It is {choice}.", f"{choice}) red", "It is a cat.", "", ".", "The"]
    found = [Scores.of([each], [choice]) for each in said]
    assert [scores.normalised.count for scores in found] == [1, 1, 1, 0, 0, 0, 0, 0, 0]
    assert [scores.contained.count for scores in found] == [1, 1, 1, 1, 1, 0, 0, 0, 0]
