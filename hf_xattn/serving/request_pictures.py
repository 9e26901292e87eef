"""Reads the images of a request to `hf-xattn serve`.

A file of a few bytes may decode to an image of many pixels. The image processor may also enlarge a narrow image to many
pixels. So the headers of all images of a request are read and their pixels are counted, before any image is decoded.

Web addresses are only downloaded if the operator of the server allows it. An address may send bytes without end, so a
download has a largest size, and a request has a deadline. An address may also be in the network of the server. If
private addresses are not allowed, the host name of the address and of each redirect is resolved here. The connection
then goes to the IP address that was checked, because the host name may resolve to another one a moment later.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from typing import Any
from urllib.parse import urljoin, urlsplit

from ..processing import image_reading
from ..processing.image_limits import resized_pixels
from ..utils.tensor_checks import type_name
from .request_limits import Refused, ServerLimits


# For each image: its place in the request, in words, and the message part that holds it under `image`.
Pictures = list[tuple[str, dict[str, Any]]]
WEB, DATA = ("http://", "https://"), "data:image/"
MOST_REDIRECTS = 5
REDIRECTS = (301, 302, 303, 307, 308)


async def open_pictures(pictures: Pictures, image_processor: object, limits: ServerLimits) -> None:
    """Replaces the address of each image by the opened image, whose pixels are not decoded yet.

    Files are opened in threads, so that other requests do not wait.

    Raises:
        Refused: for too many images or pixels, for an address that cannot be loaded, and for data that are not an
            image.
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
        loaded += len(source) if isinstance(source, bytes) else 0  # The body of the request was limited before.
        most = limits.max_request_bytes or limits.room_for_images
        if loaded > most:
            raise Refused(
                f"Expected the images behind the web addresses of a request to have at most {most} bytes in all, got "
                f"more up to {place}. Send fewer or smaller images."
            )
        part["image"] = await asyncio.to_thread(_read, place, image_reading.open_image, source)
        width, height = part["image"].size
        pixels += max(width * height, resized_pixels(width, height, image_processor))
        if pixels > limits.max_pixels:
            raise Refused(
                f"Expected the images of a request to have at most {limits.max_pixels} pixels in all, before and after "
                f"the image processor resizes them, got {pixels} up to {place}. Send fewer or smaller images, or raise "
                "the limit of the server: `hf-xattn serve --max-request-megapixels`."
            )


def unpack_pictures(pictures: Pictures) -> None:
    """Decodes the opened images to upright RGB images, in place. Raises [`Refused`] for a broken image."""
    for place, part in pictures:
        part["image"] = _read(place, image_reading.read_image, part["image"])


async def _content(place: str, url: Any, limits: ServerLimits, seconds: float) -> str | bytes:
    """Returns a data URL unchanged, or the content of a web address. Anything else is refused, such as a file path."""
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


async def download(url: str, limits: ServerLimits) -> bytes:
    """Returns the content of an `http://` or `https://` address, or raises a `ValueError`."""
    from huggingface_hub.utils import httpx  # as transformers

    try:
        # A proxy of the environment would resolve host names itself, so it is only used if all addresses are allowed.
        async with httpx.AsyncClient(
            timeout=limits.max_seconds, trust_env=limits.private_addresses, headers={"Accept-Encoding": "identity"}
        ) as client:
            for _ in range(MOST_REDIRECTS + 1):
                where, options = (url, {}) if limits.private_addresses else await pinned(url)
                async with client.stream("GET", where, **options) as answer:
                    if answer.status_code not in REDIRECTS or "location" not in answer.headers:
                        answer.raise_for_status()
                        return await _received(answer, limits.max_image_bytes)
                    url = urljoin(url, answer.headers["location"])
                    if urlsplit(url).scheme not in ("http", "https"):
                        raise ValueError(f"it leads to {url[:80]!r}: expected http:// or https://.")
    except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:
        raise ValueError(str(error) or type(error).__name__) from error
    raise ValueError(f"it leads from address to address more than {MOST_REDIRECTS} times.")


async def _received(answer: Any, most: int) -> bytes:
    packed = answer.headers.get("content-encoding", "identity")
    if packed.strip().lower() not in ("", "identity"):  # A few compressed bytes may unpack to gigabytes.
        raise ValueError(f"it is compressed as {packed[:40]!r}: expected no compression.")
    content = bytearray()
    async for part in answer.aiter_raw():
        content += part
        if len(content) > most:
            raise ValueError(f"expected at most {most} bytes, got more.")
    return bytes(content)


async def pinned(url: str) -> tuple[str, dict[str, Any]]:
    """Returns the address with a public IP in the place of the host name, and further arguments of the request.

    Raises a `ValueError` for a host that is not found, and for one of this machine or of a private network.
    """
    split = urlsplit(url)
    try:
        host, port = split.hostname or "", split.port
        usual = 443 if split.scheme == "https" else 80
        found = await asyncio.get_running_loop().getaddrinfo(host, port or usual, type=socket.SOCK_STREAM)
    except (OSError, ValueError, UnicodeError) as error:
        raise ValueError(f"its host cannot be found: {error}") from error
    addresses = [str(entry[4][0]).partition("%")[0] for entry in found]
    if not addresses or not all(map(is_public, addresses)):
        raise ValueError(
            f"{host} is an address of this machine or of a private network, from which this server fetches no images."
        )
    place, named = (f"[{name}]" if ":" in name else name for name in (addresses[0], host))
    end = "" if port is None else f":{port}"
    options = {"headers": {"Host": named + end}, "extensions": {"sni_hostname": host}}
    return split._replace(netloc=place + end).geturl(), options


def is_public(address: str) -> bool:
    """Whether an IP address belongs to the public internet, and not to this machine, a private network or a group."""
    ip = ipaddress.ip_address(address)
    if isinstance(ip, ipaddress.IPv6Address):
        inner = ip.ipv4_mapped or ip.sixtofour or (ip.teredo[1] if ip.teredo else None)
        if inner is not None:
            return is_public(str(inner))
        if ip in ipaddress.ip_network("64:ff9b::/96"):  # translated to IPv4 by the network
            return is_public(str(ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)))
    is_local = isinstance(ip, ipaddress.IPv6Address) and ip.is_site_local  # `is_global` is True for such addresses.
    return ip.is_global and not (ip.is_multicast or ip.is_reserved or is_local)
