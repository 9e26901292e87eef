"""Asks a trained model the held-out questions, and prints which share of its answers is right, by kind of question.

python examples/garments/score.py MODEL HELD_OUT [--limit 400]

An answer is right if all of it is right. Beside the model: the blind model (the same questions without the picture, which the language
model answers as before), the model with the picture of another question, and the most frequent answer.
"""

import argparse
import json
from collections import Counter
from pathlib import Path

import torch
from transformers import AutoModelForImageTextToText, AutoProcessor

import hf_xattn  # noqa: F401  # registers the model with the Auto classes


BATCH = 16
TEXT = "without a picture"


def answers(model, processor, chats: list[list[dict]]) -> list[str]:
    """The model's greedy answers."""
    said = []
    for start in range(0, len(chats), BATCH):
        inputs = processor.apply_chat_template(
            chats[start : start + BATCH],
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
            processor_kwargs={"padding": True},
        )
        tokens = model.generate(**inputs, max_new_tokens=24, do_sample=False)[:, inputs["input_ids"].shape[1] :]
        said += processor.batch_decode(tokens, skip_special_tokens=True)
    return said


def chat(row: dict, folder: Path, picture: str | None) -> list[dict]:
    """The user's message of a row, with a picture in place of its own."""
    texts = [part for part in row["messages"][0]["content"] if part["type"] == "text"]
    images = [] if picture is None else [{"type": "image", "path": str(folder / picture)}]
    return [{"role": "user", "content": [*images, *texts]}]


def picture_of(row: dict) -> str | None:
    return next((part["path"] for part in row["messages"][0]["content"] if part["type"] == "image"), None)


def is_right(said: str, answer: str) -> bool:
    """Whether the answers are equal, but for case, a full stop and spaces around them."""
    return said.strip().rstrip(".").lower() == answer.rstrip(".").lower()


def score(model, processor, folder: Path, limit: int | None) -> dict[str, dict[str, float]]:
    """Shares of right answers, by kind of question and phrasing."""
    rows, kinds = (
        [json.loads(line) for line in (folder / name).read_text().splitlines()]
        for name in ("metadata.jsonl", "kinds.jsonl")
    )
    asked = [(row, kind) for row, kind in zip(rows, kinds) if kind["kind"] != TEXT][:limit]
    pictures = [picture_of(row) for row, _ in asked]
    ways = {"right": pictures, "blind": [None] * len(asked), "another picture": _exchanged(pictures, asked)}
    said = {
        way: answers(model, processor, [chat(row, folder, name) for (row, _), name in zip(asked, names)])
        for way, names in ways.items()
    }
    table = {}
    for kind, phrasing in sorted({(kind["kind"], kind["phrasing"]) for _, kind in asked}):
        chosen = [index for index, (_, each) in enumerate(asked) if each == {"kind": kind, "phrasing": phrasing}]
        expected = {index: asked[index][0]["messages"][1]["content"] for index in chosen}
        table[f"{kind}, {phrasing} phrasings"] = {
            "questions": len(chosen),
            **{way: sum(is_right(said[way][i], expected[i]) for i in chosen) / len(chosen) for way in ways},
            "most frequent answer": Counter(expected.values()).most_common(1)[0][1] / len(chosen),
        }
    return table


def _exchanged(pictures: list[str], asked: list[tuple[dict, dict]]) -> list[str]:
    """For each question, the picture of another question of its kind."""
    others = list(pictures)
    for kind in {each["kind"] for _, each in asked}:
        places = [index for index, (_, each) in enumerate(asked) if each["kind"] == kind]
        for place, other in zip(places, [*places[1:], places[0]]):
            others[place] = pictures[other]
    return others


def same_without_picture(model, processor, folder: Path, limit: int | None) -> tuple[int, int]:
    """How many questions without a picture the model answers as its base does, and how many were asked."""
    rows, kinds = (
        [json.loads(line) for line in (folder / name).read_text().splitlines()]
        for name in ("metadata.jsonl", "kinds.jsonl")
    )
    chats = [chat(row, folder, None) for row, kind in zip(rows, kinds) if kind["kind"] == TEXT][:limit]
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
