"""Questions about a picture with one or two things, in several phrasings, and their answers.

Training holds the first list of phrasings of each kind, and never the second.
"""

from typing import NamedTuple

import numpy as np


PHRASINGS = {
    "caption": (
        ("What is in the picture?", "Describe the picture.", "What do you see?"),
        ("What does the picture show?", "Tell me what you see."),
    ),
    "how many": (
        ("How many things are in the picture?", "Count the things.", "How many things do you see?"),
        ("How many things does the picture show?", "Tell me how many things there are."),
    ),
    "what is on that side": (
        ("What is on the {side}?", "Name the thing on the {side}.", "What do you see on the {side}?"),
        ("Which thing is on the {side}?", "Tell me what is on the {side}."),
    ),
    "which of two": (
        (
            "Which one is {thing}, the left or the right one?",
            "Is {thing} on the left or on the right?",
            "Which of the two is {thing}?",
        ),
        ("Which side shows {thing}, left or right?", "Tell me which of the two is {thing}."),
    ),
    "is there": (
        ("Is there {thing}?", "Do you see {thing}?", "Is there {thing} in the picture?"),
        ("Does the picture show {thing}?", "Can you see {thing}?"),
    ),
}
NEEDS_TWO = ("what is on that side", "which of two")
TEXT = "without a picture"
NEW = ", new phrasing"
SIDES = ("left", "right")


class Question(NamedTuple):
    """A question and its answer.

    Attributes:
        kind (`str`): a key of `PHRASINGS`, or `TEXT`; with `NEW` behind it if training never holds the phrasing.
    """

    kind: str
    question: str
    answer: str


def with_article(label: str) -> str:
    return f"{'an' if label[0].lower() in 'aeiou' else 'a'} {label}"


def ask(kind: str, names: list[str], labels: list[str], rng: np.random.Generator, new: bool = False) -> Question:
    """Asks about a picture.

    Args:
        kind (`str`): a key of `PHRASINGS`.
        names (`list[str]`): the things in the picture, from left to right.
        labels (`list[str]`): all labels.
        new (`bool`): in a phrasing that training never holds.
    """
    phrasings = PHRASINGS[kind][int(new)]
    phrasing = phrasings[rng.integers(len(phrasings))]
    seen = " and ".join(with_article(name) for name in names)
    place = int(rng.integers(len(names)))
    thing = with_article(names[place])
    if kind == "caption":
        answer = seen
    elif kind == "how many":
        answer = ("one", "two")[len(names) - 1]
    elif kind == "what is on that side":
        answer = thing
    elif kind == "which of two":
        # What it is about comes first, as in what follows: a frozen language model holds a word where the word stands.
        answer = f"{thing}: {SIDES[place]}"
    else:
        there = rng.random() < 0.5
        if not there:
            absent = [label for label in labels if label not in names]
            thing = with_article(absent[rng.integers(len(absent))])
        # Then the verdict compares words, which a language model can.
        answer = f"{seen}, so {'yes' if there else 'no'}"
    question = phrasing.format(thing=thing, side=SIDES[place])
    return Question(kind + NEW * new, question, f"{answer[0].upper()}{answer[1:]}.")


def ask_without_picture(labels: list[str], rng: np.random.Generator) -> Question:
    thing = with_article(labels[rng.integers(len(labels))])
    return Question(TEXT, f"Write in capital letters: {thing}", thing.upper())
