"""Fetches images from the web addresses that clients name, where the operator of a server allows it.

An address may send bytes for ever, or lie in the network of the server. So a download has a largest size; the caller
sets its deadline. Where private addresses are refused, the host's name is resolved here, also of each redirect, and the
connection goes to a checked address: the name may resolve to another one a moment later.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from typing import Any
from urllib.parse import urljoin, urlsplit

from .request_limits import ServerLimits


MOST_REDIRECTS = 5
REDIRECTS = (301, 302, 303, 307, 308)


async def download(url: str, limits: ServerLimits) -> bytes:
    """Returns the content of an `http://` or `https://` address, or raises a `ValueError`."""
    from huggingface_hub.utils import httpx  # as transformers

    try:
        # A proxy of the environment would resolve names itself, so it is used only where all addresses are allowed.
        async with httpx.AsyncClient(
            timeout=limits.max_seconds, trust_env=limits.private_addresses, headers={"Accept-Encoding": "identity"}
        ) as client:
            for _ in range(MOST_REDIRECTS + 1):
                where, options = (url, {}) if limits.private_addresses else await pinned(url)
                async with client.stream("GET", where, **options) as answer:
                    if answer.status_code not in REDIRECTS or "location" not in answer.headers:
                        answer.raise_for_status()
                        return await _content(answer, limits.max_image_bytes)
                    url = urljoin(url, answer.headers["location"])
                    if urlsplit(url).scheme not in ("http", "https"):
                        raise ValueError(f"it leads to {url[:80]!r}: expected http:// or https://.")
    except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:
        raise ValueError(str(error) or type(error).__name__) from error
    raise ValueError(f"it leads from address to address more than {MOST_REDIRECTS} times.")


async def _content(answer: Any, most: int) -> bytes:
    packed = answer.headers.get("content-encoding", "identity")
    if packed.strip().lower() not in ("", "identity"):  # a few bytes may unpack to gigabytes
        raise ValueError(f"it is compressed as {packed[:40]!r}: expected no compression.")
    content = bytearray()
    async for part in answer.aiter_raw():
        content += part
        if len(content) > most:
            raise ValueError(f"expected at most {most} bytes, got more.")
    return bytes(content)


async def pinned(url: str) -> tuple[str, dict[str, Any]]:
    """The address with a public IP in place of the host's name, and what else the request needs."""
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
    """Whether an IP address is one of the public internet: not of this machine, a private network, or a group."""
    ip = ipaddress.ip_address(address)
    if isinstance(ip, ipaddress.IPv6Address):
        inner = ip.ipv4_mapped or ip.sixtofour or (ip.teredo[1] if ip.teredo else None)
        if inner is not None:
            return is_public(str(inner))
        if ip in ipaddress.ip_network("64:ff9b::/96"):  # translated to IPv4 by the network
            return is_public(str(ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)))
    is_local = isinstance(ip, ipaddress.IPv6Address) and ip.is_site_local  # `is_global` says yes to it
    return ip.is_global and not (ip.is_multicast or ip.is_reserved or is_local)
