"""Trials behind the recipe of `hf-xattn demo --language-model` and the sizes of blocks: each changes one choice.

python examples/benchmarks/demo_choices.py OUTPUT [--steps N] [--seeds N ...] [--choice NAME ...]

OUTPUT is the folder of a finished `hf-xattn demo --language-model ...`: the trials take its language model, its tower
and its digits. All trials of a seed get the same rows. Their questions for the test are in new phrasings, about new
canvases of the digits for training: the held-out digits choose nothing. OUTPUT/choices.json gets the results after each
trial; what it has already is not run again. The table goes to the terminal: shares of right answers as means over the
seeds, and what a choice costs beside "as it is" or, for the first token and a decode step, beside the text model alone.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from timing import seconds
from transformers import AutoModelForCausalLM, set_seed

from hf_xattn.demo.canvases import DigitPool, to_pixel_values
from hf_xattn.demo.checkpoints import one_thread
from hf_xattn.demo.language_run import BLOCK, retrofitted
from hf_xattn.demo.language_scores import accuracy_by_kind, answers, held_out_questions, own_answers
from hf_xattn.demo.language_training import Recipe, start_connector, train, training_dtype
from hf_xattn.demo.questions import KINDS
from hf_xattn.demo.text_prompts import TRAINING_PROMPTS
from hf_xattn.utils.transformers_api import CACHE


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
    "three quarters more steps": {"more_steps": 1.75},
    "no MLP": {"block": {"mlp_type": "none"}},
    "MLP of half the hidden size": {"mlp": 0.5},
    "MLP of the hidden size": {"mlp": 1.0},
    "MLP of twice the hidden size": {"mlp": 2.0},
    "MLP of the text model's width": {"mlp": "text"},
    "a block in front of every second layer": {"every": 2},
    "a block in front of every fourth layer": {"every": 4},
    "a block in front of every eighth layer": {"every": 8},
    "one K/V head": {"block": {"num_key_value_heads": 1}},
    "heads half as wide": {"heads": 0.5},
}
AS_IT_IS = "as it is"
PROMPT, STEPS = 32, 16  # tokens of the timed first token, and decode steps of a timed run


def sizes(text: Any, mlp: float | str | None, heads: float | None, block: dict[str, Any] | None) -> dict[str, Any]:
    """The options of the blocks. `mlp`: its width as a share of the hidden size; `heads`: the width of a head as a
    share of the text model's, with so many more of them.
    """
    options = BLOCK | (block or {})
    if mlp is not None:
        options["intermediate_size"] = text.intermediate_size if mlp == "text" else round(text.hidden_size * float(mlp))
    if heads is not None:
        width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        options |= {
            "head_dim": round(width * heads),
            "num_attention_heads": round(text.num_attention_heads / heads),
            "num_key_value_heads": round(text.num_key_value_heads / heads),
        }
    return options


def trial(
    output: Path,
    steps: int,
    seed: int,
    text_answers: dict[str, str],
    count: int,
    pool: DigitPool,
    start: bool = True,
    layers: tuple[float, ...] | None = None,
    every: int | None = None,
    mlp: float | str | None = None,
    heads: float | None = None,
    block: dict[str, Any] | None = None,
    learning_rate: float = Recipe().learning_rate,
    batch_size: int = Recipe().batch_size,
    more_steps: float = 1.0,
) -> dict[str, Any]:
    """Trains with one choice. `layers` are shares of the depth; `every`: a block in front of every so many layers;
    `more_steps`: a factor.

    Returns the accuracy of each kind of question, and what the choice costs: the processor's minutes of the training,
    millions of parameters added, and the times of a first token and of a decode step over those of the text model.
    """
    set_seed(seed)
    base = AutoModelForCausalLM.from_pretrained(output / "text").eval()
    text = base.config.get_text_config()
    depth = text.num_hidden_layers
    places = None if layers is None else sorted({round(depth * share) for share in layers})
    if every is not None:
        places = list(range(every - 1, depth, every))
    model, processor = retrofitted(output / "text", output / "vision", places, sizes(text, mlp, heads, block))
    added = sum(parameter.numel() for each in model.blocks for parameter in each.parameters())
    if start:
        start_connector(model, base, processor, pool, seed)
    recipe = Recipe(round(more_steps * steps * Recipe().batch_size / batch_size), batch_size, learning_rate)
    begun = time.process_time()  # of the processor, because trials may share the machine
    train(model, processor, pool, text_answers, recipe, seed)
    minutes = (time.process_time() - begun) / 60
    questions = held_out_questions(pool, count, True, seed + 1)
    model = model.to(training_dtype(model.device))
    shares = accuracy_by_kind(questions, answers(model, processor, questions))
    return {**shares, "minutes": minutes, "added": added / 1e6, **_times(model.eval(), base.to(model.dtype), pool)}


@torch.no_grad()
def _times(model: Any, base: Any, pool: DigitPool, repeats: int = 7) -> dict[str, float]:
    """A first token with its image from features, and a decode step, over those of the text model."""
    ids = torch.randint(10, 200, (1, PROMPT), generator=torch.Generator().manual_seed(0))
    pixels = to_pixel_values(pool.canvas(np.random.default_rng(0)))[None].to(model.dtype)
    image = {"cross_attention_states": model.get_image_features(pixels).pooler_output}

    def decode(which: Any, cache: Any) -> None:
        for _ in range(STEPS):
            which(ids[:, :1], use_cache=True, **{CACHE: cache})
        cache.crop(-STEPS)

    with one_thread():
        seen, read = model(ids, use_cache=True, **image), base(ids, use_cache=True)
        took = seconds(
            {
                "first": lambda: model(ids, use_cache=True, logits_to_keep=1, **image),
                "first of text": lambda: base(ids, use_cache=True, logits_to_keep=1),
                "step": lambda: decode(model, seen[CACHE]),
                "step of text": lambda: decode(base, read[CACHE]),
            },
            repeats,
        )
    return {name: took[name] / took[f"{name} of text"] for name in ("first", "step")}


def compare(
    output: Path, steps: int, seeds: list[int], choices: list[str], count: int = 40
) -> dict[str, dict[str, dict[str, Any]]]:
    """Runs the trials of each seed, and writes `choices.json` after each one. Returns its results, by choice and seed.

    Raises:
        ValueError: if `output` holds no finished demo over a language model, for a choice that is not known, and for
            results of other numbers of steps or questions.
    """
    unknown = sorted(set(choices) - set(CHOICES))
    if unknown:
        raise ValueError(f"`--choice` must be of {sorted(CHOICES)}, got {unknown}.")
    for name in ("text/config.json", "vision/config.json", "results.json"):
        if not (output / name).exists():
            raise ValueError(
                f"Expected the folder of a finished `hf-xattn demo --language-model ...`, got {output}, without {name}."
            )
    file, made = output / "choices.json", {"steps": steps, "questions": count}
    known = json.loads(file.read_text()) if file.exists() else {**made, "results": {}}
    if {name: known[name] for name in made} != made:
        raise ValueError(f"Expected results of {made} in {file}, got others. Remove it, or ask for the same.")
    pool = DigitPool(held_out=False, seed=json.loads((output / "results.json").read_text())["seed"])
    base = AutoModelForCausalLM.from_pretrained(output / "text").eval()
    _, processor = retrofitted(output / "text", output / "vision")
    text_answers = own_answers(base, processor, TRAINING_PROMPTS)
    results = known["results"]
    for seed in seeds:
        for name in choices:
            if str(seed) in results.get(name, {}):
                continue
            found = trial(output, steps, seed, text_answers, count, pool, **CHOICES[name])
            results.setdefault(name, {})[str(seed)] = found
            file.write_text(json.dumps(known, indent=2) + "\n")
    return {name: results[name] for name in choices}


def table(results: dict[str, dict[str, dict[str, Any]]]) -> str:
    """Returns the trials as Markdown. Differences from "as it is" are means over the seeds that both have."""
    heads = ["choice", "seeds", *KINDS, "mean", "difference", "parameters", "minutes", "first token", "step"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    plain = results.get(AS_IT_IS, {})
    for name, by_seed in results.items():
        found = list(by_seed.values())
        shares = [_mean([each[kind] for each in found]) for kind in KINDS]
        pairs = [_mean_of(by_seed[seed]) - _mean_of(plain[seed]) for seed in by_seed if seed in plain]
        apart = "" if name == AS_IT_IS or not pairs else f"{_mean(pairs):+.1%} ({min(pairs):+.1%} to {max(pairs):+.1%})"
        shown = [f"{share:.0%}" for share in [*shares, _mean(shares)]]
        costs = [
            f"{found[0]['added']:.1f} M",
            f"{_mean([each['minutes'] for each in found]):.1f}",
            *(f"{_mean([each[cost] for each in found]):.2f}" for cost in ("first", "step")),
        ]
        lines.append(f"| {' | '.join([name, str(len(found)), *shown, apart, *costs])} |")
    return "\n".join(lines)


def _mean_of(result: dict[str, Any]) -> float:
    return _mean([result[kind] for kind in KINDS])


def _mean(numbers: list[float]) -> float:
    return sum(numbers) / len(numbers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", metavar="OUTPUT", type=Path, help="folder of a finished demo over a language model")
    parser.add_argument("--steps", type=int, default=100, help="steps of a trial (default: 100)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--choice", action="append", help="one trial; may be repeated (default: all)")
    arguments = parser.parse_args()
    print(table(compare(arguments.output, arguments.steps, arguments.seeds, arguments.choice or list(CHOICES))))


if __name__ == "__main__":
    main()
