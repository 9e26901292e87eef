"""Reads the messages of a chat: their texts and their images, in order."""

from __future__ import annotations

import dataclasses
import difflib
import io
import mimetypes
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from ..utils.keywords import suggestion
from ..utils.tensor_checks import type_name
from .image_reading import is_array, is_pil, read_frames


TEXTS = ("text", "input_text", "output_text")
IMAGES = ("image", "image_url", "input_image")
VIDEOS = ("video", "video_url")
SOURCES = ("url", "path", "base64")
# A message with one of these keys may have no `content`.
WITHOUT_CONTENT = ("tool_calls", "function_call", "reasoning_content", "reasoning", "thinking")
# Keys that clients of OpenAI and Anthropic add to a part. They are accepted and have no effect here.
HINTS = ("detail", "cache_control")
# Words in keys with which other libraries ask for another size or a part of an image, or for frames of a video.
REQUESTS = frozenset(
    "pixel pixels resize resized size resolution edge crop crops bbox tile tiles patch patches tokens fps frames "
    "nframes start end".split()
)

# A key whose name is close to one of these names probably holds images.
NAMES_OF_IMAGES = ("images", "image", "imgs", "img", "pictures", "picture", "photos", "photo", "pixel_values")
NEAR = 0.82  # Similarity for `difflib`. The names `image_id` and `image_ids` are below it, because they hold no images.
ADDRESSES = ("image_url", "input_image")


class ImagePart:
    """The place of an image among the parts of a message. `Conversation.images` holds the images, in this order."""


IMAGE = ImagePart()
Content = str | list[str | ImagePart] | None


@dataclasses.dataclass(frozen=True)
class Message:
    """One message of a chat."""

    fields: dict[str, Any]  # everything but the content: role, tool calls, reasoning, ...
    content: Content

    @property
    def role(self) -> str:
        return str(self.fields.get("role"))

    @property
    def parts(self) -> list[str | ImagePart]:
        """The content as a list of parts."""
        if self.content is None:
            return []
        return [self.content] if isinstance(self.content, str) else self.content

    def as_parts(self) -> str | list[dict[str, Any]] | None:
        """Returns the content in the form of transformers: a text, or a list of dicts."""
        if self.content is None or isinstance(self.content, str):
            return self.content
        return [{"type": "text", "text": part} if isinstance(part, str) else {"type": "image"} for part in self.content]

    @property
    def num_images(self) -> int:
        return sum(part is IMAGE for part in self.parts)


@dataclasses.dataclass(frozen=True)
class Conversation:
    """The messages of a chat and their images."""

    messages: list[Message]
    images: list[Any]  # one entry for each image part. None if the part has no source
    bare: list[dict[str, Any]] = dataclasses.field(default_factory=list)  # image parts without a source


def is_batch(conversation: object) -> bool:
    """Whether `conversation` is a list of conversations, and not one conversation."""
    if not isinstance(conversation, (list, tuple)) or not conversation:  # `read_conversation` refuses all but chats.
        return False
    return isinstance(conversation[0], (list, tuple)) or hasattr(conversation[0], "messages")


def read_conversation(conversation: object, where: str, **sampling: Any) -> Conversation:
    """Reads one conversation in the format of transformers or OpenAI. The conversation is not changed.

    Args:
        conversation (`list`): the messages, or an object that has them as `messages`.
        where (`str`): name of the conversation in errors.
        sampling: arguments of [`read_frames`], for videos.
    """
    messages = getattr(conversation, "messages", conversation)
    if not isinstance(messages, (list, tuple)) or not messages:
        raise TypeError(f"Expected {where} to be a list of one message or more, got {messages!r:.60}.")
    read = Conversation([], [])
    for index, message in enumerate(messages):
        place = f"message {index} of {where}"
        fields = plain_message(message, place)
        content = fields.pop("content", None)
        if isinstance(content, list):
            content = [each for part in content for each in _read_part(part, place, read, sampling)]
        read.messages.append(Message(fields, content))
    return read


def with_images(conversation: Conversation, images: object, where: str) -> Conversation:
    """Assigns `images`, which the caller has passed separately, to the image parts without a source, in order."""
    bare = len(conversation.bare)
    if images is None:
        if bare:
            raise ValueError(
                f"Expected an image for each image part of {where}, got {bare} parts without an image."
                f"{_unread(*conversation.bare)} Write the image into the part, as `image`, `url`, `path` or "
                "`base64`, or pass `images` in `processor_kwargs`."
            )
        return conversation
    passed: Any = images
    given = list(passed) if isinstance(images, (list, tuple)) or getattr(images, "ndim", None) == 4 else [passed]
    given = [image for image in given if image is not None]
    if not conversation.images:  # The text has markers, or the model needs none.
        return dataclasses.replace(conversation, images=given)
    if len(given) != bare:
        raise ValueError(
            f"Expected {bare} `images` for {where}, one for each image part without an image, got {len(given)}."
        )
    rest = iter(given)
    filled = [next(rest) if image is None else image for image in conversation.images]
    return dataclasses.replace(conversation, images=filled)


def plain_message(message: object, where: str) -> dict[str, Any]:
    """Returns a message as a dict. It has no values that are None, and neither have its parts.

    Data sets fill missing fields with None.

    Raises:
        TypeError: for a message, a content, a part or a text of a wrong type.
        ValueError: for a message without content, for images outside of the content, and for a part of an unknown type,
            with both a text and an image, or with a request that is not obeyed.
    """
    read = _mapping(message)
    if read is None or not isinstance(read.get("role"), str):
        came = type_name(message) if read is None else "one without `role`"
        raise TypeError(f"Expected {where} to be a dict with `role` and `content`, got {came}.")
    check_images_inside(read, where)
    content = read.get("content")
    if "content" not in read and len(read) > 1 and not any(name in read for name in WITHOUT_CONTENT):
        raise ValueError(f"Expected `content` in {where}, got a message with {', '.join(map(str, read))} alone.")
    if content is not None and not isinstance(content, (str, list, tuple)):
        raise TypeError(f"Expected the content of {where} to be a str or a list of parts, got {type_name(content)}.")
    plain = {str(name): value for name, value in read.items() if value is not None}
    if isinstance(content, (list, tuple)):
        plain["content"] = [_plain_part(part, where) for part in content]
    return plain


def parts_of(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the parts of a message of [`plain_message`]. The list is empty if the content is a text."""
    content = message.get("content")
    return content if isinstance(content, list) else []


def _plain_part(part: Any, where: str) -> dict[str, Any]:
    read = _mapping(part)
    if read is None:
        raise TypeError(
            f"Expected the parts of {where} to be dicts with a `type`, got {type_name(part)}. An image is "
            '{"type": "image", "image": ...}, a text {"type": "text", "text": ...}.'
        )
    given = {str(name): value for name, value in read.items() if value is not None}
    kind = given.get("type")
    if kind not in (*TEXTS, *IMAGES, *VIDEOS):
        keys = f" in a part with the keys {', '.join(given)}" if kind is None else ""
        raise ValueError(
            f"Expected the type of each part of {where} to be one of text, image, image_url, video, got {kind!r}{keys}."
        )
    if kind in TEXTS and not isinstance(given.get("text"), str):
        got = type_name(given.get("text"))
        raise TypeError(f"Expected `text` of a part of {where} to be a str, got {got}.{_unread(given)}")
    check_one_kind(given, where)
    return given


def _read_part(
    part: dict[str, Any], where: str, conversation: Conversation, sampling: dict[str, Any]
) -> list[str | ImagePart]:
    """Reads a part, and appends its images to those of the conversation. A video becomes one image for each frame."""
    if part["type"] in TEXTS:
        return [part["text"]]
    if part["type"] in IMAGES:
        image = _source(part, IMAGES, where)
        if image is None:
            conversation.bare.append(part)
        conversation.images.append(image)
        return [IMAGE]
    video = _source(part, VIDEOS, where)
    if video is None:
        got = f"got none of them.{_unread(part)}"
        raise ValueError(f"Expected a video part of {where} to have `video`, `url` or `path`, {got}")
    frames = read_frames(video, **sampling)
    conversation.images.extend(frames)
    return [IMAGE] * len(frames)


def check_one_kind(part: Mapping[str, Any], where: str) -> None:
    """Checks that a part is either a text or an image, and asks for nothing that is not obeyed.

    Raises:
        ValueError: for a part with a text and an image, because one of them would be lost. Also for an image or a video
            with keys that ask for a size, a crop or frames of its own.
    """
    is_text = part.get("type") in TEXTS
    others = (*IMAGES, *VIDEOS, *SOURCES) if is_text else ("text",)
    values = ((name, part.get(name)) for name in others)
    if found := [name for name, value in values if value is not None and not (isinstance(value, str) and not value)]:
        raise ValueError(
            f"Expected a text or an image in each part of {where}, got a part of type {part['type']!r} with "
            f"`{found[0]}` in it. Write two parts."
        )
    if not is_text:
        inner = [_mapping(part[name]) for name in (*IMAGES, *VIDEOS) if part.get(name) is not None]
        for name, value in (item for given in (part, *filter(None, inner)) for item in given.items()):
            words = re.findall("[a-z]+", re.sub("([A-Z])", r" \1", str(name)).lower())  # also splits `maxPixels`
            if value is not None and not REQUESTS.isdisjoint(words):
                raise ValueError(
                    f"Expected the parts of {where} without `{name}`, which is not obeyed, got {value!r:.60}. Each "
                    "image gets the size that the image processor gives it. Change the settings of the image "
                    "processor, or resize the image before. Frames of videos are chosen for a whole call, by "
                    "`num_frames` or `fps`."
                )


def _source(part: dict[str, Any], names: tuple[str, ...], where: str) -> Any:
    found = [name for name in (*names, *SOURCES) if name in part]
    if len(found) > 1:
        raise ValueError(f"Expected one {names[0]} in each part of {where}, got {len(found)}: {', '.join(found)}.")
    if not found:
        return None
    value = part[found[0]]
    inner = _mapping(value)
    if inner is not None and "url" in inner:  # OpenAI's format
        value = inner["url"]
    return Path(value) if found[0] == "path" and isinstance(value, str) else value


def _unread(*parts: Mapping[str, Any]) -> str:
    """Returns a sentence that names the keys of parts that nothing reads. It is empty if there are none."""
    known = ("text", *IMAGES, *VIDEOS, *SOURCES)
    unknown = dict.fromkeys(str(key) for part in parts for key in part if key not in ("type", *known, *HINTS))
    if not unknown:
        return ""
    return f" Nothing reads the key {', '.join(f'`{key}`' for key in unknown)}.{suggestion(next(iter(unknown)), known)}"


def _mapping(value: Any) -> Mapping[str, Any] | None:
    """Returns a dict unchanged, and a pydantic model, such as a message of the `openai` client, as a dict.

    None for any other value.
    """
    if isinstance(value, Mapping):
        return value
    dump = getattr(value, "model_dump", None)
    made = dump() if callable(dump) else None
    return made if isinstance(made, Mapping) else None


def check_images_inside(message: Mapping[str, Any], where: str) -> None:
    """Raises a `ValueError` for a key other than `content` that holds images, as in the messages of Ollama."""
    for name, value in message.items():
        if name in ("role", "content"):
            continue
        if looks_like_images(name, value) or (name in ADDRESSES and value is not None):
            raise ValueError(
                f"Expected the images of {where} in its `content`, got `{name}` beside it, which is not read. Put the "
                "images into `content` as image parts."
            )


def looks_like_images(name: str, value: object) -> bool:
    """Whether a key holds images, judged by its name and by its value."""
    return value is not None and (_holds_images(value) or (is_near_images(name) and not _holds_numbers(value)))


def is_near_images(name: object) -> bool:
    return isinstance(name, str) and bool(difflib.get_close_matches(name.lower(), NAMES_OF_IMAGES, n=1, cutoff=NEAR))


def _holds_images(value: Any) -> bool:
    """Whether a value is an image or contains one: a PIL image, an array of rank 3 or more, or a dict of `datasets`."""
    if isinstance(value, (str, int, float)):
        return False
    if isinstance(value, bytes):
        return is_picture(value)
    if isinstance(value, Mapping):  # `datasets` also keeps sound in such a dict, so the content decides.
        content, path = value.get("bytes"), value.get("path")
        if isinstance(content, bytes):
            return is_picture(content)
        kind = mimetypes.guess_type(path)[0] if isinstance(path, str) else None
        return set(value) <= {"bytes", "path"} and (kind or "").startswith("image/")
    if isinstance(value, Sequence):
        return any(_holds_images(each) for each in value)
    return value.ndim >= 3 if is_array(value) else is_pil(value)


def is_picture(content: bytes) -> bool:
    """Whether a file begins like an image that Pillow can open."""
    try:
        Image.open(io.BytesIO(content)).close()  # This only reads the header.
    except Exception:  # Pillow raises errors of many kinds.
        return False
    return True


def _holds_numbers(value: Any) -> bool:
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return bool(value) and all(isinstance(each, (int, float)) for each in value)
    return isinstance(value, (int, float))
