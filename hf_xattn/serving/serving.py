"""An HTTP server for one model, with the API of OpenAI: `/v1/chat/completions`, `/v1/models` and `/health`.

`served_requests.py` reads a request. In contrast to other servers, no field is ignored: a request with a field that is
not supported gets status 400. The headers of the images are read first, and their pixels are counted, before a thread
decodes them. A request that is too large gets status 413. A request gets status 429 if too many others wait.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import TYPE_CHECKING, Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException

from .answering import Answer, Answering
from .request_limits import RequestLimits, ServerLimits, error_json, told
from .request_pictures import open_pictures
from .served_requests import Asked, read_request


if TYPE_CHECKING:
    from ..modeling_xattn import XAttnForConditionalGeneration
    from ..processing.chat_templates import Processor


def build_app(
    name: str, model: XAttnForConditionalGeneration, processor: Processor, limits: ServerLimits | None = None
) -> FastAPI:
    """Builds a server for a loaded model.

    Args:
        name (`str`): name of the model, which clients use.
        model ([`XAttnForConditionalGeneration`]): the model.
        processor: an [`XAttnProcessor`], or a tokenizer for a model without images.
        limits ([`ServerLimits`], *optional*): limits of the requests.

    Returns:
        `fastapi.FastAPI`: an ASGI application.
    """
    limits = limits or ServerLimits()
    answering, created = Answering(model, processor), int(time.time())
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(
        RequestLimits,
        most=limits.max_request_bytes or limits.room_for_images,
        most_requests=limits.max_requests,
        remedy="Send fewer or smaller images, or raise the limit of the server: `hf-xattn serve --max-request-mib`.",
        remedy_for_many="The operator sets another number with `hf-xattn serve --max-requests`.",
    )

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        listed = {"id": name, "object": "model", "created": created, "owned_by": "hf_xattn"}
        return {"object": "list", "data": [listed]}

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request, body: dict[str, Any]) -> Response:
        try:
            asked = read_request(body, name, model, processor, limits)
            await open_pictures(asked.images, getattr(processor, "image_processor", None), limits)
            prepared = await answering.prepare(asked)
            if asked.stream:
                pieces = answering.pieces(asked, prepared)
                return StreamingResponse(_events(pieces, asked, name), media_type="text/event-stream")
            async with contextlib.aclosing(answering.pieces(asked, prepared, request.is_disconnected)) as pieces:
                async for piece in pieces:
                    if isinstance(piece, Answer):
                        return JSONResponse(_completion(piece, name))
        except Exception as error:
            raise HTTPException(*told(error)) from error
        return Response(status_code=499)  # The client has left, so nobody reads this response.

    @app.exception_handler(HTTPException)  # The router also raises it, for an unknown address.
    async def refused(request: Request, error: HTTPException) -> JSONResponse:
        return JSONResponse(error_json(error.status_code, str(error.detail)), error.status_code, error.headers)

    @app.exception_handler(RequestValidationError)
    async def no_request(request: Request, error: RequestValidationError) -> JSONResponse:
        why = "; ".join(f"{each['msg']} {each.get('ctx', {}).get('error', '')}".strip() for each in error.errors()[:3])
        return JSONResponse(error_json(400, f"Expected the body of the request to be a JSON object: {why[:200]}"), 400)

    return app


def _head(kind: str, name: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()), "model": name}


def _usage(answer: Answer) -> dict[str, int]:
    given, made = answer.num_prompt_tokens, answer.num_tokens
    return {"prompt_tokens": given, "completion_tokens": made, "total_tokens": given + made}


def _completion(answer: Answer, name: str) -> dict[str, Any]:
    message = {"role": "assistant", "content": answer.text, "refusal": None}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": answer.finish_reason}
    return {**_head("chat.completion", name), "choices": [choice], "usage": _usage(answer)}


async def _events(pieces: AsyncGenerator[str | Answer, None], asked: Asked, name: str) -> AsyncIterator[str]:
    """Yields the events of a stream. The usage comes in a chunk of its own. `[DONE]` ends the stream."""
    head = _head("chat.completion.chunk", name)

    def event(delta: dict[str, Any], reason: str | None = None) -> str:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
        return f"data: {json.dumps({**head, 'choices': [choice]})}\n\n"

    yield event({"role": "assistant", "content": ""})
    try:
        async with contextlib.aclosing(pieces):
            async for piece in pieces:
                if not isinstance(piece, Answer):
                    yield event({"content": piece})
                    continue
                yield event({}, piece.finish_reason)
                if asked.usage:
                    yield f"data: {json.dumps({**head, 'choices': [], 'usage': _usage(piece)})}\n\n"
    except Exception as error:
        yield f"data: {json.dumps(error_json(*told(error)))}\n\n"
        return
    yield "data: [DONE]\n\n"


class Server(uvicorn.Server):
    """A `uvicorn.Server` that calls `ready` when it accepts requests. After Ctrl-C, running requests have five seconds
    to finish.
    """

    def __init__(self, app: FastAPI, ready: Callable[[], None], log_level: str = "info") -> None:
        super().__init__(uvicorn.Config(app, log_level=log_level, timeout_graceful_shutdown=5))
        self.ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self.ready()
