"""Limits of the size of images. They are needed because a file of a few kilobytes may unpack to gigabytes.

[`LIMITS`] holds the limits of this process.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass
class ImageLimits:
    """Limits of the images that are read.

    Args:
        max_pixels (`int`): width times height of an image. While an image is read, it takes at most 11 bytes per pixel.
        max_frames (`int`): number of frames of a video, after `num_frames` or `fps` has chosen some.

    Example:

    ```python
    >>> import hf_xattn

    >>> hf_xattn.IMAGE_LIMITS.max_pixels = 2**26  # the limit of this process
    >>> hf_xattn.IMAGE_LIMITS.max_pixels = 2**27  # the default
    ```
    """

    max_pixels: int = 2**27
    max_frames: int = 4096


LIMITS = ImageLimits()  # Set its attributes to change the limits.
SIZES = ("size", "crop_size", "pad_size")  # attributes of an image processor that hold sizes
MAX_TILES = 1024


def _sides(size: Any) -> dict[str, Any]:
    """Returns the lengths in a size: a dict, a `SizeDict` of transformers, or one number for both sides."""
    if not isinstance(size, dict):
        size = vars(size) if hasattr(size, "__dict__") else {"height": size, "width": size}
    return {key: side for key, side in size.items() if side is not None}


def check_image_processor(image_processor: object) -> None:
    """Raises a `ValueError` if an image processor would make images that are too large.

    The settings of an image processor come from a file, which may not be trusted.
    """
    counts_pixels = hasattr(image_processor, "merge_size")  # In Qwen's image processors, an edge is a number of pixels.
    for name in SIZES:
        sides = _sides(getattr(image_processor, name, None))
        edges = [side if counts_pixels and "edge" in key else side * side for key, side in sides.items()]
        pixels = sides["height"] * sides["width"] if {"height", "width"} <= sides.keys() else max(edges, default=0)
        if not pixels <= LIMITS.max_pixels:  # NaN, too
            raise ValueError(
                f"Expected `{name}` of the image processor to be at most {LIMITS.max_pixels} pixels, got {sides}. A "
                "larger limit is set with `hf_xattn.IMAGE_LIMITS.max_pixels`."
            )
    tiles = getattr(image_processor, "max_image_tiles", None)
    if tiles is not None and not (isinstance(tiles, int) and 0 < tiles <= MAX_TILES):
        raise ValueError(
            f"Expected `max_image_tiles` of the image processor to be from 1 to {MAX_TILES}, got {str(tiles)[:40]}."
        )


def resized_pixels(width: int, height: int, image_processor: object, **kwargs: Any) -> int:
    """Returns the number of pixels to which an image processor enlarges an image.

    Only a `size` that sets nothing but the shortest edge needs this check, because the other edge then has no limit: an
    image of 1 x 20000 pixels becomes one of 224 x 4480000. For any other `size`, [`check_image_processor`] is enough
    and 0 is returned.

    Args:
        width, height (`int`): size of the image.
        image_processor: the image processor.
        kwargs: arguments of the call of the image processor.
    """
    sides = _sides(kwargs.get("size") or getattr(image_processor, "size", None))
    resizes = kwargs.get("do_resize", getattr(image_processor, "do_resize", True)) is not False
    if not resizes or sides.keys() != {"shortest_edge"} or not min(width, height):
        return 0
    return int(sides["shortest_edge"]) ** 2 * max(width, height) // min(width, height)
