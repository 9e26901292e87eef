"""Which images belong to which sample of a packed row: image `k` of a row belongs to the sample that holds marker `k`.

    position_ids          0 1 2 3   0 1   0 1 2
    markers               . 1 2 .   . .   . 3 .
    the sample's images   1 and 2   none  3

Letters: B text rows, T text tokens.
"""

from __future__ import annotations

import torch


def images_of_samples(
    order: torch.Tensor, counted: torch.Tensor, seen: torch.Tensor, starts: torch.Tensor
) -> torch.Tensor:
    """Which images belong to the sample of each text token.

    Args:
        order (`torch.LongTensor`): `(B or 1, num_images)`, number of each image in its row from 1; 0 = padding.
        counted (`torch.BoolTensor`): `(B, T)`, the markers.
        seen (`torch.LongTensor`): `(B, T)`, number of markers up to and including each token.
        starts (`torch.BoolTensor`): `(B, T)`, True at the first token of each sample. In a row of one sample all images belong to
            it, also without markers.

    Returns:
        `torch.BoolTensor`: `(B, T, num_images)`.
    """
    before = torch.where(starts, seen - counted.long(), 0).cummax(dim=-1).values
    ends = torch.cat([starts[:, 1:], torch.ones_like(starts[:, :1])], dim=-1)
    # Markers up to the end of the sample: the first end that comes, read from the right.
    later = torch.where(ends, seen, torch.iinfo(seen.dtype).max).flip(-1).cummin(dim=-1).values.flip(-1)
    order = order[:, None]
    belongs = (order > before[..., None]) & (order <= later[..., None])
    alone = ~starts[:, 1:].any(dim=-1)
    return belongs | alone[:, None, None]
