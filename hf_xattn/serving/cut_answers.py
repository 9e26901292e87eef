"""Answers of `/v1/responses` that `max_output_tokens` has cut: not completed, as transformers' server says of all."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

from fastapi.responses import JSONResponse, StreamingResponse


EVENT, DONE = "data: ", "response.completed"


def with_cut_answer(answer: JSONResponse, limit: int) -> JSONResponse:
    """Says of a whole answer whether it was cut. `limit`: the largest number of its tokens."""
    response = json.loads(bytes(answer.body))
    return JSONResponse(response) if _cut(response, limit) else answer


def with_cut_stream(answer: StreamingResponse, limit: int) -> StreamingResponse:
    """Does the same to the last event of a stream."""

    async def events(chunks: Any) -> AsyncIterator[str]:
        async for chunk in chunks:
            if DONE in chunk and chunk.count("\n\n") == 1:  # of one event: the text of an answer may say so too
                event = json.loads(chunk.removeprefix(EVENT))
                if event["type"] == DONE and _cut(event["response"], limit):
                    chunk = f"{EVENT}{json.dumps(event | {'type': 'response.incomplete'})}\n\n"
            yield chunk

    answer.body_iterator = events(answer.body_iterator)
    return answer


def _cut(response: dict[str, Any], limit: int) -> bool:
    """Changes a response whose answer has the largest number of tokens. Returns whether it has.

    An answer that ends by itself at its last token counts as cut, as `finish_reason` of the chat does.
    """
    if response["usage"]["output_tokens"] < limit:
        return False
    last = response["output"][-1]
    if last["type"] != "message":  # a call of a tool, which is whole: it was read
        return False
    response |= {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
    last["status"] = "incomplete"
    return True
