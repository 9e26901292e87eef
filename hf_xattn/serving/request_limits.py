"""ASGI middleware that refuses requests before an application reads them, for `hf-xattn serve` and `hf-xattn web`.

Gradio would take uploads, which the page does not offer, and has a queue without an end.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any


LINGER = 5.0  # seconds that a refused client may go on sending


class RequestLimits:
    """Reads the body of a request, and gives it to the application at once. Refuses a too large one (413).

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
        body, more = bytearray(), True  # not a list: many parts of one byte would take forty times their size
        while more and not too_large:
            message = await receive()
            if message["type"] != "http.request":  # the client has left
                return
            body += message.get("body", b"")
            more = message.get("more_body", False)
            too_large = len(body) > self.most
        if too_large:
            body.clear()
            await refuse(receive, send, 413, self.error(413, self.message))
            return
        given: list[dict[str, Any]] = [{"type": "http.request", "body": bytes(body), "more_body": False}]
        body.clear()

        async def give() -> dict[str, Any]:
            return given.pop() if given else await receive()

        await self.app(scope, give, send)


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


class NoUploads:
    """ASGI middleware: refuses Gradio's own uploads, which the page does not use and nobody would delete."""

    def __init__(self, app: Any):
        self.app = app

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if _posts(scope, {"upload"}):
            await refuse(receive, send, 404, {"error": "This page takes no uploads."})
            return
        await self.app(scope, receive, send)


class BoundedQueue:
    """ASGI middleware: refuses a question while `most` others wait for the model.

    `gradio.Server` makes its queue only in `launch`, and without a limit. `queue` returns it.
    """

    def __init__(self, app: Any, most: int, queue: Callable[[], Any]):
        self.app, self.most, self.queue = app, most, queue

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if _posts(scope, {"call", "join"}):
            queue = self.queue()
            queue.max_size = self.most  # questions that come at the same moment: Gradio counts them one after another
            if len(queue) >= self.most:
                error = f"{self.most} questions are waiting already. Try again in a minute."
                await refuse(receive, send, 503, {"error": error})
                return
        await self.app(scope, receive, send)


def _posts(scope: dict[str, Any], words: set[str]) -> bool:
    return scope["type"] == "http" and scope["method"] == "POST" and not words.isdisjoint(scope["path"].split("/"))
