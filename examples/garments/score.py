"""Asks a trained model the held-out questions, and prints which share of its answers is right, by kind of question.

python examples/garments/score.py MODEL HELD_OUT [--limit 400]

An answer is right if all of it is right. Beside the model: the blind model (the same questions without the picture,
which the language model answers as before), the model with the picture of another question, and the most frequent
answer.
"""

import argparse
import json
from collections import Counter
from pathlib import Path

import torch
from transformers import AutoModelForImageTextToText, AutoProcessor

from hf_xattn.evaluation.evaluation import Asker
from hf_xattn.evaluation.questions import Question


TEXT = "without a picture"


def answers(model, processor, chats: list[list[dict]]) -> list[str]:
    """The model's greedy answers."""
    return Asker(model, processor, batch_size=16, max_new_tokens=24)(
        "questions", [Question(each, "") for each in chats]
    )


def chat(row: dict, folder: Path, picture: str | None) -> list[dict]:
    """The user's message of a row, with a picture in place of its own."""
    texts = [part for part in row["messages"][0]["content"] if part["type"] == "text"]
    images = [] if picture is None else [{"type": "image", "path": str(folder / picture)}]
    return [{"role": "user", "content": [*images, *texts]}]


def picture_of(row: dict) -> str | None:
    return next((part["path"] for part in row["messages"][0]["content"] if part["type"] == "image"), None)


def is_right(said: str, answer: str) -> bool:
    """Whether the answers are equal, but for case, a full stop and spaces around them."""
    return _plain(said) == _plain(answer)


def same_verdict(said: str, answer: str) -> bool:
    """Whether the last words of the answers are equal: the yes or no of `is there`."""
    return _plain(said).split()[-1:] == _plain(answer).split()[-1:]


def _plain(answer: str) -> str:
    return answer.strip().rstrip(".").lower()


def read_held_out(folder: Path) -> list[tuple[dict, dict]]:
    """The held-out rows, each with its kind of question and phrasing."""
    rows, kinds = (
        [json.loads(line) for line in (folder / name).read_text().splitlines()]
        for name in ("metadata.jsonl", "kinds.jsonl")
    )
    return list(zip(rows, kinds))


def score(model, processor, folder: Path, limit: int | None) -> dict[str, dict[str, float]]:
    """Shares of right answers, by kind of question and phrasing. Prints an answer of each kind."""
    asked = [(row, kind) for row, kind in read_held_out(folder) if kind["kind"] != TEXT][:limit]
    pictures = [picture_of(row) for row, _ in asked]
    ways = {"right": pictures, "blind": [None] * len(asked), "another picture": _exchanged(pictures, asked)}
    said = {
        way: answers(model, processor, [chat(row, folder, name) for (row, _), name in zip(asked, names)])
        for way, names in ways.items()
    }
    expected = [row["messages"][1]["content"] for row, _ in asked]
    table = {}
    for kind, phrasing in sorted({(kind["kind"], kind["phrasing"]) for _, kind in asked}):
        chosen = [index for index, (_, each) in enumerate(asked) if each == {"kind": kind, "phrasing": phrasing}]
        first = chosen[0]
        question = asked[first][0]["messages"][0]["content"][-1]["text"]
        print(f"{pictures[first]}: {question} {said['right'][first]!r}; expected: {expected[first]!r}")
        counts = {"whole answer": (is_right, expected)}
        if kind == "is there":
            counts["yes or no alone"] = (same_verdict, [answer.split()[-1] for answer in expected])
        for name, (right, wanted) in counts.items():
            frequent = Counter(wanted[index] for index in chosen).most_common(1)[0][1]
            table[f"{kind}, {phrasing} phrasings" + (f", {name}" if len(counts) > 1 else "")] = {
                "questions": len(chosen),
                **{way: sum(right(said[way][i], wanted[i]) for i in chosen) / len(chosen) for way in ways},
                "most frequent answer": frequent / len(chosen),
            }
    return table


def _exchanged(pictures: list[str], asked: list[tuple[dict, dict]]) -> list[str | None]:
    """For each question, the picture of another question of its kind; where that is its own, of any question."""
    others: list[str | None] = list(pictures)
    for kind in {each["kind"] for _, each in asked}:
        places = [index for index, (_, each) in enumerate(asked) if each["kind"] == kind]
        for index, place in enumerate(places):
            order = [*places[index + 1 :], *places[:index], *range(len(pictures))]
            others[place] = next((pictures[other] for other in order if pictures[other] != pictures[place]), None)
    return others


def same_without_picture(model, processor, folder: Path, limit: int | None) -> tuple[int, int]:
    """How many questions without a picture the model answers as its base does, and how many were asked."""
    chats = [chat(row, folder, None) for row, kind in read_held_out(folder) if kind["kind"] == TEXT][:limit]
    said = answers(model, processor, chats)
    model.set_cross_attention(None)  # the base alone
    base = answers(model, processor, chats)
    model.set_cross_attention("default")
    return sum(one == other for one, other in zip(said, base)), len(chats)


@torch.no_grad()
def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("held_out", type=Path)
    parser.add_argument("--limit", type=int, help="ask only so many questions")
    options = parser.parse_args(arguments)
    model = AutoModelForImageTextToText.from_pretrained(options.model).eval()
    processor = AutoProcessor.from_pretrained(options.model)
    table = score(model, processor, options.held_out, options.limit)
    print("| held-out questions | number | right | blind | another picture | most frequent answer |")
    print("|---|---|---|---|---|---|")
    for name, shares in table.items():
        number = shares.pop("questions")
        print(f"| {name} | {number} | " + " | ".join(f"{share:.0%}" for share in shares.values()) + " |")
    same, count = same_without_picture(model, processor, options.held_out, options.limit)
    print(f"questions without a picture, answered as the base answers them: {same} of {count}")


if __name__ == "__main__":
    main()
