"""How large an image may be, and from where it may be fetched.

A few kilobytes may unpack to gigabytes, an address may send bytes for ever, and an address that a client names may lie
in the network of the server. The limits of this process are [`LIMITS`]; `hf-xattn serve` has its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..utils.tensor_checks import type_name


@dataclass
class ImageLimits:
    """Limits of the images that are read.

    Attributes:
        max_pixels (`int`): width times height. At most 11 bytes a pixel are taken while an image is read.
        max_bytes (`int`): of an image that is downloaded, or given as base64.
        max_seconds (`float`): for a whole download.
        private_addresses (`bool`): whether images may be fetched from this machine and from private networks.
        max_frames (`int`): of a video, after `num_frames` or `fps` has chosen some.

    Raises:
        TypeError, ValueError: for a limit that is no number, or not positive.
    """

    max_pixels: int = 2**27
    max_bytes: int = 2**26
    max_seconds: float = 60.0
    private_addresses: bool = True
    max_frames: int = 4096

    def __post_init__(self) -> None:
        for name in ("max_pixels", "max_bytes", "max_seconds", "max_frames"):
            value = getattr(self, name)
            whole = name != "max_seconds"
            if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
                raise TypeError(f"Expected `{name}` to be {'an int' if whole else 'a number'}, got {type_name(value)}.")
            if not value > 0:
                raise ValueError(f"Expected `{name}` to be above 0, got {value}.")
        if not isinstance(self.private_addresses, bool):
            raise TypeError(f"Expected `private_addresses` to be a bool, got {type_name(self.private_addresses)}.")


LIMITS = ImageLimits()  # set its attributes to change them
SIZES = ("size", "crop_size", "pad_size")  # of an image processor
MAX_TILES = 1024


def check_image_processor(image_processor: Any) -> None:
    """Raises a `ValueError` if an image processor, which comes from a file, makes too large images."""
    counts_pixels = hasattr(image_processor, "merge_size")  # Qwen's edges are numbers of pixels
    for name in SIZES:
        size = getattr(image_processor, name, None)
        if not isinstance(size, dict):  # transformers' `SizeDict`, or one number for both sides
            size = vars(size) if hasattr(size, "__dict__") else {"height": size, "width": size}
        sides = {key: side for key, side in size.items() if side is not None}
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
                "larger limit is set with `hf_xattn.processing.image_limits.LIMITS.max_pixels`."
            )
    tiles = getattr(image_processor, "max_image_tiles", None)
    if tiles is not None and not (isinstance(tiles, int) and 0 < tiles <= MAX_TILES):
        raise ValueError(
            f"Expected `max_image_tiles` of the image processor to be from 1 to {MAX_TILES}, got {str(tiles)[:40]}."
        )
