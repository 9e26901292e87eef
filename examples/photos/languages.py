"""Rows in German and French, for text models that know these languages.

The package of the photographs has a caption of each of them in these languages, which is the answer here. The four
kinds of questions are those whose answers need no other form of a word than the caption has.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hf_xattn.demo.photographs.pictures import STAMPS, Pictures, Placed, Thing, read_bytes
from hf_xattn.demo.photographs.rows import choose


class Language(NamedTuple):
    """`trained` and `asked`: phrasings by kind of question, to train on and to ask with."""

    trained: dict[str, tuple[str, ...]]
    asked: dict[str, tuple[str, ...]]
    sides: tuple[str, str]
    numbers: tuple[str, ...]
    conjunction: str


LANGUAGES = {
    "de": Language(
        trained={
            "name": ("Was ist das?", "Was ist auf dem Bild?", "Was siehst du?"),
            "at side": ("Was ist {side}?", "Was siehst du {side}?"),
            "how many": ("Wie viele Dinge sind es?", "Wie viele Dinge siehst du?"),
            "caption": ("Beschreibe das Bild.", "Was zeigt das Bild?"),
        },
        asked={
            "name": ("Kannst du mir sagen, was das ist?", "Was ist hier zu sehen?"),
            "at side": ("Sag mir, was {side} ist.", "Welches Ding ist {side}?"),
            "how many": ("Zähle die Dinge.", "Sag mir, wie viele Dinge es sind."),
            "caption": ("Erzähl mir von dem Bild.", "Sag mit wenigen Worten, was da ist."),
        },
        sides=("links", "rechts"),
        numbers=("Eins", "Zwei", "Drei", "Vier"),
        conjunction="und",
    ),
    "fr": Language(
        trained={
            "name": ("Qu'est-ce que c'est ?", "Qu'y a-t-il sur l'image ?", "Que vois-tu ?"),
            "at side": ("Qu'y a-t-il à {side} ?", "Que vois-tu à {side} ?"),
            "how many": ("Combien de choses y a-t-il ?", "Combien de choses vois-tu ?"),
            "caption": ("Décris l'image.", "Que montre l'image ?"),
        },
        asked={
            "name": ("Peux-tu me dire ce que c'est ?", "Que voit-on ici ?"),
            "at side": ("Dis-moi ce qu'il y a à {side}.", "Quelle chose est à {side} ?"),
            "how many": ("Compte les choses.", "Dis-moi combien de choses il y a."),
            "caption": ("Parle-moi de l'image.", "Dis en quelques mots ce qu'il y a."),
        },
        sides=("gauche", "droite"),
        numbers=("Une", "Deux", "Trois", "Quatre"),
        conjunction="et",
    ),
}
ASKED = 20  # held-out questions of a kind


def read_captions(stamps: Path, things: Sequence[Thing], code: str) -> dict[str, str]:
    """The captions of the trained photographs in a language, by file, without the full stop: `Ein Esel`.

    Raises a `ValueError` for a file without such a caption, and as [`read_bytes`].
    """
    names = sorted({f"{file}.txt" for thing in things for file in thing.trained})
    captions = {}
    for name, data in read_bytes(stamps, STAMPS, names).items():
        found = re.search(rf"^{code}\.utf8=([^.!\n]+)", data.decode("utf-8-sig"), re.MULTILINE)
        if found is None:
            raise ValueError(f"Expected {name} of {stamps} to have a caption in the language {code!r}, got none.")
        captions[name.removesuffix(".txt")] = found[1].strip()
    return captions


def train_rows(
    pictures: Pictures, things: Sequence[Thing], captions: dict[str, str], code: str, count: int, seed: int
) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Pictures with a chat of all kinds of questions that each allows."""
    known = [thing for thing in things if thing.known]
    for index in range(count):
        rng = random.Random(f"{code} {seed} {index}")
        picture, placed = pictures.compose(rng, choose(known, rng), trained_ground=True)
        kinds = list(_kinds_for(len(placed)))
        rng.shuffle(kinds)
        messages: list[dict[str, Any]] = []
        for kind in kinds:
            question, answer = _ask(kind, placed, captions, LANGUAGES[code], LANGUAGES[code].trained, rng)
            content: Any = [{"type": "text", "text": question}] if not messages else question
            messages += [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]
        yield picture, {"messages": messages}


def asked_rows(
    pictures: Pictures, things: Sequence[Thing], captions: dict[str, str], code: str, seed: int
) -> Iterator[tuple[Any, dict[str, Any]]]:
    """New pictures of the trained photographs with one question each, in words that are not trained."""
    known = [thing for thing in things if thing.known]
    for kind in LANGUAGES[code].asked:
        for index in range(ASKED):
            rng = random.Random(f"held out {code} {seed} {kind} {index}")
            count = rng.choice([count for count in (1, 2, 3, 4) if kind in _kinds_for(count)])
            chosen = [(thing, rng.choice(thing.trained)) for thing in rng.sample(known, count)]
            picture, placed = pictures.compose(rng, chosen, trained_ground=rng.random() < 0.5)
            question, answer = _ask(kind, placed, captions, LANGUAGES[code], LANGUAGES[code].asked, rng)
            yield picture, {"question": question, "answer": answer, "kind": f"{code}: {kind}"}


def _kinds_for(count: int) -> tuple[str, ...]:
    own = {1: ("name",), 2: ("at side", "caption")}.get(count, ("caption",))
    return (*own, "how many")


def _ask(
    kind: str,
    placed: Sequence[Placed],
    captions: dict[str, str],
    language: Language,
    phrasings: dict[str, tuple[str, ...]],
    rng: random.Random,
) -> tuple[str, str]:
    named = [captions[each.file] for each in placed]
    phrasing = rng.choice(phrasings[kind])
    if kind == "at side":
        side = rng.randrange(2)
        return phrasing.format(side=language.sides[side]), f"{named[side]}."
    if kind == "how many":
        return phrasing, f"{language.numbers[len(placed) - 1]}."
    first, *others = named  # the article of a word that does not stand first is written small
    lower = [first, *(other[0].lower() + other[1:] if re.search("[ ']", other) else other for other in others)]
    listed = f" {language.conjunction} ".join([", ".join(lower[:-1]), lower[-1]] if others else lower)
    return phrasing, f"{listed}."
