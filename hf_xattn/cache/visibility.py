"""Decides which image tokens each text token may see.

In contrast to self-attention, the image axis has no causal order. A text token sees all tokens of an image or none,
unless a mask of the caller says otherwise. The decision depends on the padding (`cache/image_layout.py`), on the image
markers in the text, and on the caller's mask. This is what two rules of `image_visibility` allow (x = attend):

            image 1   image 2            "previous"            "latest"
    text    a a a     b b b              a a a  b b b          a a a  b b b
    The                                  . . .  . . .          . . .  . . .
    <image>                              x x x  . . .          x x x  . . .
    cat                                  x x x  . . .          x x x  . . .
    <image>                              x x x  x x x          . . .  x x x
    dog                                  x x x  x x x          . . .  x x x

For the text and the images that a caller's mask covers, only the mask decides. Text after the mask sees what the last
row of the mask allows, until the next image marker.

[`decide_visibility`] changes nothing. It returns what the text sees and the new progress, which the cache stores when
the forward has succeeded. Letters in shapes: B text rows, T text tokens, N image tokens.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple, Protocol

import torch

from ..configuration_xattn import XAttnConfig
from .image_layout import ImageLayout, rows_to
from .text_progress import CallersMask, TextProgress, count_markers


class Samples(Protocol):
    """Text in which a row may hold several samples. `parts/packed_rows.py` implements this."""

    def with_markers(self, markers: torch.Tensor | None) -> Samples:
        """Returns the same samples, with the image markers of the text `(B, T)`."""

    def check_images(self, config: XAttnConfig, images: torch.Tensor, markers: torch.Tensor) -> None:
        """Raises a `ValueError` if the numbers of images and of markers `(B,)` do not say to which sample each image
        belongs.
        """

    def images_of_samples(self, order: torch.Tensor, counted: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        """Returns which images belong to the sample of each text token, `(B, T, num_images)`.

        Args:
            order (`torch.LongTensor`): from [`image_order`].
            counted (`torch.BoolTensor`): `(B, T)`, the markers that count.
            seen (`torch.LongTensor`): `(B, T)`, number of these markers up to and including each token.
        """


class Visibility(NamedTuple):
    """What the text of a call sees, and the progress after the call."""

    sees: torch.Tensor | None  # `(rows, T or 1, N)`, where `rows` divides B. None if the text sees everything
    progress: TextProgress | None  # None if the progress stays as it was


def decide_visibility(
    rule: str,
    layout: ImageLayout,
    progress: TextProgress,
    markers: torch.Tensor | None,
    mask: CallersMask | None,
    batch_size: int,
    text_len: int,
    samples: Samples | None = None,
) -> Visibility:
    """Decides which image tokens each text token of a call may attend to.

    Args:
        rule (`str`): `image_visibility`: `"all"`, `"previous"`, `"latest"` or `"latest_group"`.
        layout ([`ImageLayout`]): layout of all images, those of the cache and those of the call.
        progress ([`TextProgress`]): progress before this text.
        markers (`torch.BoolTensor`, *optional*): `(B, T)`, True where the text holds an image marker. The rule `"all"`
            does not use it, except for packed rows.
        mask ([`CallersMask`], *optional*): the caller's mask. It may be shorter than this text, and it may also cover
            later text. None: the rows that an earlier call has passed for this text, if there are any.
        batch_size, text_len (`int`): B and T.
        samples ([`Samples`], *optional*): the samples of packed rows. None if no row is packed.
    """
    if mask is None:
        mask = progress.coming
    counted = counts = None
    sees = None
    if rule != "all" or samples is not None:
        assert markers is not None
        sees, counted, counts = _by_markers(rule, layout, progress.counts, markers, samples)
    covered = coming = None
    if mask is not None:
        covered, coming = mask.split(text_len)
    sees, held = _by_mask(sees, layout, progress, counted, covered, batch_size, text_len)
    after = progress.after(counts, counted, covered, coming, held, text_len)
    return Visibility(_without_padding(sees, layout), after)


def _by_markers(
    rule: str,
    layout: ImageLayout,
    past: torch.Tensor | None,
    markers: torch.Tensor,
    samples: Samples | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns what the rule allows `(B, T, N)`, the markers that count `(B, T)`, and the new counts `(B, 3)`."""
    batch_size = markers.shape[0]
    real = layout.image_mask
    order = image_order(markers.new_ones(1, layout.num_images) if real is None else real)
    if order.shape[0] > 1:
        order = rows_to(order, batch_size)
    counted, seen, before_group, counts = count_markers(past, markers, order.amax(dim=-1, keepdim=True))
    images = visible_images(order, seen, before_group, rule)
    if samples is not None:
        images = images & samples.images_of_samples(order, counted, seen)
    return images[:, :, layout.image_of_token], counted, counts


def _by_mask(
    sees: torch.Tensor | None,
    layout: ImageLayout,
    progress: TextProgress,
    counted: torch.Tensor | None,
    covered: CallersMask | None,
    batch_size: int,
    text_len: int,
) -> tuple[torch.Tensor | None, CallersMask | None]:
    """Replaces what the rule allows by the caller's mask, where the mask decides.

    Returns what the text sees, and the row of the mask that applies to later text.
    """
    held = progress.held
    first = 0
    parts = []
    if covered is not None:
        first = covered.text_len
        held = covered.part(-1)
        parts.append(_lay_over(None if sees is None else sees[:, :first], covered, layout, batch_size))
    if held is None:
        return sees, None
    if first < text_len:
        rest = None if sees is None else sees[:, first:text_len]
        laid = _lay_over(rest, held, layout, batch_size)
        if counted is not None and rest is not None:
            # The mask row applies until the next marker in its text row.
            passed = counted[:, first:].cumsum(dim=-1) > 0
            if held.over is not None:
                passed = passed | rows_to(held.over, batch_size)[:, None]
            laid = torch.where(passed[..., None], rest, rows_to(laid, batch_size))
        parts.append(laid)
    if counted is not None:
        over = counted[:, first:].any(dim=-1)
        held = replace(held, over=over if held.over is None else over | rows_to(held.over, batch_size))
    if len(parts) == 1:
        return parts[0], held
    rows = max(part.shape[0] for part in parts)
    lengths = (first, text_len - first)
    wide = [rows_to(part, rows).expand(-1, length, -1) for part, length in zip(parts, lengths)]
    return torch.cat(wide, dim=1), held


def _lay_over(sees: torch.Tensor | None, mask: CallersMask, layout: ImageLayout, batch_size: int) -> torch.Tensor:
    """Returns `mask` for the image tokens that it covers, and `sees` for all other image tokens."""
    first, last, total = mask.first, mask.first + mask.rows.shape[-1], layout.num_tokens
    if first == 0 and last == total:
        return mask.rows
    if sees is None:
        sees = mask.rows.new_ones(1, 1, total)
    rows = rows_to(mask.rows, batch_size)
    shape = (batch_size, max(rows.shape[1], sees.shape[1]), -1)
    sees = sees.expand(*shape)
    return torch.cat([sees[..., :first], rows.expand(*shape), sees[..., last:]], dim=-1)


def _without_padding(sees: torch.Tensor | None, layout: ImageLayout) -> torch.Tensor | None:
    real = layout.token_mask
    if sees is None:
        return None if real is None else real[:, None]
    if real is None:
        return sees
    rows = max(sees.shape[0], real.shape[0])
    return rows_to(sees, rows) & rows_to(real, rows)[:, None]


def image_order(image_mask: torch.Tensor) -> torch.Tensor:
    """Numbers the real images of each row `(R, num_images)` from 1. Padding images get 0."""
    return image_mask.cumsum(dim=-1) * image_mask


def visible_images(
    order: torch.Tensor, markers_seen: torch.Tensor, before_group: torch.Tensor, rule: str
) -> torch.Tensor:
    """Decides which images each text token sees, from the number of image markers up to and including the token.

    As in Flamingo (Alayrac et al., 2022, section 2.3), a marker sees its own image. Markers without an image, for
    example generated ones, are ignored.

    Args:
        order (`torch.LongTensor`): `(B or 1, num_images)`, from [`image_order`].
        markers_seen (`torch.LongTensor`): `(B, T)`.
        before_group (`torch.LongTensor`): `(B, T)`, number of markers before the latest run of adjacent markers.

    Returns:
        `torch.BoolTensor`: `(B, T, num_images)`; with `"all"` `(B or 1, 1, num_images)`.
    """
    if rule == "all":
        return (order > 0)[:, None]
    total = order.amax(dim=-1, keepdim=True)
    seen = torch.minimum(markers_seen, total)[:, :, None]
    order = order[:, None, :]
    if rule == "latest":
        return (order == seen) & (order > 0)
    first = before_group[:, :, None] if rule == "latest_group" else 0
    return (order <= seen) & (order > first)
