"""The pictures of a request to `hf-xattn serve`: opened by their headers, counted, and unpacked only then.

A picture of a few bytes may have many pixels, and so may what the image processor makes of a narrow one. So the pixels
of all pictures of a request are counted before any picture is unpacked.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from fastapi import HTTPException

from ..processing import image_reading
from ..processing.image_limits import ImageLimits, download, resized_pixels
from ..utils.tensor_checks import type_name


if TYPE_CHECKING:
    from PIL.Image import Image

IMAGE_ADDRESSES = ("http://", "https://", "data:image/")


@dataclass(frozen=True)
class RequestBounds:
    """What requests may take of a server's memory. The operator sets it."""

    max_images: int = 64  # of a request
    max_pixels: int = 68 * 10**6  # of all images of a request, as they are or as the image processor resizes them
    max_requests: int = 16  # that are read, wait or are answered at the same time


class Pictures:
    """The opened pictures of a request, in their parts of its messages."""

    def __init__(self, parts: list[tuple[str, dict]], image_processor: Any, limits: ImageLimits, bounds: RequestBounds):
        if len(parts) > bounds.max_images:
            raise HTTPException(
                400,
                f"Expected at most {bounds.max_images} images in a request, got {len(parts)}. Send fewer images, or "
                "raise the limit of the server: `hf-xattn serve --max-images`.",
            )
        self.parts, self.image_processor, self.limits, self.bounds = parts, image_processor, limits, bounds

    async def open(self, most_bytes: int) -> None:
        """Puts the images into the parts, without their pixels. Raises an `HTTPException` for too many pixels, for more
        than `most_bytes` from addresses, and for what is no image.

        Works in threads, so that a slow address does not delay other requests.
        """
        pixels = loaded = 0
        until = time.monotonic() + self.limits.max_seconds
        for place, part in self.parts:
            limits = replace(self.limits, max_seconds=max(round(until - time.monotonic(), 3), 0.001))
            part["image_url"], size = await asyncio.to_thread(open_image, place, part.get("image_url"), limits)
            width, height = part["image_url"].size
            pixels += max(width * height, resized_pixels(width, height, self.image_processor))
            loaded += size
            if pixels > self.bounds.max_pixels:
                raise HTTPException(
                    400,
                    f"Expected the images of a request to have at most {self.bounds.max_pixels} pixels in all, as they "
                    f"are and as the model reads them, got {pixels} up to {place}. Send fewer or smaller images, or "
                    "raise the limit of the server: `hf-xattn serve --max-request-megapixels`.",
                )
            if loaded > most_bytes:
                raise HTTPException(
                    400, f"Expected the images of a request to have at most {most_bytes} bytes in all, got {loaded}."
                )

    def unpack(self) -> None:
        """Puts upright RGB images in their place. Raises an `HTTPException` for a broken one."""
        for place, part in self.parts:
            part["image_url"] = _read(place, image_reading.read_image, part["image_url"], self.limits)


def open_image(place: str, address: Any, limits: ImageLimits) -> tuple[Image, int]:
    """Opens an image from the web or from a data URL. Returns it with the number of bytes from the web.

    Raises an `HTTPException` for any other address: transformers would also read files of this machine.
    """
    url = address.get("url") if isinstance(address, dict) else address
    if not isinstance(url, str) or not url.startswith(IMAGE_ADDRESSES):
        got = repr(url[:60]) if isinstance(url, str) else type_name(url)
        raise HTTPException(
            400, f"Expected the address of {place} to start with {', '.join(IMAGE_ADDRESSES)}, got {got}."
        )
    if url.startswith("data:"):
        return _read(place, image_reading.open_image, url, limits), 0
    content = _read(place, _download, url, limits)
    return _read(place, image_reading.open_image, content, limits), len(content)


def _download(url: str, name: str, *, limits: ImageLimits) -> bytes:
    try:
        return download(url, limits)
    except ValueError as error:
        raise ValueError(f"`{name}` {url[:80]!r} cannot be loaded: {error}") from error


def _read(place: str, read: Any, source: Any, limits: ImageLimits) -> Any:
    try:
        return read(source, "image_url", limits=limits)
    except Exception as error:  # decoders and connections raise errors of many kinds
        raise HTTPException(400, f"The image in {place} cannot be read: {error}") from error
