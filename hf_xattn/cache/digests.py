"""Digests of images: numbers by which a cache recognizes an image that a later call passes again.

`images/conversation.py` compares the digests.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn


@dataclass(eq=False)  # not frozen: see `cache/image_layout.py`
class Digests:
    """The digests of some images.

    There is one number for each image (`pixel_values`, `vision_features`) or for each token
    (`cross_attention_states`). [`digest`] computes them.
    """

    of: str  # the argument: "pixel_values", "vision_features" or "cross_attention_states"
    dtype: torch.dtype  # contents of different dtypes cannot be compared
    values: torch.Tensor  # (R, count), where R is the number of image rows
    real: torch.Tensor | None  # (R, count), False = padding. None if there is no padding
    sizes: tuple[int, ...]  # count of numbers of each image: 1, or the number of tokens for `cross_attention_states`

    def append(self, later: Digests) -> Digests:
        """Returns these digests, followed by those of `later` images of the same argument and the same rows."""
        real = None
        if self.real is not None or later.real is not None:
            real = torch.cat([self.real_or_all(), later.real_or_all()], dim=1)
        values = torch.cat([self.values, later.values], dim=1)
        return Digests(self.of, self.dtype, values, real, (*self.sizes, *later.sizes))

    def select(self, rows: torch.Tensor) -> Digests:
        rows = rows.to(self.values.device)
        return Digests(
            self.of, self.dtype, self.values[rows], None if self.real is None else self.real[rows], self.sizes
        )

    def real_or_all(self) -> torch.Tensor:
        return torch.ones_like(self.values, dtype=torch.bool) if self.real is None else self.real

    def behind(self, count: int, size: int) -> Digests:
        """Returns the digests without the first `count` numbers.

        Each of the remaining images has `size` numbers. If `size` is 0, the rest is one image.
        """
        values, real = self.values[:, count:], None if self.real is None else self.real[:, count:]
        left = values.shape[1]
        return Digests(self.of, self.dtype, values, real, (size,) * (left // size) if size else (left,))

    def images(self, with_padding: bool = False) -> list[list[bytes]]:
        """Returns the numbers of each real image as bytes: a list for each row, with one entry for each image."""
        real = self.real_or_all() if not with_padding else torch.ones_like(self.values, dtype=torch.bool)
        parts = zip(self.values.cpu().split(self.sizes, dim=1), real.cpu().split(self.sizes, dim=1))
        columns = [[row[mask].numpy().tobytes() for row, mask in zip(*part)] for part in parts]
        return [[image for image in row if image] for row in zip(*columns)]


def digest(images: torch.Tensor) -> torch.Tensor:
    """Computes one number for each image, `(R, num_images)`, from pixels or features `(R, num_images, ...)`.

    The number is a sum over 64-bit words, modulo 2^64. Such a sum is exact in any order, so equal images have equal
    digests in every batch. Different images have equal digests with a chance of about 2^-60. Each word is multiplied by
    a different odd number, between two shifts that mix its high bits into the low ones. Otherwise two flipped signs
    could cancel.
    """
    words = words_of(images.detach().flatten(2))
    # Black images of different sizes get different digests, also if one has the height and the width of the other.
    turned = images.shape[-2] - images.shape[-1] if images.dim() > 4 else 0
    added = images[:1, :1].numel() + 1_000_003 * turned
    return mixed_sum(words, word_weights(words.shape[-1], words.device), added)


def words_of(values: torch.Tensor) -> torch.Tensor:
    """Returns the bytes of the last axis as 64-bit words. Zeros fill up the last word."""
    data = values.contiguous().view(torch.uint8)
    if data.shape[-1] % 8:
        data = nn.functional.pad(data, (0, -data.shape[-1] % 8))
    return data.view(torch.int64)


def word_weights(count: int, device: torch.device) -> torch.Tensor:
    """Returns a different odd number for each word."""
    weights = torch.arange(1, count + 1, device=device) * 6364136223846793005 + 1442695040888963407
    return (weights ^ (weights >> 29)) | 1


def mixed_sum(words: torch.Tensor, weights: torch.Tensor, added: int = 0) -> torch.Tensor:
    """Returns the sum over the last axis. `added` is added to each word before its multiplication."""
    mixed = ((words ^ (words >> 32)) + added) * weights
    return (mixed ^ (mixed >> 29)).sum(dim=-1)
