"""The end of a stream as in the OpenAI API: usage in a chunk of its own where the client asks for it, then `[DONE]`.

Transformers' server puts the usage into the last chunk of every answer, and just stops.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

from fastapi import HTTPException
from fastapi.responses import StreamingResponse

from ..utils.checkpoint_files import short


EVENT, FAILED, END = "data: ", 'data: {"error": ', "data: [DONE]\n\n"


def asks_for_usage(body: dict) -> bool:
    """Whether a request wants the usage of a stream. Raises an `HTTPException` for options that are not known."""
    options = body.get("stream_options")
    if options is None:
        return False
    known = {"include_usage", "include_obfuscation"}  # the latter only fills up chunks
    if not isinstance(options, dict) or not options.keys() <= known or not all(map(_is_flag, options.values())):
        expected = '`stream_options` to be {"include_usage": true} or false'
        raise HTTPException(400, f"Expected {expected}, got {short(options)}.")
    return bool(options.get("include_usage"))


def _is_flag(value: Any) -> bool:
    return value is None or isinstance(value, bool)


def with_end(answer: StreamingResponse, usage: bool, error: Callable[[int, str], dict]) -> StreamingResponse:
    """Ends a stream of `/v1/chat/completions` or `/v1/completions`.

    Args:
        usage (`bool`): whether the client has asked for it.
        error (`Callable[[int, str], dict]`): makes the JSON of an error, with which a failed stream ends.
    """

    async def events(chunks: Any) -> AsyncIterator[str]:
        last: dict[str, Any] = {}
        async with contextlib.aclosing(chunks):
            async for chunk in chunks:
                if FAILED not in chunk and '"usage":{' not in chunk:  # in texts, quotes are escaped
                    yield chunk
                    continue
                for event in chunk.removesuffix("\n\n").split("\n\n"):
                    if event.startswith(FAILED):
                        yield f"{EVENT}{json.dumps(error(500, json.loads(event.removeprefix(EVENT))['error']))}\n\n"
                        return
                    made = json.loads(event.removeprefix(EVENT))
                    if made.get("usage"):
                        last = {**made, "choices": []}
                        event = EVENT + json.dumps({name: value for name, value in made.items() if name != "usage"})
                    yield f"{event}\n\n"
        if usage:
            yield f"{EVENT}{json.dumps(last)}\n\n"
        yield END

    answer.body_iterator = events(answer.body_iterator)
    return answer
