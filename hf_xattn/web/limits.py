"""Bounds what a browser may send, before Gradio reads it."""

from __future__ import annotations

import json
from typing import Any


class RequestLimits:
    """ASGI middleware: refuses large requests, and Gradio's own uploads, which the page does not use and nobody would delete.

    Args:
        app: the application to protect.
        most (`int`): bytes that a request may have.
    """

    def __init__(self, app: Any, most: int):
        self.app, self.most = app, most

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        if scope["method"] == "POST" and "upload" in scope["path"].split("/"):
            await _refuse(send, 404, "This page takes no uploads.")
            return
        length = dict(scope["headers"]).get(b"content-length", b"0")
        if not length.isdigit() or int(length) > self.most:
            await _refuse(send, 413, f"The request is too large: it may have {self.most} bytes.")
            return
        read = 0

        async def counted() -> dict[str, Any]:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            # A request without a length is known to be too large when it is.
            return {"type": "http.disconnect"} if read > self.most else message

        await self.app(scope, counted, send)


async def _refuse(send: Any, status: int, error: str) -> None:
    headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps({"error": error}).encode()})
