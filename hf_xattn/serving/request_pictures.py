"""The pictures of a request to `hf-xattn serve`: opened by their headers, counted, and unpacked only then.

A picture of a few bytes may have many pixels, and so may what the image processor makes of a narrow one. So the pixels
of all pictures of a request are counted before any picture is unpacked.
"""

from __future__ import annotations

import asyncio
from typing import Any

from ..processing import image_reading
from ..processing.image_limits import resized_pixels
from ..utils.tensor_checks import type_name
from .fetching import download
from .request_errors import Refused
from .request_limits import ServerLimits


Pictures = list[tuple[str, dict[str, Any]]]  # the place of each in words, and the part that holds it, as `image`
WEB, DATA = ("http://", "https://"), "data:image/"


async def open_pictures(pictures: Pictures, image_processor: Any, limits: ServerLimits) -> None:
    """Puts images, without their pixels, in the place of addresses. Works in threads where other requests would wait.

    Raises [`Refused`] for too many images or pixels, for an address that is not loaded, and for what is no image.
    """
    if len(pictures) > limits.max_images:
        raise Refused(
            f"Expected at most {limits.max_images} images in a request, got {len(pictures)}. Send fewer images, or "
            "raise the limit of the server: `hf-xattn serve --max-images`."
        )
    pixels, loaded, time = 0, 0, asyncio.get_running_loop().time
    until = time() + limits.max_seconds
    for place, part in pictures:
        source = await _content(place, part["image"], limits, until - time())
        loaded += len(source) if isinstance(source, bytes) else 0  # a body was bounded before
        most = limits.max_request_bytes or limits.room_for_images
        if loaded > most:
            raise Refused(
                f"Expected images of at most {most} bytes in all behind web addresses, got more up to {place}."
            )
        part["image"] = await asyncio.to_thread(_read, place, image_reading.open_image, source)
        width, height = part["image"].size
        pixels += max(width * height, resized_pixels(width, height, image_processor))
        if pixels > limits.max_pixels:
            raise Refused(
                f"Expected the images of a request to have at most {limits.max_pixels} pixels in all, as they are and "
                f"as the model reads them, got {pixels} up to {place}. Send fewer or smaller images, or raise the "
                "limit of the server: `hf-xattn serve --max-request-megapixels`."
            )


def unpack_pictures(pictures: Pictures) -> None:
    """Puts upright RGB images in the place of opened ones. Raises [`Refused`] for a broken one."""
    for place, part in pictures:
        part["image"] = _read(place, image_reading.read_image, part["image"])


async def _content(place: str, url: Any, limits: ServerLimits, seconds: float) -> str | bytes:
    """A data URL as it is, or what stands at a web address. Nothing else is read: not the files of this machine."""
    known = (*WEB, DATA) if limits.fetch else (DATA,)
    if not isinstance(url, str) or not url.startswith(known):
        got = repr(url[:60]) if isinstance(url, str) else type_name(url)
        off = "" if limits.fetch else ". The operator lets the server fetch web addresses with `--fetch-images`"
        raise Refused(f"Expected the address of {place} to start with {', '.join(known)}, got {got}{off}.")
    if not url.startswith(DATA):
        try:
            return await asyncio.wait_for(download(url, limits), max(seconds, 0.001))
        except asyncio.TimeoutError:
            why = f"expected all images of a request within {limits.max_seconds:g} seconds."
        except ValueError as error:
            why = str(error)
        raise Refused(f"{url[:80]!r}, the image in {place}, cannot be loaded: {why}")
    if len(url) * 3 // 4 > limits.max_image_bytes:
        raise Refused(f"Expected the image in {place} to have at most {limits.max_image_bytes} bytes.")
    return url


def _read(place: str, read: Any, source: Any) -> Any:
    try:
        return read(source, "image_url")
    except Exception as error:  # decoders raise errors of many kinds
        raise Refused(f"The image in {place} cannot be read: {error}") from error
