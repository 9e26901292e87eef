"""Which images of a call a cache holds already, told by their content.

A chat client passes all its images again at every turn. Those that the cache holds must not be encoded twice, and a picture that is
not in it must not be taken for one that is. Images are compared row by row, padding images left out, in their order:

- All cached images come first, in every row: these are known, and what follows is new, also a picture that comes a second time.
- No given image is among the cached ones of its row: all are new.
- Anything else cannot be meant, or cannot be told: an error with the numbers.

Features that come without an axis of images, `(batch, num_image_tokens, context_size)`, are one image.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import nn


@dataclass(eq=False)  # not frozen: see `image_layout.py`
class Digests:
    """One number for each image (of pixels) or for each token (of features), from [`digest`].

    Attributes:
        of (`str`): the argument that they came with, `"pixel_values"` or `"cross_attention_states"`.
        dtype (`torch.dtype`): the precision of the content. Contents of different precision cannot be compared.
        values (`torch.LongTensor`): `(R, count)`.
        real (`torch.BoolTensor`, *optional*): `(R, count)`, False = padding.
        sizes (`tuple[int, ...]`): numbers of each image: 1 of pixels, its tokens of features.
    """

    of: str
    dtype: torch.dtype
    values: torch.Tensor
    real: torch.Tensor | None
    sizes: tuple[int, ...]

    def append(self, later: Digests) -> Digests:
        """These and `later` ones of the same kind and the same rows."""
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
        """The numbers of each row's real images."""
        values, real = self.values.cpu().numpy(), self.real_or_all().cpu().numpy()
        return [row[mask] for row, mask in zip(values, real)]

    def blocks(self, row: int) -> list[bytes]:
        """The numbers of each real image of a row."""
        values, real = self.values[row].cpu().numpy(), self.real_or_all()[row].cpu().numpy()
        ends = np.cumsum(self.sizes)
        blocks = [(values[end - size : end], real[end - size : end]) for size, end in zip(self.sizes, ends)]
        return [block[mask].tobytes() for block, mask in blocks if mask.any()]


class Known(NamedTuple):
    """How many of the given images (of pixels) or tokens (of features) a cache holds, for each row."""

    counts: list[int]
    covers_cache: bool  # the given ones start with all that the cache holds


def digest(images: torch.Tensor) -> torch.Tensor:
    """One number an image.

    A sum of mixed words of 64 bits, modulo 2^64: exact and independent of the order of summation, so equal images have
    equal digests in every batch, and unequal ones differ but for one chance in about 2^60. Each word is multiplied by an odd
    number of its own, between two shifts that bring its high bits down: a flipped sign must not cancel another.

    Args:
        images (`torch.Tensor`): `(R, num_images, ...)`, pixels or features.

    Returns:
        `torch.LongTensor`: `(R, num_images)`.
    """
    data = images.detach().flatten(2).contiguous().view(torch.uint8)
    if data.shape[-1] % 8:
        data = nn.functional.pad(data, (0, -data.shape[-1] % 8))
    words = data.view(torch.int64)
    weights = torch.arange(1, words.shape[-1] + 1, device=words.device) * 6364136223846793005 + 1442695040888963407
    weights = (weights ^ (weights >> 29)) | 1
    mixed = ((words ^ (words >> 32)) + images[:1, :1].numel()) * weights  # black images of other sizes differ too
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
        name (`str`): the argument that they came with.
        images (`torch.Tensor`): the content.
        compute_dtype (`torch.dtype`): the dtype that the model turns them into. Equal in this dtype is equal.
        image_mask (`torch.BoolTensor`, *optional*): `(R, num_images)`, False = padding.
        aspect_ratio_ids (`torch.LongTensor`, *optional*): `(R, num_images)`: the same tiles in another arrangement are another
            image.
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


def find_known(cached: tuple[Digests, ...] | None, given: Digests | None) -> Known:
    """Which of the given images a cache holds, by the rule above.

    Args:
        cached (`tuple[Digests, ...]`, *optional*): of the cached images, one entry a kind; None where they are not known.
        given ([`Digests`], *optional*): of the given images; None where they were not computed.

    Raises:
        ValueError: where it cannot be told, or where the given images are some of the cached ones.
    """
    if cached is None or given is None:
        raise ValueError(
            "`past_key_values` holds images whose content was not recorded (they were cached in training, or combined from "
            "caches of different kinds), so images that come with it cannot be compared to them. Start from an empty cache, or "
            "one of `encode_images`."
        )
    known = next((digests for digests in cached if digests.of == given.of), None)
    nothing = Known([0] * given.values.shape[0], False)
    if known is None:
        return nothing
    if known.dtype != given.dtype:
        raise ValueError(
            f"`{given.of}` holds {given.dtype} values, but the images in `past_key_values` came as {known.dtype}: they cannot be "
            f"compared. Pass {known.dtype} values."
        )
    known_rows, given_rows = known.rows(), given.rows()
    if not any(len(row) for row in known_rows):
        return nothing  # padding images alone
    if all(len(k) <= len(g) and np.array_equal(g[: len(k)], k) for k, g in zip(known_rows, given_rows)):
        return Known([len(row) for row in known_rows], True)
    for row, (known_row, given_row) in enumerate(zip(known_rows, given_rows)):
        cached_blocks, given_blocks = known.blocks(row), given.blocks(row)
        again = sum(_is_part(block, known_row.tobytes()) for block in given_blocks)
        again = again or sum(_is_part(block, given_row.tobytes()) for block in cached_blocks)
        if again:
            raise ValueError(
                f"`{given.of}` must hold all images that `past_key_values` holds, in their order and before new ones, or only new "
                f"ones. Row {row} of the cache holds {len(cached_blocks)}, and {again} of the {len(given_blocks)} given are among "
                "them, in another order, with others left out, or with rows beside it that pass only new ones."
            )
    return nothing


def _is_part(part: bytes, whole: bytes) -> bool:
    """Whether the numbers of 8 bytes in `part` follow one another in `whole`."""
    at = whole.find(part)
    while at != -1 and at % 8:
        at = whole.find(part, at + 1)
    return at != -1
