"""Describes the image tokens of a batch: the image of each token, padding, and digests of the content.

Some rows have fewer images than others, and some images have fewer tiles. They are padded, and masks say where. The
host reads these masks, so that only real tokens are computed. On a GPU, the host waits for the masks once, when new
images come, and in no decode step. Compiled, exported and captured code has no values that could be read. There,
padding is computed and masked.

A layout never changes, because caches and conversations share it. A conversation that adds or hides images gets a new
layout. The dataclass is not frozen, because transformers' exporters set attributes to move the tensors of a cache to
the model's device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from ..utils.tensor_checks import has_values
from .digests import Digests
from .pytrees import dataclass_node


class RealTokens(NamedTuple):
    """The places of the real tokens of a batch: M of the N tokens in each of R rows, all rows together."""

    coordinates: torch.Tensor  # `(2, M)`, the row and the column of each real token
    shape: tuple[int, int]  # R and N

    def take(self, states: torch.Tensor) -> torch.Tensor:
        """Takes the real tokens of `(R, N, width)`. Returns `(1, M, width)`."""
        rows, columns = self.coordinates.to(states.device)
        return states[rows, columns][None]

    def spread(self, states: torch.Tensor, null_token: bool) -> torch.Tensor:
        """Puts real tokens `(1, M, heads, width)` back to their places. Padding becomes zeros.

        Returns a contiguous tensor `(R, heads, N, width)`. With `null_token` there is one more token in front, which is
        also zero.
        """
        (rows, columns), (num_rows, num_tokens) = self.coordinates.to(states.device), self.shape
        _, _, heads, width = states.shape
        padded = states.new_zeros(num_rows, heads, num_tokens + null_token, width)
        padded[rows, :, columns + int(null_token)] = states[0]
        return padded


@dataclass_node
@dataclass(eq=False)
class ImageLayout:
    """The images of `R` image rows.

    A mask may have a multiple of `R` rows, if text rows that share an image row see different images.
    """

    sizes: tuple[int, ...]  # number of tokens of each image, including padding images
    image_of_token: torch.Tensor  # `(N,)`, index of the image to which each token belongs
    token_mask: torch.Tensor | None = None  # `(R, N)`, False = padding. None if there is no padding
    image_mask: torch.Tensor | None = None  # `(R, num_images)`, False = padding image. None if there is none
    # One entry for each argument that passed images. None if the content of the images was not recorded.
    digests: tuple[Digests, ...] | None = None

    @classmethod
    def of(
        cls,
        sizes: tuple[int, ...],
        device: torch.device,
        token_mask: torch.Tensor | None = None,
        image_mask: torch.Tensor | None = None,
        digests: tuple[Digests, ...] | None = None,
    ) -> ImageLayout:
        """Builds the layout of images whose numbers of tokens are `sizes`. The other arguments are as in the fields."""
        counts = torch.tensor(sizes, device=device)
        image_of_token = torch.arange(len(sizes), device=device).repeat_interleave(counts, output_size=sum(sizes))
        return cls(sizes, image_of_token, token_mask, image_mask, digests)

    @property
    def num_images(self) -> int:
        return len(self.sizes)

    @property
    def counts(self) -> torch.Tensor:
        """Number of real images in each row, `(R,)`, or `(1,)` if all rows have the same number."""
        if self.image_mask is None:
            return self.image_of_token.new_tensor([self.num_images])
        return self.image_mask.sum(dim=-1)

    @property
    def num_tokens(self) -> int:
        return self.image_of_token.shape[0]

    @property
    def mask_rows(self) -> int:
        """Number of rows of the masks; 1 if there is no mask."""
        return max((mask.shape[0] for mask in (self.token_mask, self.image_mask) if mask is not None), default=1)

    def real_tokens(self, rows: int) -> RealTokens | None:
        """Returns the real tokens of `rows` image rows. None if all tokens are real, if none is, or in compiled code.

        If text rows that share an image row have different masks, a token is real if any of their masks says so.
        """
        mask = self.token_mask
        if mask is None or not has_values(mask):
            return None
        real = rows_to(mask, max(rows, mask.shape[0])).unflatten(0, (rows, -1)).any(dim=1)
        coordinates = torch.stack(real.nonzero(as_tuple=True))
        some = 0 < coordinates.shape[1] < real.numel()
        return RealTokens(coordinates, (real.shape[0], real.shape[1])) if some else None

    def append(self, later: ImageLayout) -> ImageLayout:
        """Returns the layout of these images, followed by `later` images of the same rows."""
        return ImageLayout(
            sizes=(*self.sizes, *later.sizes),
            image_of_token=torch.cat([self.image_of_token, later.image_of_token + self.num_images]),
            token_mask=_append_masks(self.token_mask, self.num_tokens, later.token_mask, later.num_tokens),
            image_mask=_append_masks(self.image_mask, self.num_images, later.image_mask, later.num_images),
            digests=_append_digests(self.digests, later.digests),
        )

    def select(self, rows: torch.Tensor, count: int) -> ImageLayout:
        """Returns the layout of the image rows `rows`. `count` is the number of image rows before the selection."""
        return self._taken(rows, lambda mask: rows.to(mask.device) * (mask.shape[0] // count))

    def select_text_rows(self, text_rows: torch.Tensor, batch_size: int, count: int) -> ImageLayout:
        """Returns the layout with one image row for each of `text_rows`: the one that this text row looks at.

        `batch_size` and `count` are the numbers of text rows and of image rows before the selection.
        """
        rows = text_rows // (batch_size // count)
        return self._taken(rows, lambda mask: text_rows.to(mask.device) // (batch_size // mask.shape[0]))

    def _taken(self, rows: torch.Tensor, rows_of: Callable[[torch.Tensor], torch.Tensor]) -> ImageLayout:
        """Returns the layout of the image rows `rows`. `rows_of` returns the rows of a mask that belong to them."""
        images, tokens = (None if mask is None else mask[rows_of(mask)] for mask in (self.image_mask, self.token_mask))
        digests = None if self.digests is None else tuple(part.select(rows) for part in self.digests)
        return replace(self, token_mask=tokens, image_mask=images, digests=digests)

    def of_text(self, image_rows: torch.Tensor) -> ImageLayout:
        """Returns the layout with masks that have one row for each text row. `image_rows` as in [`values_of_text`]."""
        if self.token_mask is None and not bool((image_rows < 0).any()):
            return self
        ones = self.image_of_token.new_ones(int(image_rows.max()) + 1, 1, dtype=torch.bool)
        images, tokens = (
            values_of_text(ones.expand(-1, size) if mask is None else mask, image_rows)
            for mask, size in ((self.image_mask, self.num_images), (self.token_mask, self.num_tokens))
        )
        return replace(self, image_mask=images, token_mask=tokens)

    def narrowed(self, image_mask: torch.Tensor | None, token_mask: torch.Tensor | None) -> ImageLayout:
        """Hides what a caller's masks exclude: images `(rows, num_images)` and tokens `(rows, N)`."""
        images, tokens = self.image_mask, self.token_mask
        if image_mask is not None:
            images = _both(images, image_mask)
            tokens = _both(tokens, image_mask[:, self.image_of_token])
        if token_mask is not None:
            tokens = _both(tokens, token_mask)
        return replace(self, image_mask=images, token_mask=tokens)


def real_coordinates(real: torch.Tensor | None) -> list[tuple[int, int]] | None:
    """Returns the (row, image) of each real image in `(R, n)`. None if all are real, or in compiled code."""
    if real is None or not has_values(real):
        return None
    coordinates = [(row, image) for row, image in real.nonzero().tolist()]
    return None if len(coordinates) == real.numel() else coordinates


def rows_to(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    """Repeats the rows of a tensor, so that each of `rows` text rows has a row of its own."""
    return tensor if tensor.shape[0] == rows else tensor.repeat_interleave(rows // tensor.shape[0], dim=0)


def values_of_text(values: torch.Tensor, image_rows: torch.Tensor) -> torch.Tensor:
    """Returns the values `(R, ...)` of image rows as values `(B, ...)` of text rows.

    `image_rows` `(B,)` holds the image row that each text row looks at. A text row with -1 gets zeros.
    """
    rows = image_rows.to(values.device)
    return values[rows.clamp(min=0)].masked_fill((rows < 0).view(-1, *[1] * (values.dim() - 1)), 0)


def _both(first: torch.Tensor | None, second: torch.Tensor) -> torch.Tensor:
    if first is None:
        return second
    rows = max(first.shape[0], second.shape[0])
    return rows_to(first, rows) & rows_to(second, rows)


def _append_masks(
    first: torch.Tensor | None, first_size: int, second: torch.Tensor | None, second_size: int
) -> torch.Tensor | None:
    if first is not None and second is not None:
        rows = max(first.shape[0], second.shape[0])
        return torch.cat([rows_to(first, rows), rows_to(second, rows)], dim=1)
    if first is not None:
        return torch.cat([first, first.new_ones(first.shape[0], second_size)], dim=1)
    if second is not None:
        return torch.cat([second.new_ones(second.shape[0], first_size), second], dim=1)
    return None


def _append_digests(
    first: tuple[Digests, ...] | None, second: tuple[Digests, ...] | None
) -> tuple[Digests, ...] | None:
    if first is None or second is None:
        return None
    merged = {part.of: part for part in first}
    for part in second:
        merged[part.of] = merged[part.of].append(part) if part.of in merged else part
    return tuple(merged.values())
