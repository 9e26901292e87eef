"""Reads a request to `hf-xattn serve`. A field that the server does not support is refused and not ignored.

Only the values that are read here reach the processor and `generate`. Without this, a client could make the processor
open file paths, or make `generate` run a thousand beams, use another cache, or load a file of the server as an
assistant model.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, Discriminator, Field, Tag, TypeAdapter, ValidationError

from ..processing.chat_templates import template_variables
from ..utils.checkpoint_files import short
from .request_limits import Refused, ServerLimits


if TYPE_CHECKING:
    from ..modeling_xattn import XAttnForConditionalGeneration
    from ..processing.chat_templates import Processor

MOST_STOPS, LONGEST_STOP = 16, 256  # number of stop strings, and characters of each of them
MOST_BIASES = 300
DEFAULT_LENGTH = 1024  # tokens of an answer, unless the request sets a number or the model has a larger one
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
    body = _checked({**body, "messages": _without_nothing(body.get("messages", []))}, fields, "")
    options, stops = _options(body, limits, model.generation_config)
    messages, images = _for_processor(body["messages"], hasattr(processor, "tokenizer"))
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


class TextPart(BaseModel):
    """A text in the content of a message. `detail` and `cache_control` have no effect, here and in images."""

    type: Literal["text"]
    text: str
    detail: Any = None
    cache_control: Any = None


class Address(BaseModel):
    """The address of an image."""

    url: str
    detail: Any = None


def _text_or(kind: Any, name: str) -> Any:
    """Returns the type of a text or `kind`. Errors are about the one that was given. `name` is that of `kind` there."""
    choice = Discriminator(lambda given: "text" if isinstance(given, str) else name)
    return Annotated[Annotated[str, Tag("text")] | Annotated[kind, Tag(name)], choice]


class ImagePart(BaseModel):
    """An image in the content of a message."""

    type: Literal["image_url"]
    image_url: _text_or(Address, "object")  # type: ignore[valid-type]  # computed
    detail: Any = None
    cache_control: Any = None


class AskedMessage(BaseModel):
    """A message of a request."""

    role: Literal["system", "developer", "user", "assistant"]
    content: _text_or(list[Annotated[TextPart | ImagePart, Field(discriminator="type")]], "parts")  # type: ignore[valid-type]
    name: str | None = None


def _without_nothing(value: Any) -> Any:
    """Returns a value without the keys of inner dicts that hold nothing, which some clients write out."""
    if isinstance(value, dict):
        return {key: _without_nothing(inner) for key, inner in value.items() if inner not in (None, [], {})}
    return [_without_nothing(inner) for inner in value] if isinstance(value, list) else value


def _for_processor(
    messages: list[AskedMessage], with_parts: bool
) -> tuple[list[dict[str, Any]], list[tuple[str, dict[str, Any]]]]:
    """Returns the messages as the processor takes them, and each image part with its place in words.

    The `image` of a part is an address. Without `with_parts`, a list of text parts becomes one text, because the chat
    template of a tokenizer expects this.
    """
    made, images = [], []
    for index, message in enumerate(messages):
        content: Any = message.content
        if isinstance(content, list):
            parts: list[dict[str, Any]] = []
            for part in content:
                if isinstance(part, TextPart):
                    parts.append({"type": "text", "text": part.text})
                    continue
                address: Any = part.image_url
                parts.append({"type": "image", "image": address if isinstance(address, str) else address.url})
                images.append((f"part {len(parts) - 1} of message {index}", parts[-1]))
            content = parts if with_parts or images else " ".join(part["text"] for part in parts)
        name = {} if message.name is None else {"name": message.name}
        made.append({"role": message.role, **name, "content": content})
    return made, images


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
    return _checked(given, known, "generation_config.")


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
        "model": str,
        "messages": Annotated[list[AskedMessage], Field(min_length=1)],
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
        "generation_config": Any,  # It is checked where it is read.
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


def _checked(given: dict[str, Any], known: dict[str, Any], where: str) -> dict[str, Any]:
    """Returns the given fields that are known, as their types. A float is a float then, also if it was given as 1."""
    made = {}
    for field in filter(given.__contains__, known):
        try:
            made[field] = TypeAdapter(known[field]).validate_python(given[field], strict=True, extra="forbid")
        except ValidationError as error:
            errors = error.errors()[:3]
            if field == "messages":
                found = (f"`{'.'.join(map(str, (field, *each['loc'])))}`: {each['msg']}" for each in errors)
                raise Refused("; ".join(found)[:400] + ".") from error
            why = "; or ".join(dict.fromkeys(each["msg"] for each in errors))
            raise Refused(f"`{where}{field}` is {short(given[field])}: {why[:300]}.") from error
    return made
