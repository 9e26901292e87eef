"""Which images belong to which sample of a packed row: image `k` of a row belongs to the sample that holds marker `k`.

    position_ids          0 1 2 3   0 1   0 1 2
    markers               . 1 2 .   . .   . 3 .
    the sample's images   1 and 2   none  3

Letters: B text rows, T text tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..configuration_xattn import XAttnConfig


class PackedText(NamedTuple):
    """Text of which some rows are packed: [`Samples`] of the core."""

    starts: torch.Tensor  # `(B, T)`, True at the first token of each sample
    markers: torch.Tensor | None = None  # `(B, T)`, the image markers; None if they are unknown

    def with_markers(self, markers: torch.Tensor | None) -> PackedText:
        return self._replace(markers=markers)

    def check_images(self, config: XAttnConfig, images: torch.Tensor, markers: torch.Tensor) -> None:
        """Raises a `ValueError` if a packed row has not one marker for each image: images would go to wrong samples.

        Compiled code ends in a `RuntimeError`. `images`, `markers`: `(B,)`, numbers of real images and of markers.
        """
        differ = self.starts[:, 1:].any(dim=-1) & (images != markers)
        if torch.compiler.is_compiling():
            said = "Packed rows have not one image marker for each image. Run without `torch.compile` to read which."
            torch._assert_async(~differ.any(), said)
        elif bool(differ.any()):
            raise ValueError(
                f"Expected one image marker (token {config.image_token_id}) in `input_ids` for each image of packed "
                f"rows, because a marker tells the sample of its image: {images.tolist()} images a row, got "
                f"{markers.tolist()} markers."
            )

    def images_of_samples(self, order: torch.Tensor, counted: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        """Which images belong to the sample of each text token, `(B, T, num_images)`.

        Args:
            order (`torch.LongTensor`): `(B or 1, num_images)`, number of each image in its row from 1; 0 = padding.
            counted (`torch.BoolTensor`): `(B, T)`, the markers.
            seen (`torch.LongTensor`): `(B, T)`, number of markers up to and including each token.

        In a row of one sample all images belong to it, also without markers.
        """
        starts = self.starts
        before = _before_sample(counted, seen, starts)
        ends = torch.cat([starts[:, 1:], torch.ones_like(starts[:, :1])], dim=-1)
        # Markers up to the end of the sample: the first end that comes, read from the right.
        later = torch.where(ends, seen, torch.iinfo(seen.dtype).max).flip(-1).cummin(dim=-1).values.flip(-1)
        order = order[:, None]
        belongs = (order > before[..., None]) & (order <= later[..., None])
        alone = ~starts[:, 1:].any(dim=-1)
        return belongs | alone[:, None, None]


def places_in_samples(order: torch.Tensor, markers: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    """The place of each image among those of its sample, from 0, `(B, num_images)`; 0 for padding.

    `order` and `starts`: as above, both with B rows. `markers`: `(B, T)`, in a packed row one for each image.
    """
    seen = markers.cumsum(dim=-1)
    before = _before_sample(markers, seen, starts)
    # Of each image, by its number in the row: number 0 takes what is no marker.
    number = torch.where(markers, seen, 0).clamp(max=order.shape[1])
    before_image = order.new_zeros(order.shape[0], order.shape[1] + 1).scatter(1, number, before)
    return (order - 1 - before_image.gather(1, order)).clamp(min=0)


def _before_sample(counted: torch.Tensor, seen: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    """`(B, T)`, number of markers in front of each token's sample."""
    return torch.where(starts, seen - counted.long(), 0).cummax(dim=-1).values
