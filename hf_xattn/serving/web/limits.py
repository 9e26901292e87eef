"""What Gradio would take and the page does not offer: files, and a queue without an end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..request_limits import refuse


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
