"""Asks a finished demo over a language model the sealed questions about digits: once, at the end.

python examples/digits/sealed_digits.py OUTPUT --open-sealed

OUTPUT is the folder of `hf-xattn demo --language-model ... --output OUTPUT`. The shares of right answers go to the
terminal, and with all answers to OUTPUT/sealed_results.json. A folder that has this file is not asked again.
"""

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForImageTextToText, AutoProcessor

from hf_xattn.demo.canvases import DigitPool, picture_of
from hf_xattn.demo.language_scores import ANSWER_TOKENS, AT_ONCE, most_frequent_by_kind, plain
from hf_xattn.demo.language_training import training_dtype
from hf_xattn.demo.questions import KINDS, NEW_PHRASINGS, PHRASINGS, Question, ask, chat
from hf_xattn.evaluation.evaluation import ANOTHER, BLIND, FREQUENT, MODEL, Evaluation, by_group, evaluate, scores_of
from hf_xattn.evaluation.questions import Question as Asked


sys.path.append(str(Path(__file__).parents[1]))  # where sealed_list.py is
from sealed_list import check_open, check_phrasings, digest_of, read_sealed


SEALED = Path(__file__).with_name("sealed.json")
FIELDS = {"seed": int, "count": int, "phrasings": dict}
RESULTS = "sealed_results.json"


def read_list() -> dict[str, Any]:
    """The list of the test, of which nothing is drawn yet. Raises a `ValueError` if it was changed."""
    fields = read_sealed(SEALED, FIELDS)
    check_phrasings(fields["phrasings"], PHRASINGS, NEW_PHRASINGS)
    return fields


def seed_of(output: Path) -> int:
    """The seed of a finished demo, which decides what digits it was not trained on.

    Raises:
        ValueError: if the folder is not one of a demo over a language model, or was asked before.
    """
    file = output / "results.json"
    results = json.loads(file.read_text()) if file.is_file() else {}
    if "questions of each kind" not in results or not (output / "model").is_dir():
        raise ValueError(
            f"Expected OUTPUT to be the folder of a finished `hf-xattn demo --language-model ...`, got {output}."
        )
    if (output / RESULTS).exists():
        raise ValueError(f"Expected a demo that was not asked before, got {output}, which has {RESULTS}.")
    return results["seed"]


def draw(fields: Mapping[str, Any], seed: int) -> list[Question]:
    """The questions, about canvases of digits that a demo with this seed was not trained on."""
    pool, rng = DigitPool(held_out=True, seed=seed), np.random.default_rng(fields["seed"])
    return [ask(kind, pool, rng, fields["phrasings"]) for kind in KINDS for _ in range(fields["count"])]


def score(model: Any, processor: Any, questions: list[Question]) -> tuple[dict[str, dict[str, Any]], Evaluation]:
    """Shares of right answers by kind of question and way to ask, and the whole evaluation."""
    asked = [Asked(chat([each.text], picture_of(each.canvas)), each.answer, each.kind) for each in questions]
    found = evaluate(model, processor, asked, AT_ONCE, ANSWER_TOKENS)
    kinds = by_group(found.answers, plain)
    kinds["all"] = scores_of(found.answers, plain)
    table = {
        kind: {way: ways[way].normalised.as_dict() for way in (MODEL, BLIND, ANOTHER) if way in ways}
        for kind, ways in kinds.items()
    }
    for kind, share in most_frequent_by_kind(questions).items():
        table[kind][FREQUENT] = {"share": share}
    return table, found


def print_shares(table: dict[str, dict[str, Any]]) -> None:
    columns = (MODEL, BLIND, ANOTHER, FREQUENT)
    print("| sealed questions | number | " + " | ".join(columns) + " |\n" + "|---" * (len(columns) + 2) + "|")
    for kind, ways in table.items():
        cells = [f"{ways[way]['share']:.0%}" if way in ways else "" for way in columns]
        print(f"| {kind} | {ways[MODEL]['of']} | " + " | ".join(cells) + " |")
    low, high = table["all"][MODEL]["interval"]
    print(f"whole answers right: {table['all'][MODEL]['share']:.1%}, 95 % interval {low:.1%} to {high:.1%}")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, help="folder of a finished demo over a language model")
    parser.add_argument("--open-sealed", action="store_true", help="open the sealed test: once, at the end")
    options = parser.parse_args(arguments)
    try:
        check_open(options.open_sealed, "take the figures that the demo prints")
        seed = seed_of(options.output)
        fields = read_list()
        questions = draw(fields, seed)
    except (ValueError, ImportError) as error:
        parser.error(str(error))
    dtype = training_dtype(torch.device("cpu"))
    model = AutoModelForImageTextToText.from_pretrained(options.output / "model", dtype=dtype).eval()
    table, found = score(model, AutoProcessor.from_pretrained(options.output / "model"), questions)
    said = [
        {"kind": asked.kind, "question": asked.text, "expected": asked.answer, "said": each.said}
        for asked, each in zip(questions, found.answers[MODEL])
    ]
    results = {"SHA-256 of the list": digest_of(SEALED), "seed": seed, "shares": table, "answers": said}
    (options.output / RESULTS).write_text(json.dumps(results, indent=2) + "\n")
    print_shares(table)


if __name__ == "__main__":
    main()
