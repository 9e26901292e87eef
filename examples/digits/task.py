"""The task of `hf-xattn demo`, for the trainers beside this file: a text model and a vision tower learn to read digits
together.

A canvas holds one to three handwritten digits (scikit-learn), and the answer names them: `digits : first seven second
two`. Only blocks and connector train. All trainers here take the same canvases in the same order, so their losses are
the same to rounding.
"""

import argparse
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    AutoImageProcessor,
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
    PreTrainedModel,
)

from hf_xattn import XAttnProcessor, freeze_base, retrofit
from hf_xattn.demo.canvases import (
    PROMPT,
    WORDS,
    Canvas,
    CanvasDataset,
    DigitPool,
    make_text_checkpoint,
    make_vision_checkpoint,
    picture_of,
)


# With tensors this small a second thread hardly helps, and on busy cores it is several times slower.
torch.set_num_threads(1)


@dataclasses.dataclass
class Recipe:
    """How the demo trains.

    Attributes:
        folder (`Path`): for the checkpoints `text` and `vision`, which are made if they are missing, and for the
            trained `model`.
        steps (`int`): optimizer steps.
        batch_size (`int`): canvases a step, of all processes together.
        log_steps (`int`): steps of which a mean loss is printed.
        base_steps (`tuple[int, int]`): steps in which text model and tower are made.
        held_out (`int`): canvases to read at the end.
        is_test (`bool`): whether the model learns nothing in so few steps.
    """

    folder: Path
    steps: int = 300
    batch_size: int = 64
    log_steps: int = 50
    base_steps: tuple[int, int] = (250, 700)
    held_out: int = 500
    learning_rate: float = 2e-3
    is_test: bool = False

    @property
    def warmup(self) -> int:
        return self.steps // 10

    @classmethod
    def from_command_line(cls, description: str | None) -> "Recipe":
        parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
        parser.add_argument("--output", type=Path, default=Path("digits"), help="folder of the checkpoints")
        parser.add_argument("--quick", action="store_true", help="a few steps, as a test: the model learns nothing")
        arguments = parser.parse_args()
        return cls.quick(arguments.output) if arguments.quick else cls(arguments.output)

    @classmethod
    def quick(cls, folder: Path) -> "Recipe":
        return cls(folder, steps=6, batch_size=8, log_steps=1, base_steps=(15, 15), held_out=8, is_test=True)


def make_bases(recipe: Recipe) -> None:
    """Trains a text model that has never seen an image, and a small vision tower. Files that are there are kept."""
    if not (recipe.folder / "text" / "tokenizer_config.json").exists():
        make_text_checkpoint(recipe.folder / "text", recipe.base_steps[0], seed=0)
    if not (recipe.folder / "vision" / "preprocessor_config.json").exists():
        make_vision_checkpoint(recipe.folder / "vision", DigitPool(held_out=False), recipe.base_steps[1], seed=0)


def make_model(recipe: Recipe) -> tuple[Any, XAttnProcessor]:
    """The text model with fresh blocks. All that was there before is frozen."""
    text, vision = recipe.folder / "text", recipe.folder / "vision"
    torch.manual_seed(0)
    model = retrofit(
        text,
        vision,
        cross_attention_layers=[1, 2, 3],
        # A model of width 64 needs larger initial weights than a large model.
        cross_attention={"qk_norm": True, "initializer_range": 0.12, "gate": "tanh"},
        connector_type="linear",
    )
    processor = XAttnProcessor(AutoImageProcessor.from_pretrained(vision), AutoTokenizer.from_pretrained(text))
    return freeze_base(model), processor


def canvases(recipe: Recipe, processor: XAttnProcessor) -> CanvasDataset:
    """Each item is a canvas that no other holds: `input_ids`, `attention_mask`, `labels` and `pixel_values`."""
    size = recipe.steps * recipe.batch_size
    return CanvasDataset(DigitPool(held_out=False), processor.tokenizer, size, seed=10)


def finish(recipe: Recipe) -> float:
    """Loads the trained model again and reads canvases with digits that no training canvas holds. Returns the share
    that is right.
    """
    model = AutoModelForImageTextToText.from_pretrained(recipe.folder / "model")
    processor = AutoProcessor.from_pretrained(recipe.folder / "model")
    pool, rng = DigitPool(held_out=True), np.random.default_rng((0, 3))
    held_out = [pool.canvas(rng) for _ in range(recipe.held_out)]
    right = total = 0
    for start in range(0, len(held_out), 100):
        batch = held_out[start : start + 100]
        for canvas, words in zip(batch, read(model, processor, batch)):
            expected = [WORDS[digit] for digit in canvas.digits]
            right += sum(word == truth for word, truth in zip(words[1::2], expected))
            total += len(expected)
    note = " (after so few steps the weights are almost random, and this means nothing)" if recipe.is_test else ""
    print(f"held-out digits right: {right / total:.1%}{note}")
    return right / total


def read(model: PreTrainedModel, processor: XAttnProcessor, batch: list[Canvas]) -> list[list[str]]:
    """The words that the model says for each canvas, such as `first seven second two`."""
    inputs = processor(text=[PROMPT] * len(batch), images=[picture_of(canvas) for canvas in batch])
    tokens = model.generate(**inputs, max_new_tokens=8, do_sample=False)[:, inputs["input_ids"].shape[1] :]
    return [text.split() for text in processor.batch_decode(tokens, skip_special_tokens=True)]


def means(losses: list[float], log_steps: int) -> list[float]:
    """The mean of each `log_steps` losses, as `Trainer` logs them."""
    return [sum(losses[start : start + log_steps]) / log_steps for start in range(0, len(losses), log_steps)]
