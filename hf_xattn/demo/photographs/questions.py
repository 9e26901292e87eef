"""Questions about a picture of known things, and their answers."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from .pictures import Placed
from .things import Thing, of_kind


Phrasings = Mapping[str, Sequence[str]]
NUMBERS = ("no", "one", "two", "three", "four")
# What is trained on. With few phrasings the text model, asked in other words, answers as if there were no picture.
PHRASINGS: Phrasings = {
    "name": (
        "What is it?",
        "What is in the picture?",
        "What do you see?",
        "Name the thing in the picture.",
        "What is this?",
        "What does this picture have in it?",
        "Say what this is.",
        "Which thing is it?",
        "What thing do you see here?",
    ),
    "kind": (
        "What kind of thing is it?",
        "Which kind of thing do you see?",
        "What sort of thing is in the picture?",
        "What kind of thing is in the picture?",
        "Say what kind of thing it is.",
        "What sort of thing is it?",
        "Name the kind of thing.",
    ),
    "at side": (
        "What is on the {side}?",
        "What do you see on the {side}?",
        "Name the thing on the {side}.",
        "What is the thing on the {side}?",
        "On the {side}, what is there?",
        "Which thing is on the {side}?",
        "Say what is on the {side}.",
    ),
    "side": (
        "On which side is {the}?",
        "Is {the} on the left or on the right?",
        "Where is {the}, left or right?",
        "Where do you see {the}?",
        "Which side is {the} on?",
        "Say where {the} is.",
        "Left or right: where is {the}?",
    ),
    "how many": (
        "How many things are there?",
        "Count the things.",
        "How many things do you see?",
        "How many are there?",
        "Give the number of things.",
        "How many things are in the picture?",
        "Say how many things you see.",
        "What number of things do you see?",
        "How many things can you count?",
    ),
    "is there": (
        "Is there {a}?",
        "Do you see {a}?",
        "Is {a} in the picture?",
        "Is there {a} here?",
        "Can you see {a}?",
        "Does the picture have {a} in it?",
        "Say whether there is {a}.",
    ),
    "caption": (
        "Describe the picture.",
        "What does the picture show?",
        "Write a caption.",
        "Describe what you see.",
        "Give a caption.",
        "Say what the picture shows.",
        "Tell me what you see.",
    ),
}
# Held out, to measure with while a choice is made. The sealed test has its own.
NEW_PHRASINGS: Phrasings = {
    "name": ("Can you tell me what this is?", "What is shown here?"),
    "kind": ("To which kind of things does it belong?", "What kind of thing is shown?"),
    "at side": ("Tell me what is on the {side}.", "Which thing is on the {side} side?"),
    "side": ("Tell me on which side {the} is.", "Can you find {the}: left or right?"),
    "how many": ("What is the number of things?", "Tell me how many things there are."),
    "is there": ("Can you find {a}?", "Does the picture show {a}?"),
    "caption": ("Tell me about the picture.", "Say in a few words what is there."),
}
SIDES = ("left", "right")


class Question(NamedTuple):
    kind: str
    text: str
    answer: str


def kinds_for(count: int) -> tuple[str, ...]:
    """The kinds of questions that a picture of this many things allows."""
    if count == 1:
        return "name", "kind", "how many", "is there"
    return ("at side", "side", "how many", "is there", "caption") if count == 2 else ("how many", "is there", "caption")


def ask(
    kind: str, placed: Sequence[Placed], phrasings: Phrasings, rng: random.Random, all_things: Sequence[Thing]
) -> Question:
    """A question of a kind about a picture. `all_things`: those that may be asked for and not be there."""
    phrasing, first = rng.choice(phrasings[kind]), placed[0].thing
    if kind == "name":
        return Question(kind, phrasing, _sentence(first.named))
    if kind == "kind":
        return Question(kind, phrasing, _sentence(of_kind(first.kind)))
    if kind == "at side":
        side = rng.choice(SIDES)
        return Question(kind, phrasing.format(side=side), _sentence(placed[SIDES.index(side)].thing.named))
    if kind == "side":
        place = rng.randrange(2)
        thing = placed[place].thing
        return Question(kind, phrasing.format(the=thing.the), _sentence(f"{thing.the} is on the {SIDES[place]}"))
    if kind == "how many":
        return Question(kind, phrasing, _sentence(NUMBERS[len(placed)]))
    if kind == "is there":
        there = {each.thing.name for each in placed}
        if rng.random() < 0.5:
            thing = rng.choice(placed).thing
            return Question(kind, phrasing.format(a=thing.named), f"Yes, there is {thing.named}.")
        thing = rng.choice([each for each in all_things if each.name not in there])
        return Question(kind, phrasing.format(a=thing.named), f"No, there is no {thing.name}.")
    assert kind == "caption"
    return Question(kind, phrasing, _sentence(_listed([each.thing.named for each in placed])))


def _listed(names: Sequence[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def _sentence(words: str) -> str:
    return f"{words[0].upper()}{words[1:]}."
