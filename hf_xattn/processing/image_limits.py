"""How large an image may be, and from where and how long it may be fetched.

A few kilobytes may unpack to gigabytes, an address may send bytes for ever, and an address that a client names may lie
in the network of the server. The limits of this process are [`LIMITS`]; `hf-xattn serve` has its own.

Timeouts of httpx bound each wait only, and its decoders unpack whatever comes. So a download as a whole has a deadline,
and its content is unpacked here. Where private addresses are refused, the host's name is resolved here, also of each
redirect, and the connection goes to a checked address: the name may resolve to another one a moment later.
"""

from __future__ import annotations

import ipaddress
import socket
import threading
import zlib
from dataclasses import dataclass
from typing import Any
from urllib.parse import urljoin, urlsplit

from ..utils.tensor_checks import type_name


@dataclass
class ImageLimits:
    """Limits of the images that are read. Raises an error for a limit that is no number, or not positive."""

    max_pixels: int = 2**27  # width times height. At most 11 bytes a pixel are taken while an image is read
    max_bytes: int = 2**26  # of an image that is downloaded, or given as base64
    max_seconds: float = 60.0  # for a whole download
    private_addresses: bool = True  # whether images may be fetched from this machine and from private networks
    max_frames: int = 4096  # of a video, after `num_frames` or `fps` has chosen some

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


def resized_pixels(width: int, height: int, image_processor: Any, **kwargs: Any) -> int:
    """Number of pixels to which an image processor enlarges an image; 0 where [`check_image_processor`] bounds it.

    Only a `size` that sets the shortest edge alone leaves the other one open: of an image of 1 x 20000 pixels it makes
    224 x 4480000. `kwargs` are those of the call of the image processor.
    """
    size = kwargs.get("size") or getattr(image_processor, "size", None)
    resizes = kwargs.get("do_resize", getattr(image_processor, "do_resize", True)) is not False
    if not isinstance(size, dict):
        size = vars(size) if hasattr(size, "__dict__") else {}
    sides = {key: side for key, side in size.items() if side is not None}
    if not resizes or sides.keys() != {"shortest_edge"} or not min(width, height):
        return 0
    return int(sides["shortest_edge"]) ** 2 * max(width, height) // min(width, height)


MOST_REDIRECTS = 5
REDIRECTS = (301, 302, 303, 307, 308)
PACKED = ("gzip", "x-gzip", "deflate")


def download(url: str, limits: ImageLimits) -> bytes:
    """Returns the content of an `http://` or `https://` address, or raises a `ValueError`."""
    from huggingface_hub.utils import httpx  # as transformers' own `load_image`

    late = f"expected it within {limits.max_seconds} seconds (`ImageLimits.max_seconds`)."
    with _Deadline(limits.max_seconds) as deadline:
        try:
            # A proxy of the environment would resolve names itself, so it is used only where all addresses are allowed.
            with httpx.Client(
                timeout=limits.max_seconds, trust_env=limits.private_addresses, headers={"Accept-Encoding": "identity"}
            ) as client:
                for _ in range(MOST_REDIRECTS + 1):
                    where, options = (url, {}) if limits.private_addresses else _pinned(url)
                    extensions = {**options.pop("extensions", {}), "trace": deadline.watch}
                    with client.stream("GET", where, extensions=extensions, **options) as answer:
                        if answer.status_code in REDIRECTS and "location" in answer.headers:
                            url = urljoin(url, answer.headers["location"])
                            if urlsplit(url).scheme not in ("http", "https"):
                                raise ValueError(f"it leads to {url[:80]!r}: expected http:// or https://.")
                            continue
                        answer.raise_for_status()
                        content = _content(answer, limits)
                        if deadline.passed:
                            raise ValueError(late)
                        return content
        except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:
            raise ValueError(late if deadline.passed else str(error) or type(error).__name__) from error
    raise ValueError(f"it leads from address to address more than {MOST_REDIRECTS} times.")


class _Deadline:
    def __init__(self, seconds: float):
        self.passed = False
        self._connection: Any = None
        self._timer = threading.Timer(seconds, self._end)
        self._timer.daemon = True

    def __enter__(self) -> _Deadline:
        self._timer.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._timer.cancel()

    def watch(self, event: str, info: dict[str, Any]) -> None:
        """Httpx calls this with each step of a request (its extension `trace`)."""
        if event in ("connection.connect_tcp.complete", "connection.start_tls.complete"):
            self._connection = info["return_value"].get_extra_info("socket")
        if self.passed:
            self._end()

    def _end(self) -> None:
        self.passed = True
        if self._connection is not None:
            try:
                # Wakes the thread that reads from it, and then sees the end. Of TLS too: `SSLSocket` has a state that
                # only this thread may touch.
                socket.socket.shutdown(self._connection, socket.SHUT_RDWR)
            except OSError:  # closed already
                pass


def _content(answer: Any, limits: ImageLimits) -> bytes:
    too_large = f"expected at most {limits.max_bytes} bytes (`ImageLimits.max_bytes`)"
    length = answer.headers.get("content-length", "")
    if length.isdigit() and int(length[:20]) > limits.max_bytes:
        raise ValueError(f"{too_large}, got {length[:20]}.")
    packed = answer.headers.get("content-encoding", "").strip().lower()
    if packed not in ("", "identity", *PACKED):
        raise ValueError(
            f"it is compressed as {packed[:40]!r}: expected no compression, or one of {', '.join(PACKED)}."
        )
    unpacker = zlib.decompressobj(wbits=47) if packed in PACKED else None  # 47: of either kind
    content = bytearray()
    for part in answer.iter_raw():
        if unpacker is not None:
            try:
                part = unpacker.decompress(part, limits.max_bytes + 1 - len(content))
            except zlib.error as error:
                raise ValueError(f"it is compressed as {packed!r}, and broken: {error}") from error
        content += part
        if len(content) > limits.max_bytes:
            raise ValueError(f"{too_large}, got more.")
    return bytes(content)


def _pinned(url: str) -> tuple[str, dict[str, Any]]:
    """The address with a public IP in place of the host's name, and what else the request needs."""
    split = urlsplit(url)
    try:
        host, port = split.hostname or "", split.port
        found = socket.getaddrinfo(host, port or (443 if split.scheme == "https" else 80), type=socket.SOCK_STREAM)
    except (OSError, ValueError, UnicodeError) as error:
        raise ValueError(f"its host cannot be found: {error}") from error
    addresses = [str(entry[4][0]).partition("%")[0] for entry in found]
    if not addresses or not all(map(is_public, addresses)):
        raise ValueError(
            f"{host} is an address of this machine or of a private network, from which no images are fetched "
            "(`ImageLimits.private_addresses`)."
        )
    address = addresses[0]
    place = f"[{address}]" if ":" in address else address
    netloc = place if port is None else f"{place}:{port}"
    named = f"[{host}]" if ":" in host else host
    headers = {"Host": named if port is None else f"{named}:{port}"}
    return split._replace(netloc=netloc).geturl(), {"headers": headers, "extensions": {"sni_hostname": host}}


def is_public(address: str) -> bool:
    """Whether an IP address is one of the public internet: not of this machine, a private network, or a group."""
    ip = ipaddress.ip_address(address)
    if isinstance(ip, ipaddress.IPv6Address):
        inner = ip.ipv4_mapped or ip.sixtofour or (ip.teredo[1] if ip.teredo else None)
        if inner is not None:
            return is_public(str(inner))
        if ip in ipaddress.ip_network("64:ff9b::/96"):  # translated to IPv4 by the network
            return is_public(str(ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)))
    return ip.is_global and not ip.is_multicast and not ip.is_reserved
