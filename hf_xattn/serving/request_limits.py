"""What `hf-xattn serve` and `hf-xattn web` refuse, and what clients hear of errors.

Middleware refuses requests before an application reads them. Clients hear of their own errors in words, and of those of
the server in a sentence: their words may name its files, so they go to its log alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError
from transformers.utils import logging


logger = logging.get_logger(__name__)

# A path of this machine in the words of an error, but not the path of an address.
PATH = re.compile(r"(?<![\w.:/])~?/[\w.-]+/[\w.-]|(?<!\w)[A-Za-z]:\\\w")
FAILURE = "The server has failed at this request. Its log has the reason."
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


class Refused(ValueError):
    """What is wrong with a request, in words for its client."""


def told(error: Exception) -> tuple[int, str]:
    """The status and the words with which a client hears of an error. Errors of the server go to its log."""
    if isinstance(error, Refused):
        return 400, str(error)
    words = f"{type(error).__name__}: {error}"
    if isinstance(error, (ValueError, TypeError, TemplateError)) and not PATH.search(words):
        return 400, words  # they name the wrong argument
    logger.error("A request has failed", exc_info=error)
    return 500, FAILURE


def error_json(status: int, message: str) -> dict[str, Any]:
    """An error in the form of the OpenAI API, so that clients find the message."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": None}}


class RequestLimits:
    """ASGI middleware: refuses a request (429) while `most_requests` others are read, wait or are answered. Reads the
    body of any other, and gives it to the application at once; refuses a too large one (413), and one that comes too
    slowly (408).

    What takes nothing passes: a request without a body, such as a probe of `/health`. The application itself has no
    limit where the client does not say the length of the body (chunked encoding).

    Args:
        most (`int`): bytes that the body of a request may have.
        remedy, remedy_for_many (`str`): what can be done. They follow the limits in the messages.
    """

    def __init__(self, app: Any, most: int, most_requests: int, remedy: str, remedy_for_many: str = ""):
        self.app, self.most, self.most_requests, self.count = app, most, most_requests, 0
        self.too_large = f"The request is too large: its body may have {most} bytes. {remedy}"
        self.too_many = f"The server has {most_requests} requests already. Try again in a moment. {remedy_for_many}"

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        headers = dict(scope.get("headers", ()))
        has_body = b"transfer-encoding" in headers or headers.get(b"content-length", b"0") != b"0"
        if scope["type"] != "http" or not (has_body or scope["method"] == "POST"):
            await self.app(scope, receive, send)
            return
        if self.count >= self.most_requests:
            await _refuse(receive, send, 429, self.too_many.strip())
            return
        self.count += 1
        try:
            given = await self._read(headers.get(b"content-length", b"0"), receive, send)
            if given is not None:
                await self.app(scope, lambda: _first(given, receive), send)
        finally:
            self.count -= 1

    async def _read(self, length: bytes, receive: Any, send: Any) -> list[dict[str, Any]] | None:
        """Returns the body as one message; None if it was refused, or if the client has left."""
        too_large = not length.isdigit() or len(length) > 18 or int(length) > self.most
        body = bytearray()  # not a list: many parts of one byte would take forty times their size

        async def read() -> bool:
            more = True
            while more and len(body) <= self.most:
                message = await receive()
                if message["type"] != "http.request":
                    return False
                body.extend(message.get("body", b""))
                more = message.get("more_body", False)
            return True

        try:
            if not too_large and not await asyncio.wait_for(read(), BODY_SECONDS):
                return None
        except asyncio.TimeoutError:
            await _refuse(receive, send, 408, f"Expected the body of a request within {BODY_SECONDS:g} seconds.")
            return None
        if too_large or len(body) > self.most:
            body.clear()
            await _refuse(receive, send, 413, self.too_large)
            return None
        return [{"type": "http.request", "body": bytes(body), "more_body": False}]


async def _first(given: list[dict[str, Any]], receive: Any) -> dict[str, Any]:
    return given.pop() if given else await receive()


async def _refuse(receive: Any, send: Any, status: int, message: str) -> None:
    """Answers a request whose body nobody wants, and closes its connection.

    Most clients read an answer only after they have sent everything, so the rest is read for a while, and dropped.
    """
    content = json.dumps({**error_json(status, message), "detail": message}).encode()  # Gradio's page shows `detail`
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

    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(rest(), LINGER)
    await send({"type": "http.response.body", "body": b""})


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
