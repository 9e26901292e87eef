"""Finds the images of a call that a cache already holds, by their content.

A chat client passes all images again in every turn. Cached images must not be encoded twice, and a new image must not
be mistaken for a cached one. Images are compared row by row, in their order, without padding images:

- In every row, the images start with all cached images: these are known. The images after them are new, even if one of
  them has the same content as a cached one.
- No image is among the cached images of its row: all images are new.
- Images in a form that no cached image has (features, where pixels are cached) cannot be compared: all are new.
- Anything else is an error, with the numbers in its message.
- A padding image comes again if its content is the same, and `image_mask` names it again. It never becomes a real
  image: the same content as a real image is a new one.

Features without an image axis, `(batch, num_image_tokens, context_size)`, count as one image.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
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

    def rows(self) -> list[np.ndarray]:
        """The numbers of the real images, row by row."""
        values, real = self.values.cpu().numpy(), self.real_or_all().cpu().numpy()
        return [row[mask] for row, mask in zip(values, real)]

    def blocks(self, row: int) -> list[bytes]:
        """The numbers of the real images of one row, image by image."""
        values, real = self.values[row].cpu().numpy(), self.real_or_all()[row].cpu().numpy()
        ends = np.cumsum(self.sizes)
        blocks = [(values[end - size : end], real[end - size : end]) for size, end in zip(self.sizes, ends)]
        return [block[mask].tobytes() for block, mask in blocks if mask.any()]


class Known(NamedTuple):
    """How many of the given images (pixels) or tokens (features) a cache holds, for each row."""

    counts: list[int]
    covers_cache: bool  # whether the given images start with all cached images


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
    aspect_ratio_ids: torch.Tensor | None = None,
) -> Digests:
    """Digests of pixels `(R, num_images, ...)` or features `(R, num_images, tokens, context_size)`.

    Args:
        compute_dtype (`torch.dtype`): the model's. Images that are equal in this dtype are equal.
        image_mask (`torch.BoolTensor`, *optional*): `(R, num_images)`, False = padding.
        aspect_ratio_ids (`torch.LongTensor`, *optional*): `(R, num_images)`. Images with other ids differ.
    """
    dtype = images.dtype if images.dtype.itemsize < compute_dtype.itemsize else compute_dtype
    images = images.to(compute_dtype)
    num_images, per_image = images.shape[1], 1
    if name == "cross_attention_states":
        per_image = images.shape[2]
        images = images.flatten(1, 2)
        image_mask = None if image_mask is None else image_mask.repeat_interleave(per_image, dim=1)
    values = digest(images)
    if aspect_ratio_ids is not None:
        values = values + aspect_ratio_ids.to(values) * 6364136223846793005
    return Digests(name, dtype, values, image_mask, (per_image,) * num_images)


def same_padding(cached: tuple[Digests, ...] | None, given: Digests) -> torch.Tensor:
    """`(R, compared images)`: which given images have the content of a cached padding image at their place."""
    known = next((digests for digests in cached or () if digests.of == given.of), given)
    parts = [tensor.split(known.sizes, dim=1) for tensor in (known.values, known.real_or_all())]
    same = [given.values.new_zeros(given.values.shape[0], 0, dtype=torch.bool)]
    for before, real, now in zip(*parts, given.values.split(given.sizes, dim=1)):
        if before.shape != now.shape:
            break
        same.append(((before.to(now.device) == now) & ~real.to(now.device)).all(dim=1, keepdim=True))
    return torch.cat(same, dim=1)


def find_known(cached: tuple[Digests, ...] | None, given: Digests | None) -> Known:
    """Finds the given images in a cache, by the rule at the top of this file. None, unknown content, is refused.

    Raises:
        ValueError: if the images cannot be compared, or if only some of them are cached.
    """
    if cached is None or given is None:
        raise ValueError(
            "`cache` holds images whose content was not recorded (they were cached in training, or combined "
            "from caches of different kinds), so the new images cannot be compared with them. Start from an empty "
            "cache, or from a cache of `encode_images`."
        )
    known = next((digests for digests in cached if digests.of == given.of), None)
    nothing = Known([0] * given.values.shape[0], False)
    if known is None:
        return nothing
    if known.dtype != given.dtype:
        raise ValueError(
            f"Expected `{given.of}` in {known.dtype}, the dtype of the images in `cache`, got {given.dtype}. "
            "Images of different dtypes cannot be compared."
        )
    known_rows, given_rows = known.rows(), given.rows()
    if not any(len(row) for row in known_rows):
        return nothing  # the cache holds only padding images
    if all(len(k) <= len(g) and np.array_equal(g[: len(k)], k) for k, g in zip(known_rows, given_rows)):
        return Known([len(row) for row in known_rows], True)
    for row, (known_row, given_row) in enumerate(zip(known_rows, given_rows)):
        cached_blocks, given_blocks = known.blocks(row), given.blocks(row)
        again = sum(_is_part(block, known_row.tobytes()) for block in given_blocks)
        again = again or sum(_is_part(block, given_row.tobytes()) for block in cached_blocks)
        if again:
            raise ValueError(
                f"Expected `{given.of}` to hold all images of `cache`, in their order, and then new ones, or "
                f"only new images. Row {row}: {len(cached_blocks)} in the cache, got {len(given_blocks)}, of which "
                f"{again} are cached. The order differs, cached images are missing, or another row has only new images."
            )
    return nothing


def _is_part(part: bytes, whole: bytes) -> bool:
    """Whether the 8-byte numbers in `part` occur in `whole`, one after another."""
    at = whole.find(part)
    while at != -1 and at % 8:
        at = whole.find(part, at + 1)
    return at != -1
