"""What the messages of a request may hold, and what it may ask for beyond them.

Transformers' server hands other fields to the processor, which reads paths: a client could read files of the server.
"""

from __future__ import annotations

from typing import Any

from fastapi import HTTPException
from transformers.utils.chat_template_utils import _get_template_variables

from ..processing.image_reading import is_pil
from ..training.training_rows import ROLES
from ..utils.checkpoint_files import short
from ..utils.tensor_checks import type_name


# What the server itself gives a template, and what a processor would read pictures from.
NO_VARIABLES = set("messages tools add_generation_prompt chat_template processor_kwargs images videos audio".split())
PICTURES_OF_DECISIONS = ("assets", "images")
# Items of the Responses API that are no messages, with the fields that transformers' server reads.
ITEMS: dict[str, tuple[str, ...]] = {
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
    "reasoning": (),
}


def check_message(index: int, message: dict) -> None:
    """Raises an `HTTPException` for an unknown role, tool calls in another form, and an item that lacks a field."""
    if "role" in message:
        if message["role"] not in ROLES:
            raise HTTPException(
                400,
                f"Expected the `role` of message {index} to be one of {', '.join(ROLES)}, got "
                f"{short(message['role'])}.",
            )
        calls = message.get("tool_calls")
        if calls is not None and not (isinstance(calls, list) and all(map(_is_call, calls))):
            raise HTTPException(
                400,
                f"Expected `tool_calls` of message {index} to be a list of objects with `function`, which has a `name` "
                f"and `arguments`, got {short(calls)}.",
            )
        return
    for name in ITEMS.get(str(message.get("type")), ()):
        if not isinstance(message.get(name), (str, list)):
            raise HTTPException(400, f"Expected item {index} ({message['type']}) to have `{name}`, a text.")


def check_content(index: int, message: dict, content: Any) -> None:
    """Raises an `HTTPException` for a message that says nothing: neither a text nor parts nor calls of tools."""
    may_be_empty = message.get("tool_calls") or ("role" not in message and message.get("type") in ITEMS)
    if content in (None, []) and not may_be_empty:
        got = "null" if content is None else "an empty list"
        raise HTTPException(400, f"Expected the content of message {index} to be a text or a list of parts, got {got}.")


def _is_call(call: Any) -> bool:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return False
    return isinstance(function.get("name"), str) and isinstance(function.get("arguments"), (str, dict))


def check_instructions(body: dict) -> None:
    """Raises an `HTTPException` for instructions of the Responses API that are no text, but may hold images."""
    instructions = body.get("instructions")
    if instructions is not None and not isinstance(instructions, str):
        raise HTTPException(400, f"Expected `instructions` to be a text, got {type_name(instructions)}.")


def check_template_kwargs(body: dict, processor: Any) -> None:
    """Raises an `HTTPException` if `chat_template_kwargs` are more than variables of the chat template.

    `apply_chat_template` takes them beside arguments of the processor: images by their paths, sizes, another template.
    """
    given = body.get("chat_template_kwargs")
    if given is None:
        return
    if not isinstance(given, dict):
        raise HTTPException(400, f"Expected `chat_template_kwargs` to be an object, got {type_name(given)}.")
    known = _variables(processor)
    if unknown := sorted(set(given) - known):
        raise HTTPException(
            400,
            f"Expected `chat_template_kwargs` to be variables of the chat template, {sorted(known)}, got {unknown}.",
        )


def _variables(processor: Any) -> frozenset[str]:
    template = getattr(processor, "chat_template", None)
    if template is None:
        template = getattr(getattr(processor, "tokenizer", processor), "chat_template", None)
    named = template.values() if isinstance(template, dict) else [template]
    return frozenset[str]().union(*map(_get_template_variables, named)) - NO_VARIABLES


def check_images_are_read(messages: list[dict]) -> list[dict]:
    """Returns the messages. Raises an `HTTPException` for an image that was not read: it stands in another place."""
    for index, message in enumerate(messages):
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            if part.get("type") != "text" and not is_pil(part.get("url")):
                raise HTTPException(400, f"Message {index} has an image in a place where the server reads none.")
    return messages


def check_decision(body: dict) -> None:
    """Raises an `HTTPException` for pictures of `/v1/systemone`: transformers reads paths and any address there."""
    for name in PICTURES_OF_DECISIONS:
        if body.get(name):
            raise HTTPException(
                400,
                f"Expected no `{name}`: decisions are made about text alone. Ask about pictures with "
                "/v1/chat/completions or /v1/responses.",
            )
