"""ASGI middleware that refuses requests before an application reads them, for `hf-xattn serve` and `hf-xattn web`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


LINGER = 5.0  # seconds that a refused client may go on sending
BODY_SECONDS = 120.0  # for the whole body of a request
# Nothing on a page comes from another host, and browsers keep it so. No page of another host shows it in a frame,
# where a visitor would click without knowing, except those of Hugging Face Spaces.
POLICY = (
    "default-src 'self' 'unsafe-inline' 'unsafe-eval' blob: data:; base-uri 'self'; form-action 'none'; "
    "object-src 'none'; frame-ancestors 'self' https://huggingface.co https://*.hf.space"
)


@dataclass(frozen=True)
class ServerLimits:
    """What requests to `hf-xattn serve` may take. The operator sets it."""

    max_image_bytes: int = 20 * 2**20  # of an image that a client sends or names
    max_request_bytes: int | None = None  # of the body of a request. Default: `room_for_images`
    max_images: int = 64  # of a request
    max_pixels: int = 68 * 10**6  # of all images of a request, as they are or as the image processor resizes them
    max_requests: int = 16  # that are read, wait or are answered at the same time
    max_new_tokens: int = 4096  # of an answer
    max_beams: int = 8  # of beam search; each takes the memory of an answer
    fetch: bool = False  # whether images are fetched from the web addresses that clients name
    private_addresses: bool = False  # whether also from this machine and from private networks
    max_seconds: float = 30.0  # for all downloads of a request

    @property
    def room_for_images(self) -> int:
        """The bytes of four images of the largest size in base64, and a mebibyte of text."""
        return 4 * (self.max_image_bytes * 4 // 3) + 2**20


class RequestLimits:
    """Reads the body of a request, and gives it to the application at once. Refuses a too large one (413), and one that
    comes too slowly (408).

    The application itself has no limit where the client does not say the length of the body (chunked encoding).

    Args:
        most (`int`): bytes that the body of a request may have.
        remedy (`str`): what the client can do. It follows the limit in the message.
        error (`Callable[[int, str], dict]`): makes the JSON of an error from the status and a message.
    """

    def __init__(self, app: Any, most: int, remedy: str, error: Callable[[int, str], dict[str, Any]]):
        self.app, self.most, self.error = app, most, error
        self.message = f"The request is too large: its body may have {most} bytes. {remedy}"

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        length = dict(scope["headers"]).get(b"content-length", b"0")
        too_large = not length.isdigit() or len(length) > 18 or int(length) > self.most
        body = bytearray()  # not a list: many parts of one byte would take forty times their size
        if not too_large:
            try:
                if not await asyncio.wait_for(self._read(receive, body), BODY_SECONDS):
                    return  # the client has left
            except asyncio.TimeoutError:
                error = f"Expected the body of a request within {BODY_SECONDS:g} seconds."
                await refuse(receive, send, 408, self.error(408, error))
                return
        if too_large or len(body) > self.most:
            body.clear()
            await refuse(receive, send, 413, self.error(413, self.message))
            return
        given: list[dict[str, Any]] = [{"type": "http.request", "body": bytes(body), "more_body": False}]
        body.clear()

        async def give() -> dict[str, Any]:
            return given.pop() if given else await receive()

        await self.app(scope, give, send)

    async def _read(self, receive: Any, body: bytearray) -> bool:
        """Reads up to the end, or until it is too large. Returns whether the client is still there."""
        more = True
        while more and len(body) <= self.most:
            message = await receive()
            if message["type"] != "http.request":
                return False
            body += message.get("body", b"")
            more = message.get("more_body", False)
        return True


async def refuse(receive: Any, send: Any, status: int, error: dict[str, Any]) -> None:
    """Answers a request whose body nobody wants, and closes its connection.

    Most clients read an answer only after they have sent everything, so the rest is read for a while, and dropped.
    """
    content = json.dumps(error).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(content)).encode()),
        (b"connection", b"close"),
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": content, "more_body": True})

    async def rest() -> None:
        while (await receive()).get("more_body", False):
            pass

    try:
        await asyncio.wait_for(rest(), LINGER)
    except asyncio.TimeoutError:
        pass
    await send({"type": "http.response.body", "body": b""})


class InFlight:
    """ASGI middleware: refuses a request (429) while `most` others are read, wait or are answered.

    What takes nothing passes: a request without a body, such as a probe of `/health`.

    Args:
        error (`Callable[[int, str], dict]`): as in [`RequestLimits`].
    """

    def __init__(self, app: Any, most: int, remedy: str, error: Callable[[int, str], dict[str, Any]]):
        self.app, self.most, self.error, self.count = app, most, error, 0
        self.message = f"The server has {most} requests already. Try again in a moment. {remedy}".strip()

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        headers = dict(scope.get("headers", ()))
        has_body = b"transfer-encoding" in headers or headers.get(b"content-length", b"0") != b"0"
        if scope["type"] != "http" or not (has_body or scope["method"] == "POST"):
            await self.app(scope, receive, send)
            return
        if self.count >= self.most:
            await refuse(receive, send, 429, self.error(429, self.message))
            return
        self.count += 1
        try:
            await self.app(scope, receive, send)
        finally:
            self.count -= 1


class Policy:
    """ASGI middleware: adds `POLICY` to all answers."""

    def __init__(self, app: Any):
        self.app = app

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        async def send_with_policy(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"content-security-policy", POLICY.encode())]
            await send(message)

        await self.app(scope, receive, send_with_policy)
