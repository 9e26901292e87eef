"""Trials behind the recipe of `hf-xattn demo --language-model`: each changes one choice.

python examples/benchmarks/demo_choices.py OUTPUT [--steps N] [--seed N] [--choice NAME ...]

OUTPUT is the folder of a finished `hf-xattn demo --language-model ...`: the trials take its language model and its
tower. All get the same rows. Their questions for the test are in new phrasings, about new canvases of the digits for
training: the held-out digits choose nothing. The table goes to the terminal, and to OUTPUT/choices.json.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, set_seed

from hf_xattn.demo.canvases import DigitPool
from hf_xattn.demo.language_run import BLOCK, retrofitted
from hf_xattn.demo.language_scores import accuracy_by_kind, answers, held_out_questions, own_answers
from hf_xattn.demo.language_training import Recipe, start_connector, train, training_dtype
from hf_xattn.demo.questions import KINDS, TRAINING_PROMPTS


MIDDLE = (0.57, 0.67, 0.77, 0.87, 0.97)  # of the depth
CHOICES: dict[str, dict[str, Any]] = {
    "as it is": {},
    "learning rate 1.5e-3": {"learning_rate": 1.5e-3},
    "blocks from the middle on": {"layers": MIDDLE},
    "blocks from the middle on, learning rate 1.5e-3": {"layers": MIDDLE, "learning_rate": 1.5e-3},
    "four blocks, learning rate 1.5e-3": {"layers": (0.67, 0.77, 0.87, 0.97), "learning_rate": 1.5e-3},
    "seven blocks, from a third of the depth on": {"layers": (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)},
    "connector from random weights": {"start": False},
    "initializer_range 0.02": {"block": {"initializer_range": 0.02}},
    "24 questions a step, twice the steps": {"batch_size": 24},
}


def trial(
    output: Path,
    steps: int,
    seed: int,
    text_answers: dict[str, str],
    count: int,
    start: bool = True,
    layers: tuple[float, ...] | None = None,
    block: dict[str, Any] | None = None,
    learning_rate: float = Recipe().learning_rate,
    batch_size: int = Recipe().batch_size,
) -> dict[str, Any]:
    """Trains with one choice. `layers` are shares of the depth. Returns the processor's minutes and the accuracy of
    each kind of question.
    """
    set_seed(seed)
    base = AutoModelForCausalLM.from_pretrained(output / "text").eval()
    depth = base.config.get_text_config().num_hidden_layers
    places = None if layers is None else sorted({round(depth * share) for share in layers})
    model, processor = retrofitted(output / "text", output / "vision", places, BLOCK | (block or {}))
    pool = DigitPool(held_out=False, seed=seed)
    if start:
        start_connector(model, base, processor, pool, seed)
    recipe = Recipe(steps * Recipe().batch_size // batch_size, batch_size, learning_rate)
    begun = time.process_time()  # of the processor, because trials may share the machine
    train(model, processor, pool, text_answers, recipe, seed)
    minutes = (time.process_time() - begun) / 60
    questions = held_out_questions(pool, count, True, seed + 1)
    model = model.to(training_dtype(model.device))
    return {"minutes": minutes, **accuracy_by_kind(questions, answers(model, processor, questions))}


def compare(output: Path, steps: int, seed: int, choices: list[str], count: int = 40) -> dict[str, dict[str, Any]]:
    """Runs the trials, and writes `choices.json` after each one.

    Raises:
        ValueError: if `output` holds no language model and no tower, or for a choice that is not known.
    """
    unknown = sorted(set(choices) - set(CHOICES))
    if unknown:
        raise ValueError(f"`--choice` must be of {sorted(CHOICES)}, got {unknown}.")
    for folder in ("text", "vision"):
        if not (output / folder / "config.json").exists():
            raise ValueError(
                f"Expected the folder of a finished `hf-xattn demo --language-model ...`, got {output}, without "
                f"{folder}."
            )
    base = AutoModelForCausalLM.from_pretrained(output / "text").eval()
    _, processor = retrofitted(output / "text", output / "vision")
    text_answers = own_answers(base, processor, TRAINING_PROMPTS)
    results: dict[str, dict[str, Any]] = {}
    for name in choices:
        results[name] = trial(output, steps, seed, text_answers, count, **CHOICES[name])
        (output / "choices.json").write_text(json.dumps(results, indent=2) + "\n")
    return results


def table(results: dict[str, dict[str, Any]]) -> str:
    """Returns the trials as Markdown."""
    lines = [f"| choice | processor minutes | {' | '.join(KINDS)} | mean |", "|---" * (len(KINDS) + 3) + "|"]
    for name, result in results.items():
        shares = [result[kind] for kind in KINDS]
        shown = " | ".join(f"{share:.0%}" for share in [*shares, sum(shares) / len(shares)])
        lines.append(f"| {name} | {result['minutes']:.1f} | {shown} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", metavar="OUTPUT", type=Path, help="folder of a finished demo over a language model")
    parser.add_argument("--steps", type=int, default=100, help="steps of a trial (default: 100)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--choice", action="append", help="one trial; may be repeated (default: all)")
    arguments = parser.parse_args()
    print(table(compare(arguments.output, arguments.steps, arguments.seed, arguments.choice or list(CHOICES))))


if __name__ == "__main__":
    main()
