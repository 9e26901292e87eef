"""Reads rows of data sets as conversations.

Most readers ignore what they do not know. Here this could train a model without its images, or on text that should not
be learned. So a misspelt column, key or role is an error:

- A key of a message or of a part must be one that is read.
- A row may have columns of its own. But a name that is close to one that is read is an error, and so are the fields
  with which other trainers control what is learned or shown.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ..processing.chat_messages import (
    HINTS,
    IMAGES,
    SOURCES,
    TEXTS,
    VIDEOS,
    WITHOUT_CONTENT,
    looks_like_images,
    parts_of,
    plain_message,
)
from ..utils.keywords import suggestion
from ..utils.tensor_checks import type_name


# The fields that each form of an example needs.
FORMS = (
    ("text",),
    ("caption",),
    ("question", "answer"),
    ("messages",),
    ("prompt", "completion"),
    ("conversations",),
    ("texts",),
)
SYSTEM = "system"
PICTURES = ("file_name", "image", "images")
# Columns that other packages show to the model. They are not supported here, so a row with one of them is refused.
NOT_READ = ("tools", "functions", "chat_template_kwargs", "video", "videos")
# Keys of an assistant message that say with 0 or 1 whether it is trained on: OpenAI's, and those of other trainers.
TRAINED = ("weight", "train", "training", "loss", "loss_scale", "loss_weight")
# Keys of a message. Chat templates read those that are not read here. `annotations`, which OpenAI's API returns, is
# ignored.
OF_TURNS = ("role", "content", *TRAINED, *WITHOUT_CONTENT, "name", "tool_call_id", "tool_plan", "annotations")
# Keys of a part. `index` is the number of an image in the column, as in llava-instruct-mix.
OF_PARTS = ("type", "text", *IMAGES, *VIDEOS, *SOURCES, *HINTS, "index", "annotations")
# Fields with which other trainers give a row a weight. The value 1 is allowed, because it changes nothing.
WEIGHTS = (*TRAINED, "sample_weight")
# Fields with which other trainers control what is learned of a row.
LEARNED = """
    loss_mask mask masked assistant_masks completion_mask labels_mask roles_to_train train_on_roles train_on_input
    train_on_inputs train_on_prompt train_detail mask_prompt mask_history kto_tag chosen rejected rejected_response
    rejected_messages preferred_output non_preferred_output
""".split()
# Fields with which other trainers show more to the model.
SHOWN = """
    system_prompt system_message system_instruction sys_prompt meta_instruction preamble developer instruction history
    documents available_tools chat_template enable_thinking min_pixels max_pixels resized_height resized_width
""".split()
OPTIONAL = (SYSTEM, *PICTURES, *NOT_READ)
# Keys under which a part may hold its image. The processor loads the image.
IMAGE_SOURCES = (*IMAGES, *SOURCES)
ASSISTANT = "assistant"
COLUMNS = ("messages", "prompt", "completion", "images", "image", *NOT_READ)
MARKER = "<image>"  # the place of an image in a text
# Roles in chat templates of transformers and TRL. For a tool, Llama says `ipython`, and OpenAI said `function`.
ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
ROLES_ELSEWHERE = {**dict.fromkeys(("model", "gpt", "bot", "chatbot"), "assistant"), "human": "user"}


def check_fields(row: Mapping[str, Any]) -> None:
    """Raises a `ValueError` for a field that was meant to be read and is not. No field may be None."""
    weights, others = ({_plain(name) for name in names} for names in (WEIGHTS, (*LEARNED, *SHOWN, "label")))
    of_forms = {name for form in FORMS for name in form}
    for name, value in row.items():
        if not isinstance(name, str) or name in (*OPTIONAL, *of_forms):
            continue
        plain = _plain(name)
        if plain in weights and not (isinstance(value, (int, float)) and value == 1):
            raise ValueError(
                f"Expected the field `{name}` of a row to be 1, got {value!r:.100}: rows have no weights. Give "
                "assistant messages a `weight` of 0 or 1, or remove the field."
            )
        # A boolean `label` is one of KTO training. Other labels are classes and are ignored.
        if plain in others and (isinstance(value, bool) if plain == "label" else _says_something(value)):
            raise ValueError(
                f"Expected a row without the field `{name}`, with which other trainers control what is learned or "
                f"shown, and which is not read here, got {value!r:.100}. Write a system message as `{SYSTEM}`, and "
                "other text into `messages`, or rename or remove the field."
            )
        absent = [each for each in of_forms if each not in row and each.rstrip("s") != name.rstrip("s")]
        hint = _near(name, [*OPTIONAL, "weight"], 0.8) or _near(name, absent, 0.87)
        if hint and plain not in weights:
            raise ValueError(f"Nothing reads the field `{name}` of a row.{hint} Rename or remove it.")


def check_keys(where: str, given: Iterable[Any], known: Collection[str]) -> None:
    """Raises a `ValueError` for an unknown key of a message or a part, which `where` names."""
    for key in given:
        if key not in known:
            raise ValueError(
                f"Nothing reads the key {key!r} of {where}.{suggestion(str(key), known, 0.75)} Expected one of "
                f"{sorted(known)}."
            )


def keys_of_template(template: str | Mapping[str, str] | None) -> frozenset[str]:
    """Returns the keys of a message that a chat template, or a dict of several, may read.

    These are all names that the text of the template looks up.
    """
    texts = template.values() if isinstance(template, Mapping) else [template]
    found = re.compile(
        r"""\.(\w+)\b(?!\s*\()|\[\s*['"](\w+)['"]|\bget\(\s*['"](\w+)['"]|['"](\w+)['"]\s+(?:not\s+)?in\b"""
    )
    return frozenset(name for text in texts if text for names in found.findall(text) for name in names if name)


def _plain(name: str) -> str:
    """Returns a name without its style: `loss_scale`, `lossScale` and `loss-scale` become the same."""
    return re.sub(r"[-_ ]", "", name).lower()


def _says_something(value: Any) -> bool:
    return bool(value) if isinstance(value, (str, int, float, Mapping, list, tuple)) else value is not None


def _near(name: str, known: Iterable[str], cutoff: float) -> str:
    """Returns ` Did you mean ...?` for a misspelt name. A longer name, such as `question_id`, is not a misspelt one."""
    lower = name.lower()
    alike = [each for each in known if each[0] == lower[:1]]  # `height` is no `weight`
    stems = {each: each.rstrip("s") for each in alike}
    return suggestion(
        lower, [e for e in alike if not lower.startswith(stems[e]) or len(lower) < len(stems[e]) + 2], cutoff
    )


class Conversation(NamedTuple):
    """A row that was read."""

    messages: list[dict[str, Any]]  # chat messages, whose parts hold the images
    answers: tuple[int, ...]  # indices of the assistant messages that are trained on


def read_row(row: object, of_template: Collection[str] = ()) -> Conversation:
    """Reads a row of a data set as a conversation. The row is not changed.

    Args:
        row (`Mapping`): the row. A field, or a key of a message or part, whose value is None counts as absent.
        of_template (`Collection[str]`): keys of messages that the chat template reads in addition to the usual ones.

    Returns:
        [`Conversation`]: the messages, and which of them are answers to train on.

    Raises:
        TypeError: for a row, a message or a part of a wrong type.
        ValueError: for missing, misnamed or unsupported columns, for unknown roles, for keys of messages and parts that
            nothing reads, for a text with `<image>` that has no image, and if the numbers of images and image parts
            differ.
    """
    if not isinstance(row, Mapping):
        raise TypeError(f"Expected a row of the data set to be a dict with `messages`, got {type_name(row)}.")
    given = {name: value for name, value in row.items() if value is not None}
    for name in NOT_READ:
        if given.get(name):
            raise ValueError(
                f"Expected a row without the column `{name}`, which is not supported: the model would not see it. "
                "Remove the column."
            )
    messages, first = _messages(given, row, {*OF_TURNS, *of_template})
    if given.get(SYSTEM):
        name = "messages" if "messages" in given else "prompt"
        messages, first = _with_system(messages, given[SYSTEM], name), first + 1
    for name, value in given.items():
        if name not in COLUMNS and looks_like_images(name, value):
            raise ValueError(
                f"Expected images in the column `images`, got the column `{name}`, which is not read. Did you mean "
                "`images`? Rename or remove it."
            )
    check_fields(given)
    messages = _with_images(messages, _images(given))
    if any(MARKER in text_of(message) for message in messages):
        raise ValueError(
            "a text holds '<image>', the place of an image, and has no image for it: add the image, or remove '<image>'"
        )
    said = [index for index, message in enumerate(messages) if message["role"] == ASSISTANT and index >= first]
    return Conversation(messages, tuple(index for index in said if is_trained(messages[index])))


def is_trained(message: Mapping[str, Any]) -> bool:
    """Whether a message is trained on: no key says otherwise."""
    return all(message.get(name, True) for name in TRAINED)


def text_of(message: Mapping[str, Any]) -> str:
    """Returns the text of a message, without its images."""
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def with_text(message: dict[str, Any], text: str) -> dict[str, Any]:
    """Returns the message with `text` instead of its texts. Its images stay."""
    content = message.get("content")
    if not isinstance(content, list):
        return {**message, "content": text}
    parts: list[dict[str, Any]] = []
    for part in content:
        if part.get("type") not in TEXTS:
            parts.append(part)
        elif not any(each.get("type") in TEXTS for each in parts):
            parts.append({**part, "text": text})
    return {**message, "content": parts}


def in_front(messages: list[dict[str, Any]], images: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns messages with image parts in front of the text of the first user message.

    Raises a `ValueError` if there is no user message.
    """
    first = next((index for index, message in enumerate(messages) if message["role"] == "user"), None)
    if first is None:
        raise ValueError(f"Expected a user message for the {len(images)} image(s) of the row, got none.")
    text = messages[first].get("content", "")
    texts = text if isinstance(text, list) else [{"type": "text", "text": text}]
    return [*messages[:first], {**messages[first], "content": [*images, *texts]}, *messages[first + 1 :]]


def _with_system(messages: list[dict[str, Any]], system: Any, name: str) -> list[dict[str, Any]]:
    """Puts the text of the column `system` in front of the messages, as a system message."""
    if not isinstance(system, str):
        raise ValueError(f"{SYSTEM!r} must be a text, got {system!r:.200}")
    if any(message["role"] == SYSTEM for message in messages):
        raise ValueError(f"expected one system message, got one in {name!r} and the field {SYSTEM!r}")
    return [{"role": SYSTEM, "content": system}, *messages]


def _messages(
    given: Mapping[str, Any], row: Mapping[str, Any], known: Collection[str]
) -> tuple[list[dict[str, Any]], int]:
    """Returns the messages of a row, and the index of the first one that may be trained on."""
    if "messages" in given:
        if "prompt" in given or "completion" in given:
            raise ValueError("Expected a row to have `messages`, or `prompt` and `completion`, got both.")
        return _checked("messages", given["messages"], known), 0
    if "prompt" in given and "completion" in given:
        prompt, completion = (_checked(name, given[name], known) for name in ("prompt", "completion"))
        if prompt[-1]["role"] == ASSISTANT:
            raise ValueError("`prompt` ends with an assistant message: put that message into `completion`.")
        return [*prompt, *completion], len(prompt)
    if not row:
        raise ValueError(
            "Expected a row with `messages`, got a row without columns: `Trainer` removes columns that are not "
            "arguments of the model. Set `remove_unused_columns=False` in its arguments."
        )
    hint = ""
    if "input_ids" in row:
        hint = (
            " The rows are already tokenized. For SFTTrainer set `dataset_kwargs={'skip_prepare_dataset': True}` and "
            "`remove_unused_columns=False` in SFTConfig. If they have images, their column must be named `images`."
        )
    elif set(row) <= {"images", "image"}:
        hint = " Set `remove_unused_columns=False` in the arguments of `Trainer`."
    raise ValueError(
        f"Expected a row with `messages`, or with `prompt` and `completion`, got the columns {sorted(row)}.{hint}"
    )


def _checked(name: str, messages: Any, known: Collection[str]) -> list[dict[str, Any]]:
    """Checks messages, and returns them as dicts without None, with which data sets fill missing fields."""
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        raise TypeError(f"Expected `{name}` to be a list of chat messages, got {type_name(messages)}.")
    if not messages:
        raise ValueError(f"`{name}` is an empty list: give one message or more.")
    return [_checked_message(f"`{name}[{index}]`", message, known) for index, message in enumerate(messages)]


def _checked_message(where: str, message: Any, known: Collection[str]) -> dict[str, Any]:
    if isinstance(message, Mapping) and isinstance(message.get("content"), (list, tuple)):
        parts = [{"type": "text", "text": each} if isinstance(each, str) else each for each in message["content"]]
        message = {**message, "content": parts}
    message = plain_message(message, where)
    role = message["role"]
    if role not in ROLES:
        meant = ROLES_ELSEWHERE.get(role.lower())
        hint = f" Did you mean `{meant}`?" if meant else suggestion(role.lower(), ROLES)
        raise ValueError(f"Expected the `role` of {where} to be one of {ROLES}, got {role!r}.{hint}")
    for name in TRAINED:
        if (value := message.get(name)) is not None and (role != ASSISTANT and not value or value not in (0, 1)):
            raise ValueError(
                f"Expected `{name}` of {where} to be 0 or 1, and 0 in an assistant message only, got {value!r}."
            )
    check_keys(where, message, known)
    for part in parts_of(message):
        check_keys(f"a part of {where}", part, OF_PARTS)
        if isinstance(part.get("image"), Mapping):
            part["image"] = _decoded(part["image"])
    return message


def _images(given: Mapping[str, Any]) -> list[Any]:
    if "images" in given and "image" in given:
        raise ValueError("Expected a row to have `images` or `image`, got both.")
    if "image" in given:
        return [_decoded(given["image"])]
    images = given.get("images", [])
    if not isinstance(images, Sequence) or isinstance(images, str):
        raise TypeError(f"Expected `images` to be a list of images, got {type_name(images)}.")
    return [_decoded(image) for image in images]


def _decoded(image: Any) -> Any:
    """Returns an image, or the bytes or path in a dict. `datasets` stores an image that is not decoded as a dict."""
    if not isinstance(image, Mapping):
        return image
    if image.get("bytes") is not None:
        return image["bytes"]
    if image.get("path") is not None:
        return image["path"]
    raise ValueError(f"Expected an image that is a dict to hold `bytes` or a `path`, got the keys {sorted(image)}.")


def image_parts(messages: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns the parts of checked messages that are images."""
    return [part for message in messages for part in parts_of(message) if part["type"] in IMAGES]


def _with_images(messages: list[dict[str, Any]], images: list[Any]) -> list[dict[str, Any]]:
    """Returns messages with the images of a column in their parts, or in the first user message, as TRL does."""
    if images and not image_parts(messages):
        messages = [each if each["role"] == ASSISTANT else _with_marked_parts(each) for each in messages]
        if not image_parts(messages):
            return in_front(messages, [{"type": "image", "image": image} for image in images])
    bare = [part for part in image_parts(messages) if _is_bare(part)]
    if len(bare) != len(images):
        got = f"{len(images)} image(s)" if images else "no `images` column"
        raise ValueError(f"Expected an image for each of {len(bare)} image part(s) without an image, got {got}.")
    if any(part.get("index", place) != place for place, part in enumerate(bare)):
        given = [part.get("index") for part in bare]
        raise ValueError(
            f"Expected image parts in the order of the column of images, got those with the `index` {given}."
        )
    left = iter(images)
    filled = []
    for message in messages:
        if parts := parts_of(message):
            parts = [{**part, "image": next(left)} if _is_bare(part) else part for part in parts]
            message = {**message, "content": parts}
        filled.append(message)
    return filled


def _with_marked_parts(message: dict[str, Any]) -> dict[str, Any]:
    """Replaces `<image>` in the texts of a message by image parts."""
    if MARKER not in text_of(message):
        return message
    parts: list[dict[str, Any]] = []
    for part in parts_of(message) or [{"type": "text", "text": message["content"]}]:
        parts += _split(part["text"]) if part["type"] in TEXTS else [part]
    return {**message, "content": parts}


def _split(text: str) -> list[dict[str, Any]]:
    """Splits a text at `<image>` into parts. White space between `<image>` and an end of the text is removed."""
    pieces = text.split(MARKER)
    parts: list[dict[str, Any]] = []
    for index, piece in enumerate(pieces):
        if index and not "".join(pieces[:index]).strip():
            piece = piece.lstrip()
        if index < len(pieces) - 1 and not "".join(pieces[index + 1 :]).strip():
            piece = piece.rstrip()
        parts += [{"type": "image"}] * (index > 0) + [{"type": "text", "text": piece}] * bool(piece.strip())
    return parts


def _is_bare(part: Mapping[str, Any]) -> bool:
    return part.get("type") in IMAGES and not any(name in part for name in IMAGE_SOURCES)
