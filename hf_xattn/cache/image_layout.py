"""Describes the image tokens of a batch: the image of each token, padding, and digests of the content.

Rows with fewer images than the widest, and images with fewer tiles than others, are padded, and masks tell where. The
real tokens are read on the host, so that padding costs no work. A GPU waits once for the values of these masks, where
images come in; a layout remembers them, so no decode step waits. Compiled, exported and captured code has no values to
read: there the answer is None, and the padding is computed and masked.

A layout never changes, because caches and conversations share it. A conversation that adds or hides images gets a new
layout. The dataclass is not frozen, because transformers' exporters set attributes to move the tensors of a cache to
the model's device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from ..utils.tensor_checks import has_values
from .digests import Digests
from .pytrees import UnexportedValue, dataclass_node


class RealTokens(NamedTuple):
    """Where the real tokens of a batch stand."""

    coordinates: torch.Tensor  # `(2, M)`, row and column of each
    shape: tuple[int, int]  # R and N

    def take(self, states: torch.Tensor) -> torch.Tensor:
        """`(R, N, width)` to `(1, M, width)`."""
        rows, columns = self.coordinates.to(states.device)
        return states[rows, columns][None]

    def spread(self, states: torch.Tensor, null_token: bool) -> torch.Tensor:
        """`(1, M, heads, width)` to a contiguous `(R, heads, N, width)`. Padding and null token are zeros."""
        (rows, columns), (num_rows, num_tokens) = self.coordinates.to(states.device), self.shape
        _, _, heads, width = states.shape
        padded = states.new_zeros(num_rows, heads, num_tokens + null_token, width)
        padded[rows, :, columns + int(null_token)] = states[0]
        return padded


@dataclass_node
@dataclass(eq=False)
class ImageLayout:
    """The images of `R` rows.

    A mask may have a multiple of `R` rows, if text rows that share an image row see different images.
    """

    sizes: tuple[int, ...]  # number of tokens of each image, including padding images
    image_of_token: torch.Tensor  # `(N,)`, index of each token's image
    token_mask: torch.Tensor | None = None  # (R, N), False = padding; None if there is no padding
    image_mask: torch.Tensor | None = None  # (R, num_images), False = padding image
    # one for pixels and one for features; None if the content was not recorded
    digests: tuple[Digests, ...] | None = None

    def __post_init__(self) -> None:
        # What [`real_tokens`] has read of the masks, in a tuple; None if it has not yet.
        self._real_tokens: UnexportedValue[Any] = UnexportedValue(None)

    @classmethod
    def of(
        cls,
        sizes: tuple[int, ...],
        device: torch.device,
        token_mask: torch.Tensor | None = None,
        image_mask: torch.Tensor | None = None,
        digests: tuple[Digests, ...] | None = None,
    ) -> ImageLayout:
        """Makes the layout of images with `sizes` tokens."""
        counts = torch.tensor(sizes, device=device)
        image_of_token = torch.arange(len(sizes), device=device).repeat_interleave(counts, output_size=sum(sizes))
        return cls(sizes, image_of_token, token_mask, image_mask, digests)

    @property
    def num_images(self) -> int:
        return len(self.sizes)

    @property
    def counts(self) -> torch.Tensor:
        """`(R,)` or `(1,)`, number of real images in each row."""
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
        """The real tokens of `rows` image rows, or None if all tokens are real, or none is."""
        mask = self.token_mask
        if mask is None or not has_values(mask):
            return None
        if getattr(self._real_tokens, "value", None) is None:
            real = rows_to(mask, max(rows, mask.shape[0])).unflatten(0, (rows, -1)).any(dim=1)
            coordinates = torch.stack(real.nonzero(as_tuple=True))
            some = 0 < coordinates.shape[1] < real.numel()
            self._real_tokens.value = (RealTokens(coordinates, (real.shape[0], real.shape[1])) if some else None,)
        return self._real_tokens.value[0]

    def append(self, later: ImageLayout) -> ImageLayout:
        """The layout of these images, followed by `later` images of the same rows."""
        return ImageLayout(
            sizes=(*self.sizes, *later.sizes),
            image_of_token=torch.cat([self.image_of_token, later.image_of_token + self.num_images]),
            token_mask=_append_masks(self.token_mask, self.num_tokens, later.token_mask, later.num_tokens),
            image_mask=_append_masks(self.image_mask, self.num_images, later.image_mask, later.num_images),
            digests=_append_digests(self.digests, later.digests),
        )

    def select(self, rows: torch.Tensor, count: int) -> ImageLayout:
        """The image rows `rows` (of `count`), one for each text row."""
        return self._taken(rows, lambda mask: rows.to(mask.device) * (mask.shape[0] // count))

    def select_text_rows(self, text_rows: torch.Tensor, batch_size: int, count: int) -> ImageLayout:
        """The image rows that the text rows `text_rows` look at, one image row for each text row.

        `batch_size` and `count` are the numbers of text rows and of image rows before the selection.
        """
        rows = text_rows // (batch_size // count)
        return self._taken(rows, lambda mask: text_rows.to(mask.device) // (batch_size // mask.shape[0]))

    def _taken(self, rows: torch.Tensor, rows_of: Callable[[torch.Tensor], torch.Tensor]) -> ImageLayout:
        """The image rows `rows`, and the rows of each mask that `rows_of` names for it."""
        images, tokens = (None if mask is None else mask[rows_of(mask)] for mask in (self.image_mask, self.token_mask))
        digests = None if self.digests is None else tuple(part.select(rows) for part in self.digests)
        return replace(self, token_mask=tokens, image_mask=images, digests=digests)

    def of_text(self, image_rows: torch.Tensor) -> ImageLayout:
        """The layout with masks of one row for each text row; `image_rows` `(B,)` as in [`values_of_text`]."""
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
    """The (row, image) of each real image in `(R, n)`, or None if all are real."""
    if real is None or not has_values(real):
        return None
    coordinates = [(row, image) for row, image in real.nonzero().tolist()]
    return None if len(coordinates) == real.numel() else coordinates


def rows_to(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    """Repeats the rows of a tensor, so that each of `rows` text rows has its own."""
    return tensor if tensor.shape[0] == rows else tensor.repeat_interleave(rows // tensor.shape[0], dim=0)


def values_of_text(values: torch.Tensor, image_rows: torch.Tensor) -> torch.Tensor:
    """Values `(R, ...)` of image rows as `(B, ...)`, for text rows that look at `image_rows` `(B,)`; zeros for a -1."""
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
