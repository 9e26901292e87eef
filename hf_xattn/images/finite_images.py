"""Finds the images of a call that hold NaN or infinite values, or that the vision tower makes such values of.

A call looks only on request (see `maps/image_checks.py`): a GPU has to wait until the values are read.
"""

from __future__ import annotations

import torch

from ..cache.image_layout import rows_to
from .image_inputs import ImageInputs
from .placement import Placement


SHOWN = 8  # images that a message names


# Compiled code cannot raise an error that depends on values: `torch.compile` leaves its graph here, or says so with
# `fullgraph=True`.
@torch.compiler.disable
def check_given(inputs: ImageInputs) -> None:
    """Raises a `ValueError` with the row and index of each image whose pixels or features are not finite.

    Padding is not looked at, because no text sees it.
    """
    images, real = inputs.images, inputs.real_images
    assert images is not None
    if not inputs.pass_connector and inputs.token_mask is not None:
        images = without_padding_tokens(images, inputs.token_mask)
    found = _not_finite(images, real)
    if found:
        raise ValueError(
            f"Expected finite `{inputs.name}`, got {_named(images, found)}. Leave out or repair these images."
        )


@torch.compiler.disable
def check_encoded(
    name: str, from_tower: torch.Tensor, features: torch.Tensor, placement: Placement, tower: str
) -> None:
    """Raises a `ValueError` with the row and index of each finite image whose features are not finite.

    Args:
        name (`str`): the argument with the images: `pixel_values`, or `vision_features`, where the tower did not run.
        from_tower (`torch.Tensor`): the tower's `last_hidden_state`, with `R * n` or `(R, n)` rows.
        features (`torch.Tensor`): `(R, n, tokens, context_size)`, the output of the connector.
        tower (`str`): model type of the tower.
    """
    outputs = {f"the vision tower ({tower})": from_tower.reshape(*features.shape[:2], -1), "the connector": features}
    for part, values in outputs.items():
        found = _not_finite(values, placement.real)
        if found:
            remedy = "Load it in bfloat16 or float32" if values.dtype == torch.float16 else "Look at its weights"
            raise ValueError(
                f"Expected finite values from {part} for finite `{name}`, got {_named(values, found, placement)} "
                f"({values.dtype}). {remedy}."
            )


def without_padding_images(images: torch.Tensor, real: torch.Tensor | None) -> torch.Tensor:
    """Sets padding images to zero in `(R, n, ...)`; `real` is `(R, n)`.

    Padding may hold anything, but 0 times NaN is NaN: in the gradient of a projection too.
    """
    if real is None:
        return images
    padding = ~real.to(images.device)
    return images.masked_fill(padding.view(*real.shape, *[1] * (images.dim() - 2)), 0)


def without_padding_tokens(features: torch.Tensor, token_mask: torch.Tensor | None) -> torch.Tensor:
    """Sets the tokens that no text may see to zero. Attention multiplies their values by 0, and 0 times NaN is NaN.

    Args:
        features (`torch.Tensor`): `(R, n, tokens, width)`.
        token_mask (`torch.BoolTensor`, *optional*): `(rows, n * tokens)`, where `R` divides `rows`: text rows that
            share an image row may see different tokens. Masks that cover other images too are not used.
    """
    rows, num_images, tokens = features.shape[:3]
    if token_mask is None or token_mask.shape[1] != num_images * tokens:
        return features
    real = rows_to(token_mask, max(rows, token_mask.shape[0])).unflatten(0, (rows, -1)).any(dim=1)
    return features.masked_fill(~real.view(rows, num_images, tokens, 1), 0)


def _not_finite(values: torch.Tensor, real: torch.Tensor | None) -> list[tuple[int, int]]:
    """The (row, image) of each real image in `(R, n, ...)` with a value that is not finite."""
    bad = ~values.detach().isfinite().flatten(2).all(dim=-1)
    if real is not None:
        bad = bad & real.to(bad.device)
    return [(row, image) for row, image in bad.nonzero().tolist()]


def _named(values: torch.Tensor, found: list[tuple[int, int]], placement: Placement | None = None) -> str:
    """`nan in row 1, image 0; inf in row 2, image 3`."""
    words = []
    for row, image in found[:SHOWN]:
        kind = "nan" if values[row, image].isnan().any() else "inf"
        place = image if placement is None else placement.index_in_call(row, image)
        words.append(f"{kind} in row {row}, image {place}")
    more = len(found) - SHOWN
    return "; ".join(words) + (f"; and {more} more images" if more > 0 else "")
