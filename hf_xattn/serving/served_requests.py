"""Reads a request to `hf-xattn serve`. A field that the server does not support is refused and not ignored.

Only the values that are read here reach the processor and `generate`. Without this, a client could make the processor
open file paths, or make `generate` run a thousand beams, use another cache, or load a file of the server as an
assistant model.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, Field, TypeAdapter, ValidationError

from ..processing.chat_messages import HINTS, check_one_kind
from ..processing.chat_templates import template_variables
from ..utils.checkpoint_files import short
from ..utils.tensor_checks import type_name
from .request_limits import Refused, ServerLimits


if TYPE_CHECKING:
    from ..modeling_xattn import XAttnForConditionalGeneration
    from ..processing.chat_templates import Processor

MOST_STOPS, LONGEST_STOP = 16, 256  # number of stop strings, and characters of each of them
MOST_BIASES = 300
DEFAULT_LENGTH = 1024  # tokens of an answer, unless the request sets a number or the model has a larger one
ROLES = ("system", "developer", "user", "assistant")
# Fields that change no answer. They are accepted and have no effect.
WITHOUT_EFFECT = {"metadata", "prompt_cache_key", "safety_identifier", "service_tier", "user"}
# Fields that are not supported, with the values that are accepted because they ask for nothing.
NOT_OBEYED: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "function_call": ("auto", "none"),
    "functions": ([],),
    "logprobs": (False,),
    "modalities": (["text"],),
    "n": (1,),
    "parallel_tool_calls": (True,),
    "presence_penalty": (0,),
    "response_format": ({"type": "text"},),
    "store": (False,),
    "tool_choice": ("auto", "none"),
    "tools": ([],),
    "top_logprobs": (0,),
}
# Fields of a `GenerationConfig` that say how tokens are sampled.
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff")
# Fields that are converted to float, because some logits processors of transformers refuse the integer 1 for 1.0.
FLOATS = (*(field for field in SAMPLING if field != "top_k"), "repetition_penalty", "length_penalty")
# Names that cannot be variables of the template: the server sets them, or a processor would read images from them.
NO_VARIABLES = set("messages tools add_generation_prompt chat_template processor_kwargs images videos audio".split())


@dataclass(frozen=True)
class Asked:
    """A request that was checked and can be answered."""

    messages: list[dict[str, Any]]
    images: list[tuple[str, dict[str, Any]]]  # for each image: its place in words, and its part of `messages`
    variables: dict[str, Any]  # variables of the chat template
    options: dict[str, Any]  # keyword arguments of `generate`
    stops: list[str]
    seed: int | None
    stream: bool
    usage: bool  # whether a stream ends with the number of its tokens


def read_request(
    body: dict[str, Any], name: str, model: XAttnForConditionalGeneration, processor: Processor, limits: ServerLimits
) -> Asked:
    """Reads the body of a request to the model `name`.

    Raises:
        Refused: for a field that is not supported, and for a value that is out of bounds.
    """
    body = {field: value for field, value in body.items() if value is not None}
    if body.get("model", name) != name:
        raise Refused(f"Expected `model` to be {name!r}, got {short(body['model'])}.")
    fields = _body_fields(limits, model.config.get_text_config().vocab_size)
    for field, value in body.items():
        if field in NOT_OBEYED and value not in NOT_OBEYED[field]:
            raise Refused(
                f"Expected `{field}` to be {NOT_OBEYED[field][0]!r}, because nothing else is obeyed, got {value!r:.80}."
            )
        if field not in fields and field not in NOT_OBEYED and field not in WITHOUT_EFFECT:
            raise Refused(f"Expected fields among {', '.join(fields)}, got `{field:.80}`, which is not obeyed.")
    _check(body, fields, "")
    options, stops = _options(body, limits, model.generation_config)
    messages, images = _read_messages(body.get("messages"), hasattr(processor, "tokenizer"))
    if images and getattr(processor, "image_processor", None) is None:
        raise Refused(f"{name} cannot read images: it was saved without an image processor.")
    return Asked(
        messages,
        images,
        _variables(body.get("chat_template_kwargs", {}), processor),
        options,
        stops,
        body.get("seed"),
        body.get("stream", False),
        bool(body.get("stream_options", {}).get("include_usage")),
    )


def _read_messages(messages: Any, with_parts: bool) -> tuple[list[dict[str, Any]], list[tuple[str, dict[str, Any]]]]:
    """Builds the messages for the processor from those of a request.

    Their content is a text, or a list of text parts and of image parts whose `image` is an address. Without
    `with_parts`, a list of text parts becomes one text, because the chat template of a tokenizer expects this.
    """
    if not isinstance(messages, list) or not messages or not all(isinstance(message, dict) for message in messages):
        got = "an empty list" if messages == [] else type_name(messages)
        raise Refused(f"Expected `messages` to be a list of messages, got {got}.")
    made, images = [], []
    for index, message in enumerate(messages):
        given = {field: value for field, value in message.items() if value not in (None, [], {})}
        content = given.pop("content", None)
        if given.get("role") not in ROLES:
            raise Refused(
                f"Expected the `role` of message {index} to be one of {ROLES}, got {short(given.get('role'))}."
            )
        if unknown := sorted(given.keys() - {"role", "name"}) or [
            field for field in given if type(given[field]) is not str
        ]:
            raise Refused(
                f"Expected `role`, `content` and perhaps `name`, a text, in message {index}, got {unknown}, which this "
                "server does not read. Send images as parts of the `content` with the type `image_url`."
            )
        if isinstance(content, list):
            placed = [(f"part {number} of message {index}", part) for number, part in enumerate(content)]
            placed = [(place, _read_part(part, place)) for place, part in placed]
            images += [(place, part) for place, part in placed if part["type"] == "image"]
            content = [part for _, part in placed]
            if not with_parts and not images:
                content = " ".join(part["text"] for part in content)
        elif not isinstance(content, str):
            got = "none, or an empty list" if content is None else type_name(content)
            raise Refused(f"Expected the content of message {index} to be a text or a list of parts, got {got}.")
        made.append({**given, "content": content})
    return made, images


def _read_part(part: Any, place: str) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in ("text", "image_url"):
        got = f"a part of type {short(kind)}" if isinstance(part, dict) else type_name(part)
        raise Refused(f"Expected text or an image (`image_url`) as {place}, got {got}.")
    try:
        check_one_kind(part, place)
    except ValueError as error:
        raise Refused(str(error)) from error
    if kind == "text":
        if not isinstance(part.get("text"), str):
            raise Refused(f"Expected `text` of {place} to be a text, got {type_name(part.get('text'))}.")
        _check_keys(part, {"text"}, place)
        return {"type": "text", "text": part["text"]}
    address = part.get("image_url")
    _check_keys(part, {"image_url"}, place)
    if isinstance(address, dict):
        _check_keys(address, {"url"}, f"`image_url` of {place}")
        address = address.get("url")
    return {"type": "image", "image": address}


def _check_keys(part: dict[str, Any], known: set[str], place: str) -> None:
    """Refuses keys that would have no effect, such as a second image in a part."""
    given = {key for key, value in part.items() if value is not None}
    if unknown := sorted(given - known - {"type", *HINTS}):
        got = ", ".join(map(short, unknown))
        raise Refused(f"Expected nothing beside {sorted(known)} in {place}, got {got}, which the server does not read.")


def _variables(given: dict[str, Any], processor: Any) -> dict[str, Any]:
    """Checks that all names are variables of the chat template.

    Other names would reach the processor, which would open images by their path, or use another size or template.
    """
    template = getattr(processor, "chat_template", None)
    known = template_variables(*(template.values() if isinstance(template, dict) else [template])) - NO_VARIABLES
    if unknown := sorted(given.keys() - known):
        raise Refused(
            f"Expected `chat_template_kwargs` to be variables of the chat template, {sorted(known)}, got {unknown}."
        )
    return given


def _options(body: dict[str, Any], limits: ServerLimits, own: Any) -> tuple[dict[str, Any], list[str]]:
    """Returns the options of `generate`, and the stop strings. `own` is the `GenerationConfig` of the model."""
    options = _given_config(body.get("generation_config", {}), limits, own.to_dict())
    stops = [*_texts(options.pop("stop_strings", [])), *_texts(body.get("stop", []))]
    greedy = options.get("do_sample") is False
    drawn: dict[str, Any] = {field: body[field] for field in ("temperature", "top_p") if field in body}
    if greedy and (drawn.get("temperature") or "top_p" in drawn):
        raise Refused("Expected no `temperature` or `top_p` with `do_sample` of false, got both.")
    options |= drawn
    if greedy or options.get("temperature") == 0:
        options = {field: value for field, value in options.items() if field not in SAMPLING} | {"do_sample": False}
    elif not options.keys().isdisjoint(SAMPLING):  # Such an option also turns on sampling for a model that is greedy.
        options["do_sample"] = True
    options |= {field: float(options[field]) for field in FLOATS if field in options}
    if body.get("logit_bias"):
        options["sequence_bias"] = {(int(token),): float(bias) for token, bias in body["logit_bias"].items()}
    options.setdefault("num_beams", min(own.num_beams or 1, limits.max_beams))
    if options["num_beams"] > 1 and body.get("stream"):
        raise Refused("Expected `num_beams` of 1 with `stream`: beams have no answer before the end.")
    lengths = (body.get("max_completion_tokens"), body.get("max_tokens"), options.get("max_new_tokens"))
    default = min(max(own.max_new_tokens or 0, DEFAULT_LENGTH), limits.max_new_tokens)
    options["max_new_tokens"] = next(filter(None, lengths), default)
    return options, [*stops, *_texts(own.stop_strings or [])]


def _given_config(text: Any, limits: ServerLimits, own: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields of `generation_config` that are obeyed.

    `text` is an object, or its JSON text, which transformers' clients send. Any other field is accepted only with the
    value that it has in the model's own configuration, because such a field changes nothing.
    """
    try:
        given = json.loads(text) if isinstance(text, str) else text
    except (ValueError, RecursionError):
        given = None
    if not isinstance(given, dict):
        raise Refused(f"Expected `generation_config` to be an object, got {short(text)}.")
    given = {field: value for field, value in given.items() if value is not None}
    known = _config_fields(limits)
    others = {field for field in given.keys() - known.keys() if not (field in own and own[field] == given[field])}
    if unknown := sorted(others - {"transformers_version", "_from_model_config"}):
        raise Refused(
            f"`generation_config`: expected fields among {', '.join(known)}, got {', '.join(map(short, unknown))}."
        )
    _check(given, known, "generation_config.")
    return {field: value for field, value in given.items() if field in known}


def _texts(value: str | list[str]) -> list[str]:
    return [value] if isinstance(value, str) else value


def _no_tiny_number(temperature: float) -> float:
    """Refuses tiny temperatures, because the logits over such a number are infinite."""
    if 0 < temperature < 0.001:
        raise ValueError("expected 0, or a number from 0.001")
    return temperature


def _number(low: float, high: float) -> Any:
    return Annotated[float, Field(ge=low, le=high, allow_inf_nan=False)]


def _whole(low: int, high: int) -> Any:
    return Annotated[int, Field(ge=low, le=high)]


Temperature: Any = Annotated[_number(0, 2), AfterValidator(_no_tiny_number)]
StopText = Annotated[str, Field(min_length=1, max_length=LONGEST_STOP)]
Stops: Any = StopText | Annotated[list[StopText], Field(max_length=MOST_STOPS)]


def _body_fields(limits: ServerLimits, vocab_size: int) -> dict[str, Any]:
    """Returns the fields of a request that are obeyed, and their types."""
    tokens = _whole(1, limits.max_new_tokens)

    def known(token: str) -> str:
        if int(token) >= vocab_size:
            raise ValueError(f"expected token ids below {vocab_size}")
        return token

    token_id: Any = Annotated[str, Field(pattern="^[0-9]{1,20}$"), AfterValidator(known)]
    bias: Any = _number(-100, 100)
    return {
        "model": Any,  # A field of type `Any` is checked where it is read.
        "messages": Any,
        "max_tokens": tokens,
        "max_completion_tokens": tokens,
        "temperature": Temperature,
        "top_p": _number(0, 1),
        "seed": _whole(-(2**63), 2**63 - 1),
        "stop": Stops,
        "logit_bias": Annotated[dict[token_id, bias], Field(max_length=MOST_BIASES)],
        "stream": bool,
        # `include_obfuscation` only makes all chunks equally long, so it has no effect here.
        "stream_options": dict[Literal["include_usage", "include_obfuscation"], bool | None],
        "chat_template_kwargs": dict[str, Any],
        "generation_config": Any,
    }


def _config_fields(limits: ServerLimits) -> dict[str, Any]:
    """Returns the fields of `generation_config` that are obeyed, and their types."""
    share = _number(0, 1)
    return {
        "max_new_tokens": _whole(1, limits.max_new_tokens),
        "min_new_tokens": _whole(0, limits.max_new_tokens),
        "num_beams": _whole(1, limits.max_beams),
        "do_sample": bool,
        "early_stopping": bool | Literal["never"],
        "length_penalty": _number(-10, 10),
        "temperature": Temperature,
        "top_k": _whole(0, 10**6),
        "top_p": share,
        "min_p": share,
        "typical_p": _number(0.001, 1),
        "epsilon_cutoff": share,
        "eta_cutoff": share,
        "repetition_penalty": _number(0.01, 10),
        "no_repeat_ngram_size": _whole(0, 100),
        "stop_strings": Stops,
    }


def _check(given: dict[str, Any], known: dict[str, Any], where: str) -> None:
    for field in filter(given.__contains__, known):
        try:
            TypeAdapter(known[field]).validate_python(given[field], strict=True, extra="forbid")
        except ValidationError as error:
            why = "; or ".join(dict.fromkeys(each["msg"] for each in error.errors()[:3]))
            raise Refused(f"`{where}{field}` is {short(given[field])}: {why[:300]}.") from error
