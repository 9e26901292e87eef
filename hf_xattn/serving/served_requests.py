"""What a request to `hf-xattn serve` may hold, and what it may ask of an answer. Anything else is refused (400).

Transformers' server hands unknown fields to the processor, which reads paths: a client could read files of the server.
And it builds a `GenerationConfig` of a request, and does what stands in it: a thousand beams, another cache, a file of
the server as an assistant model. So a field passes only if it stands in a table here, with a value within bounds, or
if it is what the model has anyway.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from fastapi import HTTPException
from transformers import GenerationConfig
from transformers.utils.chat_template_utils import _get_template_variables

from ..data.rows import ROLES
from ..processing.chat_messages import check_one_kind
from ..processing.image_reading import is_pil
from ..utils.checkpoint_files import short
from ..utils.tensor_checks import type_name


MOST_STOPS, LONGEST_STOP = 16, 256  # strings, and characters of each
MOST_BIASES = 300
TEXT_PARTS = ("text", "input_text", "output_text")  # of chat completions, and of the Responses API
IMAGE_PARTS = ("image_url", "input_image")
MESSAGE_FIELDS = frozenset(
    "role content name refusal tool_calls tool_call_id function_call annotations audio".split()
) | {"reasoning", "reasoning_content"}
ITEM_FIELDS = {"type", "id", "status"}  # of a message that is an item of the Responses API
UNREAD = ("function_call", "audio", "refusal")  # what an earlier answer may have, and no template writes
# Fields in the JSON of a `GenerationConfig` that change nothing.
WITHOUT_EFFECT = ("transformers_version", "_from_model_config")
# Fields that say how tokens are drawn.
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff")
# Fields of a `GenerationConfig` that transformers' server sets from the checked fields of a request.
SET_BY_SERVER = set("max_new_tokens temperature do_sample top_p repetition_penalty sequence_bias stop_strings".split())
# What the server itself gives a template, and what a processor would read pictures from.
NO_VARIABLES = set("messages tools add_generation_prompt chat_template processor_kwargs images videos audio".split())
# Items of the Responses API that are no messages, with the fields that transformers' server reads.
ITEMS: dict[str, tuple[str, ...]] = {
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
    "reasoning": (),
}


def image_parts(messages: Any, field: str) -> Iterator[tuple[str, dict]]:
    """Yields the image parts of a request, each with a description of its place for errors.

    Raises an `HTTPException` for messages in a wrong form, and for parts that are neither text nor images.
    """
    items = field == "input"  # of the Responses API
    if items and isinstance(messages, str):
        return
    first = messages[0] if items and isinstance(messages, list) and messages else None
    if isinstance(first, dict) and "role" not in first:  # as transformers decides
        messages = [{"role": "user", "content": messages}]  # the parts of one message
    if not isinstance(messages, list) or not messages or not all(isinstance(message, dict) for message in messages):
        got = "an empty list" if messages == [] else type_name(messages)
        raise HTTPException(400, f"Expected `{field}` to be a list of messages, got {got}.")
    for index, message in enumerate(messages):
        if "role" not in message and not items:
            raise HTTPException(400, f"Expected each of `{field}` to have a `role`, got message {index} without one.")
        unknown = sorted(set(message) - MESSAGE_FIELDS - (ITEM_FIELDS if items else set()))
        if unknown and "role" in message:
            raise HTTPException(
                400, f"Message {index} has unknown fields {unknown}. Images are parts of its `content`: `image_url`."
            )
        _check_message(index, message)
        content = message.get("content" if "role" in message else "output" if "output" in message else "content")
        _check_content(index, message, content)
        if content is None or isinstance(content, str):
            continue
        if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
            raise HTTPException(
                400,
                f"Expected the content of message {index} to be a text or a list of parts, got {type_name(content)}.",
            )
        for number, part in enumerate(content):
            try:
                check_one_kind(part, f"message {index}")
            except ValueError as error:
                raise HTTPException(400, str(error)) from error
            if part.get("type") in IMAGE_PARTS:
                yield f"part {number} of message {index}", part
            elif part.get("type") not in TEXT_PARTS or not isinstance(part.get("text"), str):
                raise HTTPException(
                    400,
                    f"Expected text or an image (`image_url`) as part {number} of message {index}, got a part of type "
                    f"{part.get('type')!r}.",
                )


def _check_message(index: int, message: dict) -> None:
    """Refuses an unknown role, tool calls in another form, and an item that lacks a field."""
    if "role" in message:
        if message["role"] not in ROLES:
            known = ", ".join(ROLES)
            raise HTTPException(
                400, f"Expected the `role` of message {index} to be one of {known}, got {short(message['role'])}."
            )
        for name in UNREAD:
            if message.get(name):
                raise HTTPException(400, f"Expected message {index} without `{name}`, which is not read. Remove it.")
        calls = message.get("tool_calls")
        if calls is not None and not (isinstance(calls, list) and all(map(_is_call, calls))):
            raise HTTPException(
                400,
                f"Expected `tool_calls` of message {index} to be a list of objects with a `function`, of a `name` and "
                f"`arguments`, got {short(calls)}.",
            )
        return
    for name in ITEMS.get(str(message.get("type")), ()):
        if not isinstance(message.get(name), (str, list)):
            raise HTTPException(400, f"Expected item {index} ({message['type']}) to have `{name}`, a text.")


def _check_content(index: int, message: dict, content: Any) -> None:
    """Refuses a message that says nothing: neither a text nor parts nor calls of tools."""
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
    """Raises an `HTTPException` if `chat_template_kwargs` are more than variables of the chat template: images by path,
    sizes, another template.
    """
    given = body.get("chat_template_kwargs")
    if given is None:
        return
    if not isinstance(given, dict):
        raise HTTPException(400, f"Expected `chat_template_kwargs` to be an object, got {type_name(given)}.")
    known = _named(processor) - NO_VARIABLES
    if unknown := sorted(set(given) - known):
        raise HTTPException(
            400,
            f"Expected `chat_template_kwargs` to be variables of the chat template, {sorted(known)}, got {unknown}.",
        )


def _named(processor: Any) -> frozenset[str]:
    """The variables of a chat template."""
    template = getattr(processor, "chat_template", None)
    if template is None:
        template = getattr(getattr(processor, "tokenizer", processor), "chat_template", None)
    named = template.values() if isinstance(template, dict) else [template]
    return frozenset[str]().union(*map(_get_template_variables, named))


def check_tools(body: dict, processor: Any) -> None:
    """Raises an `HTTPException` for tools that the chat template would leave out, or that are no functions."""
    tools = body.get("tools")
    if tools and "tools" not in _named(processor):
        raise HTTPException(400, "Expected no `tools`: the chat template of this model has no place for them.")
    if tools and not (isinstance(tools, list) and all(map(_is_tool, tools))):
        raise HTTPException(400, f"Expected `tools` to be a list of functions with a `name`, got {short(tools)}.")


def _is_tool(tool: Any) -> bool:
    if not isinstance(tool, dict) or tool.get("type") != "function":
        return False
    function = tool.get("function", tool)  # the Responses API has the name beside the type
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def with_instructions(messages: list[dict], instructions: str | None) -> list[dict]:
    """Puts instructions of the Responses API in front, before the text of a system message that is there already.

    Transformers' server puts them in its place.
    """
    if not instructions:
        return messages
    if not messages or messages[0]["role"] != "system":
        return [{"role": "system", "content": instructions}, *messages]
    content = messages[0].get("content") or ""
    if isinstance(content, str):
        both: Any = f"{instructions}\n\n{content}"
    else:
        both = [{"type": "input_text", "text": f"{instructions}\n\n"}, *content]
    return [{**messages[0], "content": both}, *messages[1:]]


def read_whole(message: dict, read: Callable[[dict], dict]) -> dict:
    """A message as a processor takes it, by `read` of transformers' server, which leaves out its content if there is
    the key `tool_calls`, and its name and reasoning.
    """
    kept = {name: message[name] for name in ("name", "reasoning_content") if message.get(name)}
    spoken = read({name: value for name, value in message.items() if name != "tool_calls"})
    if not message.get("tool_calls"):
        return spoken | kept
    return read({"role": message["role"], "tool_calls": message["tool_calls"]}) | spoken | kept


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
    for name in ("assets", "images"):
        if body.get(name):
            raise HTTPException(
                400, f"Expected no `{name}`: ask about pictures with /v1/chat/completions or /v1/responses."
            )


@dataclass(frozen=True)
class AnswerLimits:
    """Bounds that the operator of a server sets."""

    max_new_tokens: int = 4096  # of an answer
    max_beams: int = 8  # of beam search; each takes the memory of an answer


# Tells what is expected of a value, if it is not that.
Check = Callable[[Any], "str | None"]


@dataclass(frozen=True)
class _Number:
    low: float
    high: float
    whole: bool = False

    def __call__(self, value: Any) -> str | None:
        fits = isinstance(value, int if self.whole else (int, float)) and not isinstance(value, bool)
        if fits and self.low <= value <= self.high:
            return None
        return f"{'an integer' if self.whole else 'a number'} from {self.low} to {self.high}"


def _flag(value: Any) -> str | None:
    return None if isinstance(value, bool) else "true or false"


def _early_stopping(value: Any) -> str | None:
    return None if value == "never" else _flag(value) and 'true, false or "never"'


def _stops(value: Any) -> str | None:
    texts = [value] if isinstance(value, str) else value
    fits = isinstance(texts, list) and len(texts) <= MOST_STOPS
    if fits and all(isinstance(text, str) and 0 < len(text) <= LONGEST_STOP for text in texts):
        return None
    return f"a text or a list of at most {MOST_STOPS} texts, each of 1 to {LONGEST_STOP} characters"


def _biases(vocab_size: int) -> Check:
    def check(value: Any) -> str | None:
        fits = isinstance(value, dict) and len(value) <= MOST_BIASES
        known = fits and all(key.isascii() and key.isdigit() and int(key[:20]) < vocab_size for key in value)
        if known and not any(_Number(-100, 100)(bias) for bias in value.values()):
            return None
        return f"an object of at most {MOST_BIASES} token ids below {vocab_size} and numbers from -100 to 100"

    return check


def _config_fields(limits: AnswerLimits) -> dict[str, Check]:
    """Fields of `generation_config`."""
    share = _Number(0, 1)
    return {
        "max_new_tokens": _Number(1, limits.max_new_tokens, whole=True),
        "min_new_tokens": _Number(0, limits.max_new_tokens, whole=True),
        "num_beams": _Number(1, limits.max_beams, whole=True),
        "do_sample": _flag,
        "early_stopping": _early_stopping,
        "length_penalty": _Number(-10, 10),
        "temperature": _Number(0, 2),
        "top_k": _Number(0, 10**6, whole=True),
        "top_p": share,
        "min_p": share,
        "typical_p": _Number(0.001, 1),
        "epsilon_cutoff": share,
        "eta_cutoff": share,
        "repetition_penalty": _Number(0.01, 10),
        "no_repeat_ngram_size": _Number(0, 100, whole=True),
        "stop_strings": _stops,
    }


def _body_fields(limits: AnswerLimits, vocab_size: int) -> dict[str, Check]:
    """Fields of a request, beside `generation_config`."""
    tokens = _Number(1, limits.max_new_tokens, whole=True)
    return {
        "max_tokens": tokens,
        "max_completion_tokens": tokens,
        "max_output_tokens": tokens,
        "temperature": _Number(0, 2),
        "top_p": _Number(0, 1),
        "frequency_penalty": _Number(-0.99, 2),  # transformers makes 1 + x of it, a factor
        "seed": _Number(-(2**63), 2**63 - 1, whole=True),
        "stop": _stops,
        "logit_bias": _biases(vocab_size),
        "stream": _flag,
    }


def check_answer(body: dict, limits: AnswerLimits, model: Any) -> dict:
    """Returns a request whose fields for `generate` are all within bounds, or raises an `HTTPException`."""
    body = {name: value for name, value in body.items() if value is not None}
    _check(body, _body_fields(limits, model.config.get_text_config().vocab_size), "")
    for name in ("stop", "logit_bias"):
        if not body.get(name, True):  # an empty one asks for nothing, and transformers fails for it
            del body[name]
    if "logit_bias" in body:
        body["logit_bias"] = {key: float(bias) for key, bias in body["logit_bias"].items()}
    if "generation_config" in body:
        given = _given_config(body["generation_config"], limits, model.generation_config)
        if given.get("do_sample") is False and given.get("temperature") != 0 and _samples(body):
            raise HTTPException(400, "Expected no `temperature` or `top_p` with `do_sample` of false, got both.")
        body["generation_config"] = json.dumps(given)
        if given.get("num_beams", 1) > 1 and body.get("stream"):
            raise HTTPException(400, "Expected `num_beams` of 1 with `stream`: beams have no answer before the end.")
    return body


def _given_config(text: Any, limits: AnswerLimits, own: GenerationConfig) -> dict[str, Any]:
    """The fields of `generation_config` that are not the model's own."""
    try:
        given = json.loads(text) if isinstance(text, str) else text
    except (ValueError, RecursionError):
        given = None
    if not isinstance(given, dict):
        raise HTTPException(400, f"Expected `generation_config` to be an object as JSON, got {short(text)}.")
    theirs, greedy = own.to_dict(), given.get("do_sample") is False
    asked = {
        name: value
        for name, value in given.items()
        if value is not None and name not in WITHOUT_EFFECT and not (name in theirs and theirs[name] == value)
    }
    known = _config_fields(limits)
    if unknown := sorted(asked.keys() - known.keys()):
        raise HTTPException(
            400, f"`generation_config`: expected fields among {', '.join(known)}, got {', '.join(map(short, unknown))}."
        )
    _check(asked, known, "generation_config.")
    if asked.get("stop_strings") == []:
        del asked["stop_strings"]
    # Some of transformers' processors of logits refuse the integer 1 where they want 1.0.
    for name, check in known.items():
        if name in asked and isinstance(check, _Number) and not check.whole:
            asked[name] = float(asked[name])
    if given.get("max_new_tokens") is not None:  # also if it is the model's own: without one it would be 1024
        asked.setdefault("max_new_tokens", min(given["max_new_tokens"], limits.max_new_tokens))
    if asked.get("temperature") == 0 or greedy:
        asked["do_sample"] = False
    elif _samples(asked):
        asked["do_sample"] = True
    return asked


def _samples(given: dict) -> bool:
    """Whether a request sets how to draw tokens. It asks for drawn ones then, also of a model that takes the likeliest
    by itself.
    """
    return given.get("temperature") != 0 and any(given.get(name) is not None for name in SAMPLING)


def _check(given: dict, known: dict[str, Check], where: str) -> None:
    for name, check in known.items():
        if name in given and (expected := check(given[name])) is not None:
            raise HTTPException(400, f"Expected `{where}{name}` to be {expected}, got {short(given[name])}.")


def check_config(config: GenerationConfig, body: dict, limits: AnswerLimits, own: GenerationConfig) -> None:
    """Bounds the length in what transformers' server has made of a request, and refuses unknown settings."""
    given = json.loads(body.get("generation_config", "{}"))
    before = GenerationConfig(**given).to_dict() if "generation_config" in body else own.to_dict()
    changed = {name for name, value in config.to_dict().items() if name not in before or before[name] != value}
    if unknown := sorted(changed - SET_BY_SERVER):
        raise HTTPException(400, f"The request sets {', '.join(unknown)}, which this server does not allow.")
    if config.max_new_tokens is None:
        config.max_new_tokens = max(own.max_new_tokens or 0, 1024)  # as transformers' server by default
    if _samples(body):
        config.do_sample = True
    config.max_new_tokens = min(config.max_new_tokens, limits.max_new_tokens)


def check_length(model: Any, length: int, config: GenerationConfig) -> None:
    """Raises an `HTTPException` for a prompt that fills the model's context, and ends an answer where that ends."""
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if longest is None:
        return
    if length >= longest:
        raise HTTPException(
            400, f"Expected a prompt of fewer than {longest} tokens, the limit of the model, got {length}."
        )
    config.max_new_tokens = min(config.max_new_tokens or longest, longest - length)
