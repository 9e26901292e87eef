"""How large an image may be: a few kilobytes may unpack to gigabytes. The limits of this process are [`LIMITS`]."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass
class ImageLimits:
    """Limits of the images that are read.

    Example:

    ```python
    >>> import hf_xattn

    >>> hf_xattn.IMAGE_LIMITS.max_pixels = 2**26  # the limit of this process
    >>> hf_xattn.IMAGE_LIMITS.max_pixels = 2**27  # the default
    ```
    """

    max_pixels: int = 2**27  # width times height. At most 11 bytes a pixel are taken while an image is read
    max_frames: int = 4096  # of a video, after `num_frames` or `fps` has chosen some


LIMITS = ImageLimits()  # set its attributes to change them
SIZES = ("size", "crop_size", "pad_size")  # of an image processor
MAX_TILES = 1024


def _sides(size: Any) -> dict[str, Any]:
    """The lengths in a size: a dict, transformers' `SizeDict`, or one number for both sides."""
    if not isinstance(size, dict):
        size = vars(size) if hasattr(size, "__dict__") else {"height": size, "width": size}
    return {key: side for key, side in size.items() if side is not None}


def check_image_processor(image_processor: Any) -> None:
    """Raises a `ValueError` if an image processor, which comes from a file, makes too large images."""
    counts_pixels = hasattr(image_processor, "merge_size")  # Qwen's edges are numbers of pixels
    for name in SIZES:
        sides = _sides(getattr(image_processor, name, None))
        for key, side in sides.items():
            if isinstance(side, bool) or not isinstance(side, (int, float)) or not side >= 0:
                raise ValueError(
                    f"Expected `{name}` of the image processor to be a number of pixels, got {str(side)[:40]!r} for "
                    f"{key!r}."
                )
        edges = [side if counts_pixels and "edge" in key else side * side for key, side in sides.items()]
        pixels = sides["height"] * sides["width"] if {"height", "width"} <= sides.keys() else max(edges, default=0)
        if pixels > LIMITS.max_pixels:
            raise ValueError(
                f"Expected `{name}` of the image processor to be at most {LIMITS.max_pixels} pixels, got {sides}. A "
                "larger limit is set with `hf_xattn.IMAGE_LIMITS.max_pixels`."
            )
    tiles = getattr(image_processor, "max_image_tiles", None)
    if tiles is not None and not (isinstance(tiles, int) and 0 < tiles <= MAX_TILES):
        raise ValueError(
            f"Expected `max_image_tiles` of the image processor to be from 1 to {MAX_TILES}, got {str(tiles)[:40]}."
        )


def resized_pixels(width: int, height: int, image_processor: Any, **kwargs: Any) -> int:
    """Number of pixels to which an image processor enlarges an image; 0 where [`check_image_processor`] bounds it.

    Only a `size` that sets the shortest edge alone leaves the other one open: of an image of 1 x 20000 pixels it makes
    224 x 4480000. `kwargs` are those of the call of the image processor.
    """
    sides = _sides(kwargs.get("size") or getattr(image_processor, "size", None))
    resizes = kwargs.get("do_resize", getattr(image_processor, "do_resize", True)) is not False
    if not resizes or sides.keys() != {"shortest_edge"} or not min(width, height):
        return 0
    return int(sides["shortest_edge"]) ** 2 * max(width, height) // min(width, height)
