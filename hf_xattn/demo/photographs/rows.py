"""Writes questions about pictures of known things, as rows that `hf-xattn train` and `hf-xattn eval` read.

The rows to train on are chats about new pictures, composed of the photographs to train on. The held-out rows ask in
other words, about further pictures of these photographs and about photographs that are not trained on.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from .pictures import Pictures, Placed, Thing, of_kind


Phrasings = Mapping[str, Sequence[str]]
NUMBERS = ("no", "one", "two", "three", "four")
SIDES = ("left", "right")
PICTURES = 3000  # number of pictures to train on
EACH = 40  # held-out questions of each kind about photographs that are trained on
OTHERS = 1  # held-out pictures of each photograph that is not trained on
COUNTS, SHARES = (1, 2, 3, 4), (0.4, 0.36, 0.12, 0.12)  # numbers of things in a picture, and how often they occur
QUESTIONS = 4  # number of questions in a chat
SHARE_OF_SINGLE = 0.2  # share of the rows with a single question
SHARE_OF_NUMBER_FIRST = 0.5  # share of the chats that ask for the number first, before another answer tells it
KNOWN, PHOTOGRAPH, DRAWING, NEVER = "trained photographs", "another photograph", "a drawing", "never seen"
OF_EACH = {"name": 1, "kind": 1, "at side": 2, "side": 2, "how many": None, "is there": None, "caption": None}


def _read_phrasings() -> tuple[Phrasings, Phrasings]:
    """Returns the phrasings of each kind of question to train on, and those that are held out."""
    trained, new = {}, {}
    for part in Path(__file__).with_name("phrasings.txt").read_text(encoding="utf-8").split("\n\n"):
        kind, *lines = part.strip().splitlines()
        end = lines.index("NEW")
        trained[kind.strip("[]")], new[kind.strip("[]")] = lines[:end], lines[end + 1 :]
    return trained, new


# A model that is trained on few phrasings answers other phrasings as if there were no picture. `NEW_PHRASINGS` are held
# out, to measure this while choices are made. The sealed test has further ones.
PHRASINGS, NEW_PHRASINGS = _read_phrasings()


class Question(NamedTuple):
    kind: str
    text: str
    answer: str


def kinds_for(count: int) -> tuple[str, ...]:
    """Returns the kinds of questions that a picture with this many things allows."""
    if count == 1:
        return "name", "kind", "how many", "is there"
    return ("at side", "side", "how many", "is there", "caption") if count == 2 else ("how many", "is there", "caption")


def ask(
    kind: str, placed: Sequence[Placed], phrasings: Phrasings, rng: random.Random, all_things: Sequence[Thing]
) -> Question:
    """Returns a question of a kind about a picture.

    `all_things` are the things that "is there" may ask for although they are not in the picture.
    """
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
    *names, last = [each.thing.named for each in placed]
    return Question(kind, phrasing, _sentence(f"{', '.join(names)} and {last}" if names else last))


def _sentence(words: str) -> str:
    return f"{words[0].upper()}{words[1:]}."


def train_rows(pictures: Pictures, things: list[Thing], count: int, seed: int) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yields pictures with their rows, which do not hold the name of the file yet."""
    known = [thing for thing in things if thing.known]
    for index in range(count):
        rng = random.Random(f"train {seed} {index}")
        picture, placed = pictures.compose(rng, choose(known, rng), trained_ground=True)
        kinds = list(kinds_for(len(placed)))
        if len(placed) == 1:  # or the model would name a second thing wherever a question sounds like one for a caption
            kinds.append("caption")
        elif len(kinds) < QUESTIONS:
            kinds.append("is there")
        rng.shuffle(kinds)
        if rng.random() < SHARE_OF_SINGLE:
            question = ask(kinds[0], placed, PHRASINGS, rng, known)
            yield picture, {"question": question.text, "answer": question.answer}
            continue
        if "how many" in kinds and rng.random() < SHARE_OF_NUMBER_FIRST:
            kinds.remove("how many")
            kinds.insert(0, "how many")
        messages: list[dict[str, Any]] = []
        for kind in kinds[:QUESTIONS]:
            question = ask(kind, placed, PHRASINGS, rng, known)
            content: Any = [{"type": "text", "text": question.text}] if not messages else question.text
            messages += [{"role": "user", "content": content}, {"role": "assistant", "content": question.answer}]
        yield picture, {"messages": messages}


def choose(things: list[Thing], rng: random.Random) -> list[tuple[Thing, str]]:
    """Chooses one to four things, and a photograph to train on for each."""
    chosen = rng.sample(things, rng.choices(COUNTS, SHARES)[0])
    return [(thing, rng.choice(thing.trained)) for thing in chosen]


def asked_rows(
    pictures: Pictures, things: list[Thing], name: str, seed: int, phrasings: Phrasings, each: int, others: int
) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yields pictures with one question each.

    Args:
        each (`int`): number of questions of each kind about photographs to train on.
        others (`int`): number of pictures of each photograph that is not trained on.
    """
    known = [thing for thing in things if thing.known]
    for kind, count in OF_EACH.items():
        for index in range(each):
            rng = random.Random(f"{name} {seed} {kind} {index}")
            fitting = [number for number in COUNTS if kind in kinds_for(number)]
            chosen = rng.sample(known, count or rng.choice(fitting))
            files = [(thing, rng.choice(thing.trained)) for thing in chosen]
            picture, placed = pictures.compose(rng, files, trained_ground=rng.random() < 0.5)
            yield picture, _row(KNOWN, ask(kind, placed, phrasings, rng, known))
    for thing in things:
        for file in thing.others:
            for index in range(others):
                rng = random.Random(f"{name} {seed} {file} {index}")
                picture, placed = pictures.compose(rng, [(thing, file)], trained_ground=rng.random() < 0.5)
                part = NEVER if not thing.known else DRAWING if "cartoon" in file else PHOTOGRAPH
                for kind in ("name", "kind") if thing.known else ("kind",):
                    yield picture, _row(part, ask(kind, placed, phrasings, rng, known))


def _row(part: str, question: Question) -> dict[str, Any]:
    return {"question": question.text, "answer": question.answer, "part": part, "kind": f"{part}: {question.kind}"}


def write_rows(folder: Path, rows: Iterator[tuple[Any, dict[str, Any]]]) -> str:
    """Writes a folder that `hf-xattn train` and `hf-xattn eval` read. Returns the SHA-256 of its lines."""
    folder.mkdir(parents=True)
    lines: list[tuple[str, str]] = []
    last = None
    for number, (picture, row) in enumerate(rows):
        name = f"{number:05}.jpg"
        if picture is last:  # another question about the same picture
            name = lines[-1][0]
        else:
            picture.save(folder / name, quality=90)
        last = picture
        if "messages" in row:
            row["messages"][0]["content"].insert(0, {"type": "image", "path": name})
        else:
            row = {"file_name": name, **row}
        lines.append((name, json.dumps(row)))
    text = "\n".join(line for _, line in lines) + "\n"
    (folder / "metadata.jsonl").write_text(text)
    return hashlib.sha256(text.encode()).hexdigest()


def write_held_out(
    folder: Path, pictures: Pictures, things: list[Thing], seed: int, each: int = EACH, others: int = OTHERS
) -> None:
    """Writes the held-out rows, in phrasings that are not trained on. `each` and `others` are as in [`asked_rows`]."""
    write_rows(folder, asked_rows(pictures, things, "held_out", seed, NEW_PHRASINGS, each, others))
