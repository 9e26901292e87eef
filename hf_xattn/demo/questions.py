"""Questions about a canvas of digits, and their answers: eight kinds, each in several phrasings.

An answer is one word or a short sentence, so it is right or wrong as a whole. Where an answer starts, a frozen language
model holds next to nothing of the word that was asked for; it holds it where the word itself stands. So the answer to
"is there" reads the digits, and says for each one if it is that digit: `two no, seven yes`. That compares words, which
a language model can do; the sum names its digits for the same reason. The answer to "where" reads up to the digit, and
says its place, which the block sees where it looks at that moment: `two no, seven top left`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from .canvases import HEIGHT, WIDTH, WORDS, Canvas


ROWS, COLUMNS = ("top", "bottom"), ("left", "middle", "right")
NUMBERS = (*WORDS, "ten", "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen")

PHRASINGS: dict[str, tuple[str, ...]] = {
    "read": (
        "Read the digits from left to right.",
        "Which digits are in the picture?",
        "What does the picture say?",
        "List the digits, left to right.",
        "Read the picture to me.",
        "Tell me every digit you see.",
        "What digits are written here?",
        "Please read out the digits in order.",
        "What are the numbers in this image?",
        "Write down the digits.",
        "Name all digits in order.",
        "Give me the digits from left to right.",
        "Which digits can you see?",
        "What is written in the picture?",
    ),
    "how many": (
        "How many digits are there?",
        "How many digits do you see?",
        "Count the digits.",
        "How many numbers are in the picture?",
        "What is the number of digits?",
        "Count the digits in this picture, please.",
    ),
    "leftmost": (
        "Which digit is leftmost?",
        "What is the first digit from the left?",
        "Which digit stands on the far left?",
        "Name the leftmost digit.",
        "What is the digit at the left end?",
        "Tell me the digit that is furthest to the left.",
        "Start on the left: which digit is it?",
        "What is the digit furthest left?",
        "Say the first digit.",
    ),
    "largest": (
        "Which is the largest digit?",
        "What is the biggest digit?",
        "Which digit is the largest?",
        "Name the largest digit.",
        "Find the highest digit in the picture.",
        "Which of the digits has the largest value?",
        "What is the maximum of the digits?",
        "Which number is the greatest?",
        "Say the highest digit.",
        "Which digit is greater than the others?",
        "What is the highest number you see?",
    ),
    "smallest": (
        "Which is the smallest digit?",
        "What is the least of the digits?",
        "Which digit is the smallest?",
        "Name the smallest digit.",
        "Find the lowest digit in the picture.",
        "Which of the digits has the smallest value?",
        "What is the minimum of the digits?",
        "Which number is the least?",
        "Say the lowest digit.",
        "Which digit is less than the others?",
        "What is the lowest number you see?",
    ),
    "is there": (
        "Is there a {digit}?",
        "Is there a {digit} in the picture?",
        "Do you see a {digit}?",
        "Does the picture show a {digit}?",
        "Can you find a {digit}?",
        "Is a {digit} among the digits?",
        "Is the digit {digit} here?",
        "Is one of the digits a {digit}?",
    ),
    "sum": (
        "What is the sum of the digits?",
        "Add the digits.",
        "What do the two digits add up to?",
        "What is the total of the digits?",
        "Add up both digits.",
        "Sum up the digits, please.",
        "What do you get if you add the digits?",
        "Add the two numbers.",
        "How much do the two digits make?",
        "What is the first digit plus the second?",
        "Give the sum.",
        "Work out the total of both digits.",
    ),
    "where": (
        "Where is the {digit}?",
        "Where do you see the {digit}?",
        "In which part of the picture is the {digit}?",
        "Find the {digit}.",
        "Tell me where the {digit} is.",
        "Where does the {digit} stand?",
        "What is the place of the {digit}?",
        "Locate the {digit}.",
        "At which place is the {digit}?",
        "Tell me the position of the {digit}.",
        "Where can I find the {digit}?",
        "Point out the {digit}.",
        "Could you say where the {digit} is?",
        "Do you know where the {digit} is?",
        "Can you find the place of the {digit}?",
    ),
}

# Training never holds these.
NEW_PHRASINGS: dict[str, tuple[str, ...]] = {
    "read": (
        "What are the digits, from left to right?",
        "Which numbers do you see in the picture?",
        "Say the digits one after another.",
    ),
    "how many": (
        "How many digits does the picture show?",
        "What is the count of digits?",
        "Tell me how many digits there are.",
    ),
    "leftmost": (
        "Which digit comes first on the left?",
        "What digit is at the far left?",
        "Which is the leftmost digit in the picture?",
    ),
    "largest": (
        "Tell me the largest digit.",
        "Which digit is the biggest one?",
        "What is the largest number in the picture?",
    ),
    "smallest": (
        "Tell me the smallest digit.",
        "Which digit is the lowest one?",
        "What is the smallest number in the picture?",
    ),
    "is there": (
        "Does a {digit} appear in the picture?",
        "Can you see a {digit}?",
        "Is there any {digit} here?",
    ),
    "sum": (
        "How much are the digits together?",
        "What is the sum of both digits?",
        "Tell me the total of the two digits.",
    ),
    "where": (
        "Where in the picture is the {digit}?",
        "Can you tell me where the {digit} is?",
        "Show me where the {digit} stands.",
    ),
}
KINDS = tuple(PHRASINGS)


class Question(NamedTuple):
    """A question about a canvas. Right answers: `seven, two`, `two no, seven yes`, `four plus five is nine`."""

    kind: str
    canvas: Canvas
    text: str
    answer: str
    asked: str = ""  # the digit word that the question is about


def ask(
    kind: str,
    pool,
    rng: np.random.Generator,
    phrasings: Mapping[str, Sequence[str]] = PHRASINGS,
    canvas: Canvas | None = None,
) -> Question:
    """Draws a canvas, and a question of a kind that the canvas allows, in one of its `phrasings`.

    A given `canvas` must allow the kind (see [`kinds_of`]). The digit that "is there" asks for is on half of the
    canvases.
    """
    text = phrasings[kind][int(rng.integers(len(phrasings[kind])))]
    if canvas is None:
        canvas = pool.canvas(rng)
        while not _suits(kind, canvas.digits):
            canvas = pool.canvas(rng)
    digits = canvas.digits
    if kind == "is there":
        present = bool(rng.integers(2))
        choices = sorted(set(digits)) if present else [digit for digit in range(10) if digit not in digits]
        digit = choices[rng.integers(len(choices))]
        answer = ", ".join(f"{WORDS[each]} {'yes' if each == digit else 'no'}" for each in digits)
        return Question(kind, canvas, _about(text, digit), answer, WORDS[digit])
    if kind == "where":
        places = [place for place, digit in enumerate(digits) if digits.count(digit) == 1]
        place = places[rng.integers(len(places))]
        word = WORDS[digits[place]]
        read = [f"{WORDS[each]} no" for each in digits[:place]]
        answer = ", ".join([*read, f"{word} {region(*canvas.corners[place])}"])
        return Question(kind, canvas, _about(text, digits[place]), answer, word)
    words = [WORDS[digit] for digit in digits]
    answers = {
        "read": ", ".join(words),
        "how many": NUMBERS[len(digits)],
        "leftmost": words[0],
        "largest": WORDS[max(digits)],
        "smallest": WORDS[min(digits)],
        "sum": f"{' plus '.join(words[:2])} is {NUMBERS[sum(digits[:2])]}",
    }
    return Question(kind, canvas, text, answers[kind])


def kinds_of(canvas: Canvas) -> list[str]:
    """The kinds of question that a canvas allows."""
    return [kind for kind in KINDS if _suits(kind, canvas.digits)]


def ask_about(canvas: Canvas, rng: np.random.Generator) -> Question:
    """Draws a question of any kind that a canvas allows."""
    allowed = kinds_of(canvas)
    return ask(allowed[rng.integers(len(allowed))], None, rng, canvas=canvas)


def chat(turns: Sequence[str], picture: Image.Image | None = None) -> list[dict[str, Any]]:
    """The messages of a user and an assistant, who take turns. The first one begins with the picture."""
    contents: list[list[dict[str, Any]]] = [[{"type": "text", "text": said}] for said in turns]
    if picture is not None:
        contents[0].insert(0, {"type": "image", "image": picture})
    return [{"role": ("user", "assistant")[place % 2], "content": each} for place, each in enumerate(contents)]


def _about(phrasing: str, digit: int) -> str:
    word = WORDS[digit]
    if word == "eight":
        phrasing = phrasing.replace("a {digit}", "an {digit}")
    return phrasing.format(digit=word)


def _suits(kind: str, digits: list[int]) -> bool:
    if kind == "sum":
        return len(digits) == 2
    return kind != "where" or any(digits.count(digit) == 1 for digit in digits)


def region(row: int, column: int) -> str:
    """Names the sixth of the canvas that a digit's upper left corner lies in."""
    return f"{ROWS[len(ROWS) * row // HEIGHT]} {COLUMNS[len(COLUMNS) * column // WIDTH]}"
