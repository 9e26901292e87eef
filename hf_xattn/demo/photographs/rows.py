"""Rows of photographs with questions, as `hf-xattn train` and `eval` read them.

Those to train on are chats about new pictures of the trained photographs. Those that are held out are questions in
other words, about new pictures of these and about photographs that are not trained on.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .pictures import Pictures
from .questions import NEW_PHRASINGS, PHRASINGS, Phrasings, Question, ask, kinds_for
from .things import Thing


PICTURES = 3000  # to train on
EACH, OTHERS = 40, 1  # held-out questions of a kind about trained photographs; pictures of each other photograph
COUNTS, SHARES = (1, 2, 3, 4), (0.4, 0.36, 0.12, 0.12)  # things in a picture
QUESTIONS = 4  # of a chat
SHARE_OF_SINGLE = 0.2  # rows of one question
KNOWN, PHOTOGRAPH, DRAWING, NEVER = "trained photographs", "another photograph", "a drawing", "never seen"
OF_EACH = {"name": 1, "kind": 1, "at side": 2, "side": 2, "how many": None, "is there": None, "caption": None}


def train_rows(pictures: Pictures, things: list[Thing], count: int, seed: int) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Pictures with their rows, without the name of the file."""
    known = [thing for thing in things if thing.known]
    for index in range(count):
        rng = random.Random(f"train {seed} {index}")
        picture, placed = pictures.compose(rng, choose(known, rng), trained_ground=True)
        kinds = list(kinds_for(len(placed)))
        if len(kinds) < QUESTIONS:
            kinds.append("is there")
        rng.shuffle(kinds)
        if rng.random() < SHARE_OF_SINGLE:
            question = ask(kinds[0], placed, PHRASINGS, rng, known)
            yield picture, {"question": question.text, "answer": question.answer}
            continue
        messages: list[dict[str, Any]] = []
        for kind in kinds[:QUESTIONS]:
            question = ask(kind, placed, PHRASINGS, rng, known)
            content: Any = [{"type": "text", "text": question.text}] if not messages else question.text
            messages += [{"role": "user", "content": content}, {"role": "assistant", "content": question.answer}]
        yield picture, {"messages": messages}


def choose(things: list[Thing], rng: random.Random) -> list[tuple[Thing, str]]:
    """One to four things, and a trained photograph of each."""
    chosen = rng.sample(things, rng.choices(COUNTS, SHARES)[0])
    return [(thing, rng.choice(thing.trained)) for thing in chosen]


def asked_rows(
    pictures: Pictures, things: list[Thing], name: str, seed: int, phrasings: Phrasings, each: int, others: int
) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Pictures with one question each.

    Args:
        each (`int`): questions of each kind about trained photographs.
        others (`int`): pictures of each photograph that is not trained on.
    """
    known = [thing for thing in things if thing.known]
    for kind, count in OF_EACH.items():
        for index in range(each):
            rng = random.Random(f"{name} {seed} {kind} {index}")
            chosen = rng.sample(known, count or _count_for(kind, rng))
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


def _count_for(kind: str, rng: random.Random) -> int:
    return rng.choice([count for count in COUNTS if kind in kinds_for(count)])


def _row(part: str, question: Question) -> dict[str, Any]:
    return {"question": question.text, "answer": question.answer, "part": part, "kind": f"{part}: {question.kind}"}


def write_rows(folder: Path, rows: Iterator[tuple[Any, dict[str, Any]]]) -> str:
    """Writes a folder as `hf-xattn train` and `eval` read it. Returns the SHA-256 of the lines."""
    folder.mkdir(parents=True)
    lines: list[tuple[str, str]] = []
    last = None
    for number, (picture, row) in enumerate(rows):
        name = f"{number:05}.jpg"
        if picture is last:  # several questions about one
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


def write_training(folder: Path, pictures: Pictures, things: list[Thing], count: int, seed: int) -> None:
    """Writes the rows to train on, about `count` pictures."""
    write_rows(folder, train_rows(pictures, things, count, seed))


def write_held_out(
    folder: Path, pictures: Pictures, things: list[Thing], seed: int, each: int = EACH, others: int = OTHERS
) -> None:
    """Writes the rows to ask about, in words that are not trained. `each` and `others`: as of [`asked_rows`]."""
    write_rows(folder, asked_rows(pictures, things, "held_out", seed, NEW_PHRASINGS, each, others))
