"""Asks a trained model the held-out questions, and prints which share of its answers is right, by kind of question.

python examples/garments/score.py MODEL HELD_OUT [--limit 400]

An answer is right if all of it is right. Beside the model: the blind model (the same questions without the picture,
which the language model answers as before), the model with the picture of another question, and the most frequent
answer.
"""

import argparse
import json
from pathlib import Path

from transformers import AutoModelForImageTextToText, AutoProcessor

from hf_xattn import load_rows
from hf_xattn.evaluation.answers import Share
from hf_xattn.evaluation.evaluation import ANOTHER, BLIND, FREQUENT, MODEL, Evaluation, by_group, evaluate
from hf_xattn.evaluation.questions import Question, questions_of


COLUMNS = {MODEL: "right", BLIND: "blind", ANOTHER: "another picture", FREQUENT: "most frequent answer"}
VERDICTS = "is there"  # the kind of question that is answered by yes or no at the end


def plain(answer: str) -> str:
    """What counts of an answer: neither case, nor a full stop and spaces around it."""
    return answer.strip().rstrip(".").lower()


def verdict(answer: str) -> str:
    """The last word of an answer: the yes or no of `is there`."""
    return " ".join(plain(answer).split()[-1:])


def read_held_out(folder: Path) -> list[tuple[Question, str]]:
    """The held-out questions, grouped by their kind, each with its phrasing."""
    kinds = [json.loads(line) for line in (folder / "kinds.jsonl").read_text().splitlines()]
    questions = questions_of(load_rows(folder))
    return [(each._replace(group=kind["kind"]), kind["phrasing"]) for each, kind in zip(questions, kinds)]


def shares(found: Evaluation, phrasings: list[str]) -> dict[str, dict[str, Share]]:
    """Shares of right answers to the questions about pictures, by kind and phrasing."""
    table = {}
    for phrasing in sorted(set(phrasings)):
        answers = {
            way: [each for each, own in zip(said, phrasings) if own == phrasing] for way, said in found.answers.items()
        }
        verdicts = by_group(answers, verdict)
        for kind, scores in by_group(answers, plain).items():
            name = f"{kind}, {phrasing} phrasings"
            counts = {f"{name}, whole answer": scores, f"{name}, yes or no alone": verdicts[kind]}
            for line, ways in (counts if kind == VERDICTS else {name: scores}).items():
                table[line] = {way: share.normalised for way, share in ways.items()}
    return dict(sorted(table.items()))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("held_out", type=Path)
    parser.add_argument("--limit", type=int, help="ask only so many questions")
    options = parser.parse_args(arguments)
    model = AutoModelForImageTextToText.from_pretrained(options.model).eval()
    processor = AutoProcessor.from_pretrained(options.model)
    held_out = read_held_out(options.held_out)
    about = [each for each in held_out if each[0].pictures][: options.limit]
    alone = [each for each in held_out if not each[0].pictures][: options.limit]
    found = evaluate(model, processor, [each for each, _ in about + alone], batch_size=16, max_new_tokens=24)
    for question, said in {each.question.group: each for each in reversed(found.answers[MODEL])}.values():
        picture, text = question.messages[-1]["content"]
        print(f"{Path(picture['path']).name}: {text['text']} {said!r}; expected: {question.answer!r}")
    print("| held-out questions | number | " + " | ".join(COLUMNS.values()) + " |")
    print("|---" * (len(COLUMNS) + 2) + "|")
    for name, ways in shares(found, [phrasing for _, phrasing in about]).items():
        cells = [f"{ways[way].value:.0%}" if way in ways else "" for way in COLUMNS]
        print(f"| {name} | {ways[MODEL].of} | " + " | ".join(cells) + " |")
    print(f"questions without a picture, answered as the base answers them: {found.as_base.count} of {len(alone)}")


if __name__ == "__main__":
    main()
