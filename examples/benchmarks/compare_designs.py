"""Cross-attention beside image tokens in the prompt: the same rows, tower, text model, parameters and compute.

python examples/benchmarks/compare_designs.py FRESH --design DESIGN --data SOURCE... --development FOLDER --output FILE

FRESH is a folder of `hf-xattn retrofit`, whose blocks are fresh, or started by words (`align_connector`; then with
`--started-rate`, as for `hf-xattn train`). Its text model and its tower are those of all designs:

- `blocks`: the folder's blocks and connector train;
- `projector`: transformers' Llava puts the projected image tokens into the prompt, and the projector trains;
- `lora`: the same, and LoRA on all linear layers of the text model trains too (package `peft`).

The projector's inner width, or the rank of LoRA, is chosen so that about as many parameters train as in FRESH. All
designs get the rows in the same order, `--batch-size` at a time, and as many steps as fit into `--pflop`: the floating
point operations of the matrix products in forward and backward, tower included, as torch's FlopCounterMode counts them
for the first batches. `--steps` sets the steps instead: equal rows. AdamW, warm-up and cosine, clipping at 1, bfloat16
as `hf-xattn train` has it. The learning rate is the best of `--learning-rates` by the loss of the last quarter of a run
with a tenth of the steps, which is not counted for any design.

FILE gets, for the development rows, the shares of right answers by kind, and the costs: parameters, steps, seconds of
a step, the largest memory, the time to a first token, of a decode step, and the bytes of the cache behind one image.
And what is left of the text model's answers to 200 questions that no picture concerns, with and without one.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from designs import BLOCKS, DESIGNS, Design
from timing import seconds
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.flop_counter import FlopCounterMode
from transformers import get_cosine_schedule_with_warmup, set_seed

from hf_xattn import load_rows
from hf_xattn.data.loading import Shuffled
from hf_xattn.evaluation.answers import normalised
from hf_xattn.evaluation.evaluation import Asker, inputs_of
from hf_xattn.evaluation.questions import Question, beside_pictures, questions_of
from hf_xattn.training.trainer import check_started_rate
from hf_xattn.utils.transformers_api import CACHE


sys.path.append(str(Path(__file__).parents[1]))  # where text_questions.py is
from text_questions import TEST_PROMPTS, TEXT_TOKENS, holds


WARMUP = 0.05
SEARCH = 0.1  # of the compute, for each learning rate
COUNTED = 4  # batches whose operations are counted
TIMED, DECODED, REPEATS = 8, 8, 5  # questions asked for a first token; decode steps of a timed run; runs


class Course:
    """How a design trains.

    Args:
        rows ([`Rows`]): to train on.
        size (`int`): rows of a batch.
        seed (`int`): of the order, which is that of `hf-xattn train`.
        started_rate (`float`): share of the learning rate for weights of blocks that do not start at zero.
        workers (`int`): processes that read pictures.
    """

    def __init__(self, rows: Any, size: int, seed: int, started_rate: float = 1.0, workers: int = 0):
        self.order, self.size = Shuffled(rows, sys.maxsize, seed), size
        self.started_rate, self.workers = started_rate, workers

    def batches(self, design: Design, number: int) -> Iterable[dict[str, Any]]:
        places: Any = range(number * self.size)
        return DataLoader(self.order, self.size, sampler=places, collate_fn=design.batch, num_workers=self.workers)

    def operations(self, design: Design) -> float:
        """Floating point operations of a step: the mean of the first batches."""
        counter = FlopCounterMode(display=False)
        with counter:
            for batch in self.batches(design, COUNTED):
                loss = design.loss(batch)
                if loss.requires_grad:
                    loss.backward()
        for each in design.trained:
            each.grad = None
        return counter.get_total_flops() / COUNTED

    def train(self, design: Design, steps: int, rate: float) -> tuple[list[float], float]:
        """Trains in place. Returns the losses, and the seconds of a step."""
        started = {id(each) for each in design.started}
        groups = [{"params": [each for each in design.trained if id(each) not in started], "lr": rate}]
        groups.append({"params": design.started, "lr": rate * self.started_rate})
        optimizer = torch.optim.AdamW([each for each in groups if each["params"]], weight_decay=0.0)
        schedule = get_cosine_schedule_with_warmup(optimizer, math.ceil(WARMUP * steps), steps)
        losses = []
        begun = time.perf_counter()
        for step, batch in enumerate(self.batches(design, steps)):
            loss = design.loss(batch)
            if loss.requires_grad:  # not of texts alone, which nothing that trains has seen
                loss.backward()
            nn.utils.clip_grad_norm_(design.trained, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            losses.append(loss.item())
            if (step + 1) % 10 == 0:
                mean = sum(losses[-10:]) / 10
                print(f"{design.name}, {rate:g}: step {step + 1} of {steps}, loss {mean:.4f}", flush=True)
        return losses, (time.perf_counter() - begun) / steps

    def try_rates(self, design: Design, steps: int, rates: Sequence[float]) -> dict[float, float]:
        """The mean loss of the last quarter of a short run of each learning rate. The design is as before. One rate
        needs no run.
        """
        if len(rates) == 1:
            return {}
        fresh = [each.detach().clone() for each in design.trained]
        reached = {}
        for rate in rates:
            losses, _ = self.train(design, steps, rate)
            last = losses[-(steps // 4 + 1) :]
            reached[rate] = sum(last) / len(last)
            with torch.no_grad():
                for each, before in zip(design.trained, fresh):
                    each.copy_(before)
        return reached


def shares(design: Design, questions: Sequence[Question], batch_size: int) -> dict[str, dict[str, Any]]:
    """Right answers by kind, normalised, of questions with and without pictures."""
    longest = max(len(design.tokenizer(each.answer, add_special_tokens=False)["input_ids"]) for each in questions)
    counts: dict[str, list[int]] = {}
    for some in (True, False):
        asked = [each for each in questions if bool(each.pictures) == some]
        for question, said in zip(asked, answers(design, asked, batch_size, longest + 8)):
            count = counts.setdefault(question.group or "", [0, 0])
            count[0] += normalised(said) == normalised(question.answer)
            count[1] += 1
    return {kind: {"right": right, "of": total} for kind, (right, total) in sorted(counts.items())}


def answers(design: Design, questions: Sequence[Question], batch_size: int, max_new_tokens: int) -> list[str]:
    return Asker(design.model, design.chats, batch_size, max_new_tokens)("asking", questions) if questions else []


class TextAbility:
    """What is left of the text model's answers to 200 questions that no picture concerns.

    Args:
        untrained ([`Design`]): its blocks, which leave texts without a picture alone. It answers as the text model.
        about (`list[Question]`): the pictures of these stand beside the texts.
    """

    def __init__(self, untrained: Design, about: Sequence[Question], batch_size: int):
        self.batch_size = batch_size
        self.alone = [Question([{"role": "user", "content": prompt}], word) for prompt, word in TEST_PROMPTS]
        self.beside = beside_pictures(self.alone, [each for each in about if each.pictures])
        self.base = answers(untrained, self.alone, batch_size, TEXT_TOKENS)

    def of(self, design: Design) -> dict[str, int]:
        """Numbers of answers that are the text model's, word for word, and that are right: they hold the right word."""
        found = {"of": len(self.base), "right, text model": self._right(self.base)}
        for name, asked in (("alone", self.alone), ("beside a picture", self.beside)):
            said = answers(design, asked, self.batch_size, TEXT_TOKENS)
            found |= {f"as the text model, {name}": sum(map(str.__eq__, said, self.base))}
            found |= {f"right, {name}": self._right(said)}
        return found

    def _right(self, said: Sequence[str]) -> int:
        return sum(holds(answer, question.answer) for answer, question in zip(said, self.alone, strict=True))


@torch.no_grad()
def times(design: Design, questions: Sequence[Question]) -> dict[str, float]:
    """Seconds to a first token from pixels, and of a decode step behind it, and the bytes of its cache."""
    about = [each for each in questions if each.pictures][:TIMED]
    inputs = [dict(inputs_of(design.chats, [each.messages]).to(design.model.device)) for each in about]
    read = design.model(**inputs[0], use_cache=True)
    cache, token = read[CACHE], inputs[0]["input_ids"][:, :1]
    halves = [getattr(cache, half, None) for half in ("self_attention_cache", "cross_attention_cache")]
    layers = [layer for half in halves if half is not None for layer in half.layers] or cache.layers
    size = sum(each.numel() * each.element_size() for layer in layers for each in (layer.keys, layer.values))

    def first() -> None:
        for each in inputs:
            design.model(**each, use_cache=True, logits_to_keep=1)

    def decode() -> None:
        for _ in range(DECODED):
            design.model(token, use_cache=True, **{CACHE: cache})
        cache.crop(-DECODED)

    took = seconds({"first": first, "step": decode}, REPEATS)
    return {"first token": took["first"] / len(inputs), "decode step": took["step"] / DECODED, "cache": size}


def compare(options: argparse.Namespace) -> dict[str, Any]:
    """Trains one design and measures it."""
    set_seed(options.seed)
    course = Course(load_rows(options.data), options.batch_size, options.seed, options.started_rate, options.workers)
    where = {"dtype": getattr(torch, options.dtype), "device": options.device}
    questions = questions_of(load_rows(options.development), by="kind")[: options.questions]
    untrained = Design(BLOCKS, options.fresh, **where)
    texts = TextAbility(untrained, questions, options.batch_size)
    words_of = load_rows(options.words_of) if options.words_of else None
    design = Design(options.design, options.fresh, untrained.parameters, words_of=words_of, **where)
    if design.name == BLOCKS:
        check_started_rate(design.model, options.started_rate)
    flop = course.operations(design)
    steps = options.steps or max(1, round(options.pflop * 1e15 / flop))
    print(f"{design.name}: {design.parameters:,} parameters, {flop / 1e12:.3f} TFLOP and {steps} steps", flush=True)
    reached = course.try_rates(design, max(1, round(SEARCH * steps)), options.learning_rates)
    rate = min(reached, key=lambda each: reached[each], default=options.learning_rates[0])
    on_gpu = options.device.startswith("cuda")
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    losses, a_step = course.train(design, steps, rate)
    memory = torch.cuda.max_memory_allocated() if on_gpu else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    design.ready()
    return {
        "design": design.name,
        "seed": options.seed,
        "parameters": design.parameters,
        "FLOP of a step": flop,
        "steps": steps,
        "batch size": options.batch_size,
        "learning rates": {f"{each:g}": loss for each, loss in reached.items()},
        "learning rate": rate,
        "share of it for started weights": options.started_rate if design.started else None,
        "started by words": words_of is not None,
        "losses": losses,
        "seconds of a step": a_step,
        "largest memory, MB": memory / 2**20,
        "right": shares(design, questions, options.batch_size),
        "texts": texts.of(design),
        **times(design, questions),
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("fresh", type=Path, help="a folder of `hf-xattn retrofit`")
    parser.add_argument("--design", choices=DESIGNS, required=True)
    parser.add_argument("--data", nargs="+", required=True, help="rows to train on, as for `hf-xattn train --data`")
    parser.add_argument("--development", required=True, help="rows to ask")
    parser.add_argument("--words-of", nargs="+", help="rows by whose words each design starts, without a learning rate")
    parser.add_argument("--questions", type=int, default=2000, help="so many of them, from the first on")
    parser.add_argument("--pflop", type=float, default=0.5, help="compute of a run, in 1e15 operations (default: 0.5)")
    parser.add_argument("--steps", type=int, help="steps of a run, in place of --pflop")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--started-rate", type=float, default=1.0, help="as of `hf-xattn train`, for blocks")
    parser.add_argument("--workers", type=int, default=0, help="processes that read pictures")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--learning-rates", type=float, nargs="+", default=[1e-3, 3e-3, 5e-4])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, required=True, metavar="FILE")
    options = parser.parse_args(arguments)
    if options.output.exists():
        parser.error(f"expected a new file, got {options.output}, which exists: remove it, or name another one")
    found = compare(options)
    options.output.write_text(json.dumps(found, indent=2) + "\n")
    for kind, share in found["right"].items():
        print(f"{kind}: {share['right']} of {share['of']} right")


if __name__ == "__main__":
    main()
