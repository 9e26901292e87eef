"""Measures what a start of connector and blocks is worth: how soon captions of scenes name what the picture shows.

python examples/scenes/compare_starts.py TEXT TOWER --output FILE [--start NAME ...] [--seeds N ...] [--block JSON]

TEXT is a language model, TOWER a vision tower such as train_tower.py makes. Blocks and connector learn captions of
scenes of the training split, in the same order for all starts of a seed:

- `random`: as `hf-xattn train --align none`;
- `connector`: `align_connector(..., blocks=False)`;
- `blocks`: `align_connector`;
- `places`: the same with a connector "mlp_2d", which gives image tokens a code of their places;
- `one rate`: as `blocks`, with the whole learning rate for all weights. What else is aligned has `--started-rate`.

After every `--every` steps the model reads captions of development scenes, and names each next word by the words before
it and by the picture. FILE gets the shares that are right: of the shapes, of the rows and of the columns; with the
picture, and with that of another scene. A shape follows its colour in a caption, so it can be known from the picture.

`--layers` and `--block` compare sizes of blocks instead of starts: the same rows, with one start, in a run of each.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from captions import caption_of
from make_scenes import CYCLE, draw
from scenes import OUTLINES
from splits import Split, open_split
from transformers import AutoTokenizer, TrainerCallback, TrainingArguments, set_seed
from transformers.models.auto.image_processing_auto import AutoImageProcessor  # in 5.17, also without torchvision

from hf_xattn import XAttnDataCollator, XAttnProcessor, align_connector, freeze_base, retrofit
from hf_xattn.training.picture_use import shifted
from hf_xattn.training.trainer import RunTrainer


class Start(NamedTuple):
    connector: bool
    blocks: bool
    slower: bool  # what has started gets `--started-rate`
    connector_type: str = "mlp"


STARTS = {
    "random": Start(False, False, False),
    "connector": Start(True, False, True),
    "blocks": Start(True, True, True),
    "places": Start(True, True, True, "mlp_2d"),
    "one rate": Start(True, True, False),
}
BLOCK = {"qk_norm": True, "initializer_range": 0.05}
NAMED = {"shape": tuple(OUTLINES), "row": ("top", "bottom"), "column": ("left", "right")}
QUESTION = "Describe the picture."
SCENES = [place for place, kind in enumerate(CYCLE) if kind == "scene"]


class Captions(torch.utils.data.Dataset):
    """Scenes of a split with their captions, as chats."""

    def __init__(self, split: Split, count: int):
        self.split, self.count = split, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index >= self.count:
            raise IndexError(index)
        cycle, place = divmod(index, len(SCENES))
        drawn = draw(self.split, len(CYCLE) * cycle + SCENES[place])
        asked = [{"type": "image", "image": drawn.image}, {"type": "text", "text": QUESTION}]
        answered = {"role": "assistant", "content": caption_of(drawn)}
        return {"messages": [{"role": "user", "content": asked}, answered]}


class Shares:
    """Counts the words of captions that a model names right.

    Args:
        captions ([`Captions`]): with at least two.
    """

    def __init__(self, collator: XAttnDataCollator, captions: Captions, batch_size: int):
        self.collator, self.captions, self.batch_size = collator, captions, batch_size
        tokenizer: Any = collator.processor.tokenizer
        self.kinds = {
            tokenizer(f" {word}", add_special_tokens=False)["input_ids"][0]: kind
            for kind, words in NAMED.items()
            for word in words
        }

    @torch.no_grad()
    def of(self, model: Any) -> dict[str, dict[str, float]]:
        """For each kind of word: the share that is right, and with the picture of another scene."""
        counts = {kind: torch.zeros(3) for kind in NAMED}  # right, right with another picture, all
        training = model.training
        model.eval()
        for start in range(0, len(self.captions), self.batch_size):
            rows = [self.captions[index] for index in range(start, min(start + self.batch_size, len(self.captions)))]
            batch = {name: each.to(model.device) for name, each in self.collator(rows).items()}
            targets = shifted(batch.pop("labels"))
            for column, pixels in enumerate((batch["pixel_values"], batch["pixel_values"].roll(1, 0))):
                said = model(**{**batch, "pixel_values": pixels}).logits.argmax(-1)
                for wanted, named in zip(targets.flatten().tolist(), said.flatten().tolist()):
                    if wanted in self.kinds:
                        counts[self.kinds[wanted]][column] += named == wanted
                        counts[self.kinds[wanted]][2] += column
        model.train(training)
        return {
            kind: {"right": float(right / count), "with another picture": float(other / count)}
            for kind, (right, other, count) in counts.items()
        }


class Measures(TrainerCallback):
    """Asks for the shares every so many steps."""

    def __init__(self, shares: Shares, every: int, name: str):
        self.shares, self.every, self.name = shares, every, name
        self.found: dict[int, dict[str, dict[str, float]]] = {}

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step % self.every == 0:
            found = self.found[state.global_step] = self.shares.of(model)
            told = ", ".join(f"{kind} {each['right']:.0%}" for kind, each in found.items())
            print(f"{self.name}: step {state.global_step}: {told}", flush=True)


def tokenizer_of(text: str) -> Any:
    """The tokenizer of a folder, a Hub id or a GGUF file."""
    if text.endswith(".gguf"):
        return AutoTokenizer.from_pretrained(Path(text).parent, gguf_file=Path(text).name)
    return AutoTokenizer.from_pretrained(text)


def options_of(text: str) -> dict[str, Any]:
    try:
        options = json.loads(text)
    except json.JSONDecodeError:
        options = None
    if not isinstance(options, dict):
        raise argparse.ArgumentTypeError(f"""expected a JSON object such as '{{"mlp_type": "none"}}', got {text}""")
    return options


def measure(options: argparse.Namespace, name: str, seed: int) -> dict[int, dict[str, dict[str, float]]]:
    """Trains from one start. Returns the shares after steps."""
    start = STARTS[name]
    set_seed(seed)
    train, development = (open_split(split, seed) for split in ("train", "development"))
    fields: dict[str, Any] = {"cross_attention": BLOCK | options.block, "connector_type": start.connector_type}
    model = retrofit(options.text, options.tower, layers=options.layers, dtype=torch.float32, **fields)
    model = freeze_base(model).to("cuda" if torch.cuda.is_available() else "cpu")
    count = sum(each.numel() for each in model.parameters() if each.requires_grad)
    print(f"{name}, seed {seed}: {count:,} parameters train", flush=True)
    processor = XAttnProcessor(AutoImageProcessor.from_pretrained(options.tower), tokenizer_of(options.text))
    if start.connector:
        align_connector(model, processor, Captions(train, options.pictures), blocks=start.blocks, seed=seed)
    collator = XAttnDataCollator(processor, padding_side="right")
    shares = Shares(collator, Captions(development, options.held_out), options.batch_size)
    measures = Measures(shares, options.every, f"{name}, seed {seed}")
    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            output_dir=folder,
            max_steps=options.steps,
            per_device_train_batch_size=options.batch_size,
            learning_rate=options.learning_rate,
            lr_scheduler_type="cosine",
            warmup_steps=-(-options.steps // 20),
            weight_decay=0.0,
            save_strategy="no",
            report_to="none",
            remove_unused_columns=False,
            seed=seed,
        )
        RunTrainer(
            started_rate=options.started_rate if start.slower else 1.0,
            model=model,
            args=settings,
            train_dataset=Captions(train, options.steps * options.batch_size),
            data_collator=collator,
            callbacks=[measures],
        ).train()
    return measures.found


def table(results: dict[str, dict[str, Any]], half: float = 0.5) -> str:
    """The steps until half of the shapes are right, and the last shares, as means over the seeds, as Markdown."""
    heads = ["start", "seeds", "steps to half of the shapes"]
    heads += [f"{kind}{other}" for kind in ("shape", "column") for other in ("", " with another picture")]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for name, by_seed in results.items():
        runs = [{int(step): found for step, found in each.items()} for each in by_seed.values()]
        first = [min((step for step in run if run[step]["shape"]["right"] >= half), default=None) for run in runs]
        means = [
            sum(run[max(run)][kind][share] for run in runs) / len(runs)
            for kind in ("shape", "column")
            for share in ("right", "with another picture")
        ]
        told = ", ".join("not reached" if step is None else str(step) for step in first)
        lines.append(f"| {name} | {len(runs)} | {told} | {' | '.join(f'{mean:.0%}' for mean in means)} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text")
    parser.add_argument("tower", type=Path)
    parser.add_argument("--output", type=Path, required=True, metavar="FILE")
    parser.add_argument("--start", action="append", choices=STARTS, help="one start; may be repeated (default: all)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--layers", type=int, nargs="+", default=[20, 22, 24, 26, 28], help="that get a block in front")
    parser.add_argument(
        "--block", type=options_of, default={}, metavar="JSON", help="""sizes of blocks: '{"intermediate_size": 576}'"""
    )
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--every", type=int, default=20, help="steps between two measures")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--started-rate", type=float, default=0.1)
    parser.add_argument("--pictures", type=int, default=1200, help="scenes to align with")
    parser.add_argument("--held-out", type=int, default=32, help="development scenes")
    options = parser.parse_args(arguments)
    if options.every > options.steps:
        parser.error(f"expected --every of at most --steps ({options.steps}), got {options.every}")
    if options.output.exists():
        parser.error(f"expected a new file, got {options.output}, which exists: remove it, or name another one")
    results: dict[str, dict[str, Any]] = {}
    for seed in options.seeds:
        for name in options.start or list(STARTS):
            results.setdefault(name, {})[str(seed)] = measure(options, name, seed)
            options.output.write_text(json.dumps(results, indent=2) + "\n")
    print(table(results))


if __name__ == "__main__":
    main()
