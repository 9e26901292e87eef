"""Makes what the demo of digits starts from: its canvases, a tiny text model, and a small vision tower.

A canvas is an image with one to three real handwritten digits (scikit-learn's `load_digits`). The digit images are
split before they are placed, so no digit image is in both a training canvas and a held-out canvas.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import nn
from tqdm.auto import tqdm
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    SiglipImageProcessorPil,
    ViTConfig,
)


DIGIT, PATCH = 8, 10
HEIGHT, WIDTH = 2 * PATCH, 6 * PATCH
WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
PLACES = ("first", "second", "third")
PROMPT = "digits :"
# The chat template renders a chat as a training sentence: the question `digits :`, the answer, and the EOS token.
CHAT_TEMPLATE = """{%- for message in messages -%}
{%- if message.role == 'assistant' -%}
{%- generation -%}{{- message.content ~ ' ' ~ eos_token ~ ' ' -}}{%- endgeneration -%}
{%- else -%}
{{- message.content ~ ' ' -}}
{%- endif -%}
{%- endfor -%}"""


class Canvas(NamedTuple):
    """An image and the digits on it."""

    pixels: np.ndarray  # (20, 60), uint8, white on black
    digits: list[int]  # from left to right
    corners: list[tuple[int, int]]  # upper left corner of each digit, row and column


class DigitPool:
    """The digit images for training, or the held-out fifth of the images. `seed` decides the split."""

    def __init__(self, held_out: bool, seed: int = 0):
        try:
            from sklearn.datasets import load_digits
        except ImportError as error:
            raise ImportError('The demo needs scikit-learn: pip install "scikit-learn>=1.4"') from error
        digits = load_digits()
        order = np.random.default_rng(seed).permutation(len(digits.target))
        first = len(order) // 5
        self.indices = order[:first] if held_out else order[first:]
        self.images = (digits.images * (255 / 16)).astype(np.uint8)
        self.labels = digits.target

    def canvas(self, rng: np.random.Generator) -> Canvas:
        """Draws a canvas with one to three digits.

        The canvas has two rows and six columns of cells, and a cell is one patch. A digit stands anywhere inside its
        cell. No two digits share a column, so the digits have a clear order from left to right.
        """
        count = int(rng.integers(1, len(PLACES) + 1))
        chosen = rng.choice(self.indices, count, replace=False)
        columns = np.sort(rng.choice(WIDTH // PATCH, count, replace=False)) * PATCH
        columns += rng.integers(0, PATCH - DIGIT + 1, count)
        rows = rng.integers(0, HEIGHT // PATCH, count) * PATCH + rng.integers(0, PATCH - DIGIT + 1, count)
        pixels = np.zeros((HEIGHT, WIDTH), np.uint8)
        for index, row, column in zip(chosen, rows, columns):
            pixels[row : row + DIGIT, column : column + DIGIT] = self.images[index]
        corners = [(int(row), int(column)) for row, column in zip(rows, columns)]
        return Canvas(pixels, [int(self.labels[index]) for index in chosen], corners)


def sentence(digits: list[int]) -> str:
    """Returns the sentence that describes a canvas, for example `digits : first seven second two`."""
    return " ".join([PROMPT, *(f"{PLACES[place]} {WORDS[digit]}" for place, digit in enumerate(digits))])


def to_pixel_values(canvas: Canvas) -> torch.Tensor:
    """Returns the pixels of a canvas as `(1, 3, 20, 60)` in [-1, 1], as the demo's image processor does."""
    pixels = torch.from_numpy(canvas.pixels.astype(np.float32)) / 255
    return ((pixels - 0.5) / 0.5).expand(1, 3, -1, -1)


def picture_of(canvas: Canvas) -> Image.Image:
    """Returns the canvas as a PIL image in RGB."""
    return Image.fromarray(canvas.pixels).convert("RGB")


def patch_labels(canvas: Canvas) -> torch.Tensor:
    """Returns labels `(2, 12)` for the patches: the digit (10 for background), and its place from the left (3 for
    background).
    """
    labels = torch.stack([torch.full((HEIGHT // PATCH, WIDTH // PATCH), nothing) for nothing in (10, 3)])
    for place, (digit, (row, column)) in enumerate(zip(canvas.digits, canvas.corners)):
        labels[:, row // PATCH, column // PATCH] = torch.tensor([digit, place])
    return labels.flatten(1)


class CanvasDataset(torch.utils.data.Dataset):
    """Canvases with their tokenized sentences. The seed and the index determine the canvas.

    The labels of the prompt are -100, so the loss counts only the words after the prompt.
    """

    def __init__(self, pool: DigitPool, tokenizer: PreTrainedTokenizerBase, size: int, seed: int):
        self.pool, self.tokenizer, self.size, self.seed = pool, tokenizer, size, seed
        self.prompt_length = len(tokenizer(PROMPT)["input_ids"])
        self.longest = self.prompt_length + 2 * len(PLACES) + 1

    def __len__(self) -> int:
        return self.size

    def canvas(self, index: int) -> Canvas:
        return self.pool.canvas(np.random.default_rng((self.seed, index)))

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        canvas = self.canvas(index)
        ids = [*self.tokenizer(sentence(canvas.digits))["input_ids"], self.tokenizer.eos_token_id]
        padding = self.longest - len(ids)
        labels = [-100] * self.prompt_length + ids[self.prompt_length :] + [-100] * padding
        return {
            "input_ids": torch.tensor(ids + [self.tokenizer.pad_token_id] * padding),
            "attention_mask": torch.tensor([1] * len(ids) + [0] * padding),
            "labels": torch.tensor(labels),
            "pixel_values": to_pixel_values(canvas),
        }


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Context in which torch uses one thread. With small tensors, several threads are slower on busy cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def optimize(
    parameters: Iterable[nn.Parameter], steps: int, rate: float, loss_of_step: Callable[[int], torch.Tensor], name: str
) -> None:
    """Trains with AdamW, with warm-up in the first tenth of the steps, and shows a progress bar."""
    optimizer = torch.optim.AdamW(list(parameters), lr=rate, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps, pct_start=0.1)
    bar = tqdm(range(steps), desc=name)
    for step in bar:
        loss = loss_of_step(step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 20 == 0:
            bar.set_postfix(loss=f"{loss.item():.3f}")


def make_text_checkpoint(folder: Path, steps: int, seed: int) -> None:
    """Trains a Llama and its tokenizer on sentences without images. The model can only guess the digits."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    rng = np.random.default_rng((seed, 1))
    sentences = [sentence(rng.integers(0, 10, rng.integers(1, 4)).tolist()) for _ in range(64 * 64)]
    words = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.WordLevelTrainer(special_tokens=["[PAD]", "[EOS]", "[UNK]"], show_progress=False)
    words.train_from_iterator(sentences, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token="[PAD]",
        eos_token="[EOS]",
        unk_token="[UNK]",
        padding_side="left",
        model_input_names=["input_ids", "attention_mask"],
        chat_template=CHAT_TEMPLATE,
    )
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
            bos_token_id=None,
            initializer_range=0.1,  # at this width, the usual 0.02 makes the logits of all words almost equal
        )
    )

    def loss_of_step(step: int) -> torch.Tensor:
        start = step * 64 % len(sentences)
        batch = tokenizer(
            [f"{text} [EOS]" for text in sentences[start : start + 64]],
            padding=True,
            padding_side="right",
            return_tensors="pt",
        )
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        return model(**batch, labels=labels).loss

    optimize(model.parameters(), steps, 3e-3, loss_of_step, "text model, on text alone")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def make_vision_checkpoint(folder: Path, pool: DigitPool, steps: int, seed: int) -> None:
    """Trains a small ViT to predict, for each patch, the digit and the digit's place. Its heads are not saved."""
    torch.manual_seed(seed + 1)
    config = ViTConfig(
        hidden_size=96,
        intermediate_size=192,
        num_hidden_layers=3,
        num_attention_heads=4,
        image_size=(HEIGHT, WIDTH),
        patch_size=PATCH,
    )
    tower = AutoModel.from_config(config)
    classes = (11, 4)
    heads = torch.nn.ModuleList([torch.nn.Linear(config.hidden_size, count) for count in classes])
    weights = [torch.tensor([1.0] * (count - 1) + [0.2]) for count in classes]  # most patches are background

    def loss_of_step(step: int) -> torch.Tensor:
        canvases = [pool.canvas(np.random.default_rng((seed, 2, step, row))) for row in range(64)]
        pixel_values = torch.cat([to_pixel_values(canvas) for canvas in canvases])
        labels = torch.stack([patch_labels(canvas) for canvas in canvases], dim=1)
        patches = (
            tower(pixel_values=pixel_values).last_hidden_state[:, 1:].flatten(0, 1)
        )  # [:, 1:] leaves the class token out
        losses = [
            torch.nn.functional.cross_entropy(head(patches), label.flatten(), weight=weight)
            for head, label, weight in zip(heads, labels, weights)
        ]
        return torch.stack(losses).sum()

    optimize([*tower.parameters(), *heads.parameters()], steps, 3e-3, loss_of_step, "vision tower, digits of patches")
    tower.save_pretrained(folder)
    SiglipImageProcessorPil(size={"height": HEIGHT, "width": WIDTH}).save_pretrained(folder)
