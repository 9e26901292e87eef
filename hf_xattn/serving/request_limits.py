"""Limits of requests to `hf-xattn serve` and `hf-xattn web`, and the error messages that clients get.

Middleware refuses requests before the application reads them. If a request is wrong, the client gets the message of
the error. If the server fails, the client gets a fixed sentence, and the message only goes to the log, because it may
name files of the server.
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

# Matches a file path in the message of an error, but not the path of a web address.
PATH = re.compile(r"(?<![\w.:/])~?/[\w.-]+/[\w.-]|(?<!\w)[A-Za-z]:\\\w")
FAILURE = "The server has failed at this request. Its log has the reason."
LINGER = 5.0  # seconds for which a refused client may continue to send
BODY_SECONDS = 120.0  # seconds in which the whole body of a request must arrive
# The content security policy of the page. Browsers load nothing for the page from other hosts. No page of another host
# may show this page in a frame, because visitors could then be tricked into clicks. Hugging Face Spaces may.
POLICY = (
    "default-src 'self' 'unsafe-inline' 'unsafe-eval' blob: data:; base-uri 'self'; form-action 'none'; "
    "object-src 'none'; frame-ancestors 'self' https://huggingface.co https://*.hf.space"
)


@dataclass(frozen=True)
class ServerLimits:
    """Limits of the requests to `hf-xattn serve`, which the operator of the server sets.

    Args:
        max_image_bytes (`int`): bytes of an image that a client sends, or that is downloaded for it.
        max_request_bytes (`int`, *optional*): bytes of the body of a request. Default: `room_for_images`.
        max_images (`int`): images of a request.
        max_pixels (`int`): pixels of all images of a request, before and after the image processor resizes them.
        max_requests (`int`): requests that are read, wait or are answered at the same time.
        max_new_tokens (`int`): tokens of an answer.
        max_beams (`int`): beams of a beam search. Each beam takes the memory of an answer.
        fetch (`bool`): whether images are downloaded from the web addresses that clients send.
        private_addresses (`bool`): whether they are also downloaded from this machine and from private networks.
        max_seconds (`float`): seconds for all downloads of a request.
    """

    max_image_bytes: int = 20 * 2**20
    max_request_bytes: int | None = None
    max_images: int = 64
    max_pixels: int = 68 * 10**6
    max_requests: int = 16
    max_new_tokens: int = 4096
    max_beams: int = 8
    fetch: bool = False
    private_addresses: bool = False
    max_seconds: float = 30.0

    @property
    def room_for_images(self) -> int:
        """Bytes of four images of the largest size in base64, and one mebibyte of text."""
        return 4 * (self.max_image_bytes * 4 // 3) + 2**20


class Refused(ValueError):
    """The request is wrong or not supported. The message is written for the client."""


def told(error: Exception) -> tuple[int, str]:
    """Returns the HTTP status and the message with which a client is told about an error.

    Errors of the server are written to its log.
    """
    if isinstance(error, Refused):
        return 400, str(error)
    words = f"{type(error).__name__}: {error}"
    if isinstance(error, (ValueError, TypeError, TemplateError)) and not PATH.search(words):
        return 400, words  # Such errors name an argument of the request that is wrong.
    logger.error("A request has failed", exc_info=error)
    return 500, FAILURE


def error_json(status: int, message: str) -> dict[str, Any]:
    """Returns an error in the form of the OpenAI API, so that clients find the message."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": None}}


class RequestLimits:
    """ASGI middleware that limits the number of requests and the size of their bodies.

    A request gets status 429 while `most_requests` others are read, wait or are answered. Otherwise this class reads
    the whole body and passes it to the application at once. The application itself could not limit a body whose length
    the client does not send (chunked encoding). A request gets status 413 if its body is too large, and 408 if its body
    arrives too slowly. Requests without a body, such as a probe of `/health`, always pass.

    Args:
        app: the ASGI application.
        most (`int`): largest number of bytes of a body.
        most_requests (`int`): largest number of requests at the same time.
        remedy, remedy_for_many (`str`): what the client or the operator can do. The messages of 413 and 429 end with
            these sentences.
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
        """Returns the body as one message. None if the request was refused, or if the client has left."""
        too_large = not length.isdigit() or len(length) > 18 or int(length) > self.most
        body = bytearray()  # In a list, many parts of one byte would take forty times their size.

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
    """Answers a request with an error, without its body, and closes the connection.

    Most clients read an answer only after they have sent everything. So the rest of the body is read for a while, and
    dropped.
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
    """ASGI middleware that adds `POLICY` to all responses."""

    def __init__(self, app: Any):
        self.app = app

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        async def send_with_policy(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"content-security-policy", POLICY.encode())]
            await send(message)

        await self.app(scope, receive, send_with_policy)
