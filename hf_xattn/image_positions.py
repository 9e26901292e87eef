"""Places of images in their rows, for a perceiver resampler with `num_image_positions`.

The place of an image is the number of real images before it in its row, those of the cache included. So padding images change nothing,
and images of a later turn go on where the earlier ones ended.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from .configuration_xattn import XAttnConfig
from .image_inputs import ImageInputs
from .image_layout import ImageLayout


def place_in_row(
    config: XAttnConfig, images: ImageInputs, real: torch.Tensor | None, cached: ImageLayout | None
) -> ImageInputs:
    """Adds `positions` to the new images of a call, if the model's resampler reads them.

    Args:
        config ([`XAttnConfig`]): the model's.
        images ([`ImageInputs`]): the new images, `(R, n, ...)`.
        real (`torch.BoolTensor`, *optional*): `(R, n)`, False = a padding image; None if all are real.
        cached ([`ImageLayout`], *optional*): of the images in the cache.

    Raises:
        ValueError: if a row has more images than positions.
    """
    count = 0 if config.perceiver_config is None else config.perceiver_config.num_image_positions
    if not count or images.images is None or images.states is not None:
        return images
    rows, num_images = images.images.shape[:2]
    device = images.images.device
    before = _in_cache(cached, rows)
    if real is None and isinstance(before, int):
        positions = torch.arange(before, before + num_images, device=device).expand(rows, -1)
    else:
        given = torch.ones(rows, num_images, dtype=torch.bool, device=device) if real is None else real
        positions = given.cumsum(dim=1) - 1 + (before if isinstance(before, int) else before[:, None].to(device))
        positions = torch.where(given, positions, 0)  # padding, which no text sees
    held = 0 if cached is None else cached.num_images
    # With padding, rows may hold fewer images than there are columns. Compiled code cannot read how many.
    if num_images and held + num_images > count and not (real is None and isinstance(before, int)):
        most = held + num_images if torch.compiler.is_compiling() else int(positions.max()) + 1
    else:
        most = held + num_images
    if most > count:
        raise ValueError(
            f"Expected at most {count} images in a row (`perceiver_config.num_image_positions`), got `{images.name}` with image {most} "
            "of a row."
        )
    return replace(images, positions=positions)


def _in_cache(cached: ImageLayout | None, rows: int) -> int | torch.Tensor:
    """Number of real images of each row in the cache: one number, or `(R,)`."""
    if cached is None:
        return 0
    if cached.image_mask is None:
        return cached.num_images
    counts = cached.image_mask.sum(dim=1)
    return counts[:: counts.shape[0] // rows] if counts.shape[0] >= rows else counts.expand(rows)
