"""Numbers that stand for the content of images, by which a cache knows images that come again.

`images/conversation.py` compares them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn


@dataclass(eq=False)  # not frozen: see `cache/image_layout.py`
class Digests:
    """One number for each image (pixels, or what the tower made of them) or each token (features), from [`digest`]."""

    of: str  # "pixel_values", "vision_features" or "cross_attention_states"
    dtype: torch.dtype  # contents of different dtypes cannot be compared
    values: torch.Tensor  # (R, count)
    real: torch.Tensor | None  # (R, count), False = padding
    sizes: tuple[int, ...]  # how many numbers each image has: 1 for pixels, the number of tokens for features

    def append(self, later: Digests) -> Digests:
        """Returns these digests, followed by `later` ones of the same argument and the same rows."""
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
        """Those after the first `count` numbers: of images of `size` numbers, or of one image if `size` is 0."""
        values, real = self.values[:, count:], None if self.real is None else self.real[:, count:]
        left = values.shape[1]
        return Digests(self.of, self.dtype, values, real, (size,) * (left // size) if size else (left,))

    def images(self, with_padding: bool = False) -> list[list[bytes]]:
        """The numbers of the real images of each row, image by image."""
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
    # black images of different sizes differ too, also if one is the other one turned
    turned = images.shape[-2] - images.shape[-1] if images.dim() > 4 else 0
    added = images[:1, :1].numel() + 1_000_003 * turned
    return mixed_sum(words, word_weights(words.shape[-1], words.device), added)


def words_of(values: torch.Tensor) -> torch.Tensor:
    """The bytes of the last axis as 64-bit words, with zeros at the end."""
    data = values.contiguous().view(torch.uint8)
    if data.shape[-1] % 8:
        data = nn.functional.pad(data, (0, -data.shape[-1] % 8))
    return data.view(torch.int64)


def word_weights(count: int, device: torch.device) -> torch.Tensor:
    """A different odd number for each word."""
    weights = torch.arange(1, count + 1, device=device) * 6364136223846793005 + 1442695040888963407
    return (weights ^ (weights >> 29)) | 1


def mixed_sum(words: torch.Tensor, weights: torch.Tensor, added: int = 0) -> torch.Tensor:
    """The sum over the last axis. `added` goes to each word before it is multiplied."""
    mixed = ((words ^ (words >> 32)) + added) * weights
    return (mixed ^ (mixed >> 29)).sum(dim=-1)


def digests_of(
    name: str,
    images: torch.Tensor,
    compute_dtype: torch.dtype,
    image_mask: torch.Tensor | None,
    kinds: torch.Tensor | None = None,
) -> Digests:
    """Digests of pixels `(R, num_images, ...)` or features `(R, num_images, tokens, context_size)`.

    Args:
        compute_dtype (`torch.dtype`): the model's. Images that are equal in this dtype are equal.
        image_mask (`torch.BoolTensor`, *optional*): `(R, num_images)`, False = padding.
        kinds (`torch.LongTensor`, *optional*): `(R, num_images)`. Images of other kinds differ.
    """
    dtype = images.dtype if images.dtype.itemsize < compute_dtype.itemsize else compute_dtype
    images = images.to(compute_dtype)
    num_images, per_image = images.shape[1], 1
    if name == "cross_attention_states":
        per_image = images.shape[2]
        images = images.flatten(1, 2)
        image_mask = None if image_mask is None else image_mask.repeat_interleave(per_image, dim=1)
    values = digest(images)
    if kinds is not None:
        values = values + kinds.to(values) * 6364136223846793005
    return Digests(name, dtype, values, image_mask, (per_image,) * num_images)
