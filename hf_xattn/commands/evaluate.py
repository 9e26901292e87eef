"""`hf-xattn eval`: asks a model the questions of a data set, and counts the right answers."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..data.forms import CAPTION_PROMPT
from .shared import add_data, add_loading, add_model, add_number, check_images, load_model_and_images


if TYPE_CHECKING:
    from ..evaluation.answers import Scores
    from ..evaluation.evaluation import Evaluation
    from ..evaluation.questions import Question
    from ..modeling_xattn import XAttnForConditionalGeneration

# What the table calls the ways to ask whose names have another word (see `evaluation.evaluation.BLIND`).
SHOWN = {"without the picture": "without the image", "with another picture": "with another image"}

EPILOG = """What is measured: each question about images is asked with its own images, with the images of another row,
and without images, to see whether the answers depend on the images. The last line of that table is the share that the
most frequent answer alone would get. The intervals are 95 % confidence intervals (Wilson). Each question without images
is answered by the model and by the text model without blocks, and once more beside an image of another row, which
should change nothing."""


def register_eval(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "eval",
        help="count the right answers to the questions of a data set",
        description="Asks a model the questions of a data set, and prints the share of right answers.",
        usage="%(prog)s MODEL --data SOURCE [options]",
        epilog=EPILOG,
    )
    add_model(parser)
    add_data(parser, "questions that the model was not trained on, in a form of `hf-xattn train --data`")
    add_number(parser, "--limit", None, "ask only the first N questions (default: all)")
    prompt = f"question for images that have only a caption (default: {CAPTION_PROMPT})"
    parser.add_argument("--prompt", metavar="TEXT", help=prompt)
    groups = "also print the shares for each value of this field of the rows, such as a kind of question"
    parser.add_argument("--by", metavar="FIELD", help=groups)
    add_number(parser, "--batch-size", 8, "number of questions that are asked at once")
    longest = "maximum number of tokens in an answer (default: 8 more than the longest expected answer has)"
    add_number(parser, "--max-new-tokens", None, longest)
    answers = "write the question, the expected answer and those of the model to FILE (.jsonl), one question a line"
    parser.add_argument("--answers", metavar="FILE", type=Path, help=answers)
    parser.add_argument("--json", action="store_true", help="print one JSON object in place of the table")
    card = "also write the shares into the model card in the folder MODEL, where the Hub reads them (model-index)"
    parser.add_argument("--card", action="store_true", help=card)
    add_loading(parser)
    parser.set_defaults(run=run_eval, image=None)


def run_eval(arguments: argparse.Namespace) -> None:
    folder = Path(arguments.model)
    if arguments.card:
        from ..evaluation.evaluation import read_card

        read_card(folder)
    if arguments.answers is not None and (arguments.answers.exists() or not arguments.answers.parent.is_dir()):
        raise ValueError(f"Expected `--answers` to be a new file in a folder that exists, got {arguments.answers}.")
    questions = questions_of_data(arguments)
    if arguments.card and not any(each.pictures for each in questions):
        raise ValueError("`--card` writes shares of questions about images, and the data has none. Leave it out.")
    found, *_ = measure(arguments, questions)
    if arguments.answers is not None:
        lines = [json.dumps(each, ensure_ascii=False) for each in found.each_question(questions)]
        arguments.answers.write_text("\n".join(lines) + "\n", encoding="utf-8")
    if arguments.json:
        about: dict[str, Any] = {"model": arguments.model, "data": arguments.data, "questions": len(questions)}
        json.dump({**about, **found.as_dict()}, sys.stdout, indent=2)
        print()
    else:
        print("\n".join(_table(found)))
    if arguments.card:
        from ..evaluation.evaluation import write_results

        data = Path(arguments.data).resolve()
        first = "" if arguments.limit is None else f", first {len(questions)} questions"
        write_results(folder, found, f"{data.parent.name}/{data.name}{first}")


def measure(
    arguments: argparse.Namespace, questions: Sequence[Question]
) -> tuple[Evaluation, XAttnForConditionalGeneration, Any]:
    """Loads the model of the command line and asks it the questions.

    Returns:
        the figures, the model and its processor.
    """
    from ..evaluation.evaluation import evaluate

    model, processor, _ = load_model_and_images(arguments)
    check_images(arguments.model, processor)
    sizes = {"batch_size": arguments.batch_size, "max_new_tokens": arguments.max_new_tokens}
    return evaluate(model, processor, questions, **sizes), model, processor


def questions_of_data(arguments: argparse.Namespace) -> list[Question]:
    """Returns the questions of `--data`, at most `--limit`.

    Raises:
        ValueError: for rows that cannot be used, which the message lists; for a `--prompt` without any caption, and for
            a `--by` that no row has.
    """
    from ..data.loading import load_rows_once
    from ..evaluation.questions import questions_of
    from ..training.bad_rows import check_pictures, find_problems, list_problems

    rows = load_rows_once("--data", arguments.data, arguments.pictures, arguments.prompt or CAPTION_PROMPT)
    # A row holds one question or more, so the first N rows hold the first N questions.
    read = range(len(rows) if arguments.limit is None else min(arguments.limit, len(rows)))
    if found := find_problems(rows, read, check_pictures)[0]:
        raise ValueError(list_problems(rows, found))
    if arguments.prompt is not None and not any(map(rows.is_caption, read)):
        raise ValueError(f"`--prompt` is for images with a caption, and {rows} has none. Leave it out.")
    questions = questions_of((rows[index] for index in read), arguments.by)[: arguments.limit]
    if arguments.by and all(each.group is None for each in questions):
        raise ValueError(f"Expected rows of {arguments.data} to have the field {arguments.by!r} of `--by`, got none.")
    return questions


def _table(found: Evaluation) -> list[str]:
    lines = []
    if found.ways:
        lines += _heading("questions about images")
        lines += _lines(found.ways)
        for group, ways in found.groups.items():
            lines += _lines(ways, f"{group}: ")
    if found.text is not None:
        text = found.text
        lines += ["", *_heading("questions without an image")]
        lines += _lines({"the model": text})
        lines.append(f"| the model answers as its base, word for word | {text.exact.of} | {found.as_base} | | |")
        lines += _lines(found.text_groups)
    if (beside := found.beside) is not None:
        lines += ["", *_heading("the same questions beside an image of another row")]
        lines += _lines({"the model": beside.model, "its base, without the image": beside.base})
        lines.append(
            f"| the model answers as its base without the image, word for word | {beside.as_base.of} | "
            f"{beside.as_base} | | |"
        )
        if beside.left_out:
            lines.append(f"{beside.left_out} of them have no user message to put an image into: they are left out.")
    else:
        lines += ["", f"Text answers beside an image were not measured: {found.beside_missing}."]
    if found.cut:
        lines.append(f"{found.cut} answers were cut after {found.max_new_tokens} tokens: see --max-new-tokens.")
    return lines


def _heading(questions: str) -> list[str]:
    return [f"| {questions} | number | exact | normalised as VQA does | contains it |", "|---|---|---|---|---|"]


def _lines(named: dict[str, Scores], group: str = "") -> list[str]:
    return [
        f"| {group}{SHOWN.get(name, name)} | {each.exact.of} | {each.exact} | {each.normalised} | {each.contained} |"
        for name, each in named.items()
    ]
