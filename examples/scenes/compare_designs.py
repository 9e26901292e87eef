"""Cross-attention beside image tokens in the prompt: the same rows, tower, text model, parameters and compute.

python examples/scenes/compare_designs.py FRESH --design DESIGN --data SOURCE... --development FOLDER --output FILE

FRESH is a folder of `hf-xattn retrofit`, whose blocks are fresh, or started by words (`--align`; then with
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
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import resource
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoProcessor, SiglipVisionConfig, get_cosine_schedule_with_warmup, set_seed
from transformers.modeling_outputs import BaseModelOutput

from hf_xattn import (
    XAttnDataCollator,
    XAttnForConditionalGeneration,
    XAttnProcessor,
    freeze_base,
    load_rows,
    remove_blocks,
)
from hf_xattn.data.order import Shuffled
from hf_xattn.evaluation.answers import normalised
from hf_xattn.evaluation.evaluation import Asker, inputs_of
from hf_xattn.evaluation.questions import Question, questions_of
from hf_xattn.training.started_rate import check_started_rate, starts_at_zero


sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))  # where Llava's side is
from llava_peer import LlavaChats, llava_of
from timing import seconds


DESIGNS = BLOCKS, PROJECTOR, LORA = ("blocks", "projector", "lora")
IMAGE_TOKEN = "<image>"
IGNORED = -100
WARMUP = 0.05
SEARCH = 0.1  # of the compute, for each learning rate
COUNTED = 4  # batches whose operations are counted
TIMED, DECODED, REPEATS = 8, 8, 5  # questions asked for a first token; decode steps of a timed run; runs


class Features(nn.Module):
    """A convolutional tower as Llava reads one: its features `(batch, places, channels)`, row by row.

    Args:
        tower (`PreTrainedModel`): its output is `(batch, channels, height, width)`.
        side (`int`): pixels of a side of a picture.
    """

    def __init__(self, tower: Any, side: int):
        super().__init__()
        self.tower, self.dtype = tower, tower.dtype
        with torch.no_grad():
            channels = tower(torch.zeros(1, 3, side, side, dtype=tower.dtype)).last_hidden_state.shape[1]
        # Llava asks the configuration for these sizes; the tower that it makes of it is replaced.
        sizes = {"num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 1}
        self.config = SiglipVisionConfig(hidden_size=channels, image_size=side, **sizes)

    def forward(self, pixel_values: torch.Tensor, **options: Any) -> BaseModelOutput:
        features = self.tower(pixel_values.to(self.dtype)).last_hidden_state.flatten(2).transpose(1, 2)
        return BaseModelOutput(last_hidden_state=features, hidden_states=(features,))


class Design:
    """A model that trains, and what makes its batches and its prompts.

    Args:
        name (`str`): of `DESIGNS`.
        fresh (`Path`): folder of the retrofitted model.
        parameters (`int`, *optional*): about so many train; not for the blocks, which are as they are.
        dtype (`torch.dtype`): of the frozen weights and of the computation. Weights are float32 while they train.
        device (`str`): where it runs.
    """

    def __init__(
        self,
        name: str,
        fresh: Path,
        parameters: int = 0,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
    ):
        self.name = name
        processor: Any = AutoProcessor.from_pretrained(fresh)
        seeing = XAttnForConditionalGeneration.from_pretrained(fresh, dtype=dtype)
        if name == BLOCKS:
            self.model: Any = freeze_base(seeing)
            self.body, self.head = seeing.model, seeing.get_output_embeddings()
            self.chats: Any = processor
        else:
            processor = with_marker(processor)
            self.model, self.body, self.head = self._llava(seeing, processor, parameters)
            self.chats = LlavaChats(processor, self.model.config.image_seq_length)
        self.model.to(device)
        self.trained = [each for each in self.model.parameters() if each.requires_grad]
        self._dtypes = [each.dtype for each in self.trained]
        for each in self.trained:
            each.data = each.data.float()
        new = {id(each) for each in starts_at_zero(seeing)}
        self.started = [each for each in self.trained if id(each) not in new] if name == BLOCKS else []
        self._autocast = torch.autocast(torch.device(device).type, dtype, enabled=dtype != torch.float32)
        self._collate = XAttnDataCollator(processor, padding_side="right")

    def _llava(self, seeing: Any, processor: XAttnProcessor, parameters: int) -> tuple[Any, Any, Any]:
        tower = seeing.model.vision_tower
        if not hasattr(tower.config, "hidden_size"):
            tower = Features(tower, processor.image_processor.size["height"])
        base = remove_blocks(seeing)
        model = llava_of(base, tower, processor.image_token_id)
        projector, sizes = model.model.multi_modal_projector, (tower.config.hidden_size, base.config.hidden_size)
        inner = max(1, round((parameters - sizes[1]) / (sum(sizes) + 1))) if self.name == PROJECTOR else sizes[1]
        projector.linear_1, projector.linear_2 = nn.Linear(sizes[0], inner), nn.Linear(inner, sizes[1])
        projector.to(base.dtype)
        if self.name == PROJECTOR:
            return model, model.model, model.lm_head
        from peft import LoraConfig, get_peft_model

        linear = [each for each in model.model.language_model.modules() if isinstance(each, nn.Linear)]
        left = parameters - sum(each.numel() for each in projector.parameters())
        rank = max(1, round(left / sum(each.in_features + each.out_features for each in linear)))
        targets = r".*language_model.*(q|k|v|o|gate|up|down)_proj"
        lora = get_peft_model(model, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=targets))
        projector.requires_grad_(True)
        return lora, lora.base_model.model.model, lora.base_model.model.lm_head

    @property
    def parameters(self) -> int:
        return sum(each.numel() for each in self.trained)

    def batch(self, rows: Sequence[Any]) -> dict[str, Any]:
        """The inputs of [`Design.loss`]."""
        batch: dict[str, Any] = self._collate(list(rows))
        return batch if self.name == BLOCKS else self._in_the_prompt(batch)

    def loss(self, batch: dict[str, Any]) -> torch.Tensor:
        """The mean over the labels of a batch."""
        batch = {name: value.to(self.model.device) for name, value in batch.items()}
        labels = nn.functional.pad(batch.pop("labels")[:, 1:], (0, 1), value=IGNORED)
        with self._autocast:
            hidden = self.body(**batch, use_cache=False).last_hidden_state
            logits = self.head(hidden[labels != IGNORED]).float()
        return nn.functional.cross_entropy(logits, labels[labels != IGNORED])

    def ready(self) -> None:
        """Gives the trained weights the dtypes in which they are used."""
        self.model.eval()
        for each, dtype in zip(self.trained, self._dtypes):
            each.data = each.data.to(dtype)

    def _in_the_prompt(self, batch: dict[str, Any]) -> dict[str, Any]:
        """The batch with so many image tokens in place of each marker, padded again."""
        made: dict[str, list[torch.Tensor]] = {"input_ids": [], "attention_mask": [], "labels": []}
        for row, ids in enumerate(batch["input_ids"]):
            real = batch["attention_mask"][row].bool()
            counts = self.chats.counts(ids[real])
            for name, rows in made.items():
                rows.append(batch[name][row][real].repeat_interleave(counts))
        padding = {"input_ids": 0, "attention_mask": 0, "labels": IGNORED}
        padded = {
            name: nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=padding[name])
            for name, rows in made.items()
        }
        if "pixel_values" in batch:
            pixels, mask = batch["pixel_values"], batch.get("image_mask")
            padded["pixel_values"] = pixels.flatten(0, 1) if mask is None else pixels[mask]
        return padded


def with_marker(processor: XAttnProcessor) -> XAttnProcessor:
    """The same processor, which renders a picture as a marker: Llava's image tokens come in its place."""
    if processor.image_token is not None:
        return processor
    tokenizer = copy.deepcopy(processor.tokenizer)
    tokenizer.add_tokens([IMAGE_TOKEN], special_tokens=True)
    return XAttnProcessor(
        processor.image_processor, tokenizer, chat_template=processor.chat_template, image_token=IMAGE_TOKEN
    )


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
        self.order, self.size = Shuffled(rows, sys.maxsize, seed, size, 1), size
        self.started_rate, self.workers = started_rate, workers

    def batches(self, design: Design, number: int) -> Iterable[dict[str, Any]]:
        places: Any = range(number * self.size)
        return DataLoader(self.order, self.size, sampler=places, collate_fn=design.batch, num_workers=self.workers)

    def operations(self, design: Design) -> float:
        """Floating point operations of a step: the mean of the first batches."""
        counter = FlopCounterMode(display=False)
        with counter:
            for batch in self.batches(design, COUNTED):
                design.loss(batch).backward()
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
    """Right answers by kind, normalised, of questions about pictures; `text`: of those without one."""
    tokenizer = design.chats.processor.tokenizer if design.name != BLOCKS else design.chats.tokenizer
    longest = max(len(tokenizer(each.answer, add_special_tokens=False)["input_ids"]) for each in questions)
    asker = Asker(design.model, design.chats, batch_size, longest + 8)
    counts: dict[str, list[int]] = {}
    for some in (True, False):
        asked = [each for each in questions if bool(each.pictures) == some]
        for question, said in zip(asked, asker("asking", asked) if asked else []):
            count = counts.setdefault(question.group or "", [0, 0])
            count[0] += normalised(said) == normalised(question.answer)
            count[1] += 1
    return {kind: {"right": right, "of": total} for kind, (right, total) in sorted(counts.items())}


@torch.no_grad()
def times(design: Design, questions: Sequence[Question]) -> dict[str, float]:
    """Seconds to a first token from pixels, and of a decode step behind it, and the bytes of its cache."""
    about = [each for each in questions if each.pictures][:TIMED]
    inputs = [dict(inputs_of(design.chats, [each.messages]).to(design.model.device)) for each in about]
    read = design.model(**inputs[0], use_cache=True)
    cache, token = read.past_key_values, inputs[0]["input_ids"][:, :1]
    halves = [getattr(cache, half, None) for half in ("self_attention_cache", "cross_attention_cache")]
    layers = [layer for half in halves if half is not None for layer in half.layers] or cache.layers
    size = sum(each.numel() * each.element_size() for layer in layers for each in (layer.keys, layer.values))

    def first() -> None:
        for each in inputs:
            design.model(**each, use_cache=True, logits_to_keep=1)

    def decode() -> None:
        for _ in range(DECODED):
            design.model(token, past_key_values=cache, use_cache=True)
        cache.crop(-DECODED)

    took = seconds({"first": first, "step": decode}, REPEATS)
    return {"first token": took["first"] / len(inputs), "decode step": took["step"] / DECODED, "cache": size}


def compare(options: argparse.Namespace) -> dict[str, Any]:
    """Trains one design and measures it."""
    set_seed(options.seed)
    course = Course(load_rows(options.data), options.batch_size, options.seed, options.started_rate, options.workers)
    where = {"dtype": getattr(torch, options.dtype), "device": options.device}
    wanted = Design(BLOCKS, options.fresh).parameters
    design = Design(options.design, options.fresh, wanted, **where)
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
    questions = questions_of(load_rows(options.development), by="kind")[: options.questions]
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
        "losses": losses,
        "seconds of a step": a_step,
        "largest memory, MB": memory / 2**20,
        "right": shares(design, questions, options.batch_size),
        **times(design, questions),
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("fresh", type=Path, help="a folder of `hf-xattn retrofit`")
    parser.add_argument("--design", choices=DESIGNS, required=True)
    parser.add_argument("--data", nargs="+", required=True, help="rows to train on, as for `hf-xattn train --data`")
    parser.add_argument("--development", required=True, help="rows to ask")
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
