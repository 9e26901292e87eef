"""The demo's data: real handwritten digits (scikit-learn's `load_digits`), one to three of them on a canvas.

The digit images are split before they are placed: no digit image is in both a training canvas and a held-out canvas.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from PIL import Image


DIGIT, PATCH = 8, 10
HEIGHT, WIDTH = 2 * PATCH, 6 * PATCH
WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
PLACES = ("first", "second", "third")
PROMPT = "digits :"
# Renders a chat like a training sentence: the question `digits :`, the answer, and the EOS token.
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
    """Returns `(1, 3, 20, 60)` in [-1, 1], the same values as the demo's image processor."""
    pixels = torch.from_numpy(canvas.pixels.astype(np.float32)) / 255
    return ((pixels - 0.5) / 0.5).expand(1, 3, -1, -1)


def picture_of(canvas: Canvas) -> Image.Image:
    """Returns the canvas as a PIL image in RGB."""
    return Image.fromarray(canvas.pixels).convert("RGB")


def patch_labels(canvas: Canvas) -> torch.Tensor:
    """Returns labels `(2, 12)` for the patches: the digit (10 for background), and its place from the left (or 3)."""
    labels = torch.stack([torch.full((HEIGHT // PATCH, WIDTH // PATCH), nothing) for nothing in (10, 3)])
    for place, (digit, (row, column)) in enumerate(zip(canvas.digits, canvas.corners)):
        labels[:, row // PATCH, column // PATCH] = torch.tensor([digit, place])
    return labels.flatten(1)


class CanvasDataset(torch.utils.data.Dataset):
    """Canvases with their tokenized sentences. The seed and the index determine the canvas.

    The labels of the prompt are -100, so the loss counts only the words after the prompt.
    """

    def __init__(self, pool: DigitPool, tokenizer, size: int, seed: int):
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
