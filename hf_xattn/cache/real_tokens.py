"""Which image tokens of a padded batch are real, read on the host: padding then costs no work.

Rows with fewer images than the widest, and images with fewer tiles than others, are padded, and masks tell where. A GPU
waits once for the values of these masks, where images come in; a layout remembers them, so no decode step waits.
Compiled, exported and captured code has no values to read: there, everything here answers None, and the padding is
computed and masked.

Letters: R image rows, N image tokens of a row, M real image tokens of all rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..utils.tensor_checks import has_values
from .image_layout import ImageLayout, rows_to


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


def real_coordinates(real: torch.Tensor | None) -> list[tuple[int, int]] | None:
    """The (row, image) of each real image in `(R, n)`, or None if all are real."""
    if real is None or not has_values(real):
        return None
    coordinates = [(row, image) for row, image in real.nonzero().tolist()]
    return None if len(coordinates) == real.numel() else coordinates


def real_tokens(layout: ImageLayout, rows: int) -> RealTokens | None:
    """The real tokens of a layout with `rows` image rows, or None if all tokens are real, or none is."""
    mask = layout.token_mask
    if mask is None or not has_values(mask):
        return None
    if getattr(layout.real_tokens, "value", None) is None:
        real = rows_to(mask, max(rows, mask.shape[0])).unflatten(0, (rows, -1)).any(dim=1)
        coordinates = torch.stack(real.nonzero(as_tuple=True))
        some = 0 < coordinates.shape[1] < real.numel()
        layout.real_tokens.value = (RealTokens(coordinates, (real.shape[0], real.shape[1])) if some else None,)
    return layout.real_tokens.value[0]
