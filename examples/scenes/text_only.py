"""Questions without a picture, which a small language model answers before any training.

Their answers are plainly right. Blocks leave text without a picture alone, so such rows change nothing as long as the
text model is frozen. If it trains, they keep its text ability (`examples/training`).
"""

import random

from drawing import Asked
from words import CAPITALS, DAYS, ITEMS, NOUNS, OPPOSITES


def ask_without_picture(rng: random.Random) -> Asked:
    kind = rng.choice(("capital", "opposite", "sum", "day", "letters"))
    if kind == "capital":
        country = rng.choice(tuple(CAPITALS))
        words, answer = {"country": country}, CAPITALS[country]
    elif kind == "opposite":
        pair = rng.choice(tuple(OPPOSITES.items()))
        word, answer = rng.sample(pair, 2)
        words = {"word": word}
    elif kind == "sum":
        one, other = rng.randint(1, 10), rng.randint(1, 10)
        words, answer = {"a": str(one), "b": str(other)}, str(one + other)
    elif kind == "day":
        day = rng.randrange(len(DAYS))
        words, answer = {"day": DAYS[day]}, DAYS[(day + 1) % len(DAYS)]
    else:
        word = rng.choice(NOUNS + ITEMS)
        words, answer = {"word": word}, word.upper()
    return Asked(f"text {kind}", words, answer)
