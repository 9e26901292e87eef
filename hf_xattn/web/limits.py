"""Refuses Gradio's own uploads, which the page does not use and nobody would delete."""

from __future__ import annotations

from typing import Any

from ..request_limits import refuse


class NoUploads:
    """ASGI middleware.

    Args:
        app: the application to protect.
    """

    def __init__(self, app: Any):
        self.app = app

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] == "http" and scope["method"] == "POST" and "upload" in scope["path"].split("/"):
            await refuse(receive, send, 404, {"error": "This page takes no uploads."})
            return
        await self.app(scope, receive, send)
