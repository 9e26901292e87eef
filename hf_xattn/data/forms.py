"""The forms of an example, and how each becomes a row for a collator.

An example is what a file holds for a row, such as `{"file_name": "a.png", "text": "a red circle"}`. Its fields tell
which form it has. In addition to these fields it may have images (`PICTURES`) and other columns. The other columns stay
in the row, so that an image in a column of another name can be refused later.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.request import url2pathname

from ..processing.chat_messages import IMAGES
from ..utils.keywords import suggestion
from .pictures import content_of
from .rows import FORMS, IMAGE_SOURCES, PICTURES, SYSTEM, image_parts, read_row
from .tar_shards import OWN_PICTURES, endings


CAPTION_PROMPT = "Describe the image."
TEXTS = FORMS[:3]  # the forms in which each field is a text
# Names of speakers in files of LLaVA and ShareGPT, with the role that each means.
SPEAKERS = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "model"), "assistant"),
    "system": "system",
}
# Fields that hold an id of the example. An id often looks like the name of an image, such as `train/000.jpg`.
OF_IDS = re.compile(r"(^|_)(id|ids|uid|uuid|key|hash|key__|url__)$", re.IGNORECASE)
Messages = list[dict[str, Any]]


def is_caption(example: Mapping[str, Any]) -> bool:
    """Whether an example is a caption, whose question is the prompt."""
    return any(example.get(name) is not None for name in ("text", "caption"))


def row_of(example: Mapping[str, Any], folder: Path, prompt: str) -> dict[str, Any]:
    """Returns the row of an example: `messages`, or `prompt` and `completion`, with images in the parts of messages.

    Args:
        example (`Mapping`): what a file holds for the row.
        folder (`Path`): the folder that names of images are relative to.
        prompt (`str`): the question for a caption.

    Raises:
        TypeError, ValueError: for an example that has no form or several, and for images that are not files.
    """
    example = {name: value for name, value in example.items() if value is not None}
    if isinstance(example.get("caption"), str) and example["caption"].strip() == example.get("text"):
        del example["caption"]  # shards of img2dataset repeat the caption in their `.txt`
    form = _form_of(example)
    pictures = _pictures(example)
    made = _MESSAGES_OF[form[0]](example, prompt) if form[0] in _MESSAGES_OF else {name: example[name] for name in form}
    others = {name: value for name, value in example.items() if name not in (*form, *PICTURES, SYSTEM, OWN_PICTURES)}
    system = {SYSTEM: example[SYSTEM]} if SYSTEM in example else {}
    read = read_row({**others, **made, **system, **({"images": pictures} if pictures else {})})
    if form[0] in ("text", "caption") and not pictures:
        raise ValueError("a caption needs the field 'file_name' or 'image'")
    messages = [_with_files(message, folder) for message in read.messages]
    if not image_parts(messages):
        _check_no_pictures(others)
    if "prompt" in made:
        first = len(messages) - len(made["completion"])
        return {**others, "prompt": messages[:first], "completion": messages[first:]}
    return {**others, "messages": messages}


def _form_of(example: Mapping[str, Any]) -> tuple[str, ...]:
    forms = [form for form in FORMS if any(name in example for name in form)]
    given = sorted(name for name in example if name != OWN_PICTURES)
    if len(forms) != 1:
        known = [name for form in FORMS for name in form]
        others = [name for name in given if name not in (*known, *PICTURES, SYSTEM)]
        hint = next((found for name in others if (found := suggestion(name, known))), "")
        raise ValueError(f"expected the fields of one of {[list(form) for form in FORMS]}, got {given}.{hint}")
    for name in forms[0]:
        if name not in example:
            raise ValueError(f"the field {name!r} is missing, got {given}")
        if forms[0] in TEXTS and not (isinstance(example[name], str) and example[name].strip()):
            raise ValueError(f"{name!r} must be a text that is not empty, got {example[name]!r}")
    return forms[0]


def _check_no_pictures(others: Mapping[str, Any]) -> None:
    """Raises a `ValueError` if a field of a row without images names an image file: the field was probably misnamed."""
    for name, value in others.items():
        if _names_a_picture(value) and not OF_IDS.search(name):
            raise ValueError(
                f"expected the name of an image in one of {list(PICTURES)}, got it in {name!r}, which is not read: "
                f"{value!r:.100}. Rename or remove the field"
            )


def _names_a_picture(value: Any) -> bool:
    if isinstance(value, (list, Mapping)):
        return any(map(_names_a_picture, value.values() if isinstance(value, Mapping) else value))
    return isinstance(value, str) and value.strip().partition("?")[0].lower().endswith(endings())


def _pictures(example: Mapping[str, Any]) -> list[Any]:
    """Returns the images of an example: names of files, or dicts with `bytes`, as `datasets` stores images."""
    own = example.get(OWN_PICTURES, [])
    given = [name for name in PICTURES if name in example]
    if len(given) > 1:
        raise ValueError(f"expected one of {list(PICTURES)}, got both {given[0]!r} and {given[1]!r}")
    images = example[given[0]] if given else []
    images = images if given == ["images"] or (given == ["image"] and isinstance(images, list)) else [images]
    images = images if given else []
    if not isinstance(images, list) or not all(_is_picture(image) for image in images):
        raise ValueError(f"expected images as names of files, got {images!r:.200}")
    if own and images and len(own) != len(images):
        raise ValueError(f"expected {len(images)} image(s) in the sample, as `{given[0]}` names, got {len(own)}")
    return _in_order(own, images) if own and images else own or images


def _in_order(own: list[dict[str, Any]], names: list[Any]) -> list[Any]:
    """Returns the images of a sample in the order in which its fields name them.

    The order is not changed if the fields do not use the names in the shard.
    """
    paths = [name.get("path") if isinstance(name, Mapping) else name for name in names]
    given = [os.path.basename(path) for path in paths if isinstance(path, str)]
    named = {os.path.basename(picture["path"]): picture for picture in own}
    known = [name for name in given if name in named]
    if not known:  # the names are of the files that the images came from before they were packed
        return own
    if sorted(known) != sorted(named):
        raise ValueError(f"expected the names of the images in the sample, {sorted(named)}, got {given}")
    return [named[name] for name in known]


def _is_picture(image: Any) -> bool:
    if isinstance(image, Mapping):
        return isinstance(image.get("bytes"), bytes) or isinstance(image.get("path"), str)
    return isinstance(image, (str, bytes)) and bool(image)


def _asked(question: str, answer: str) -> dict[str, Messages]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def _conversations(example: Mapping[str, Any], _: str) -> dict[str, Messages]:
    """Reads the form of LLaVA and ShareGPT: [{"from": "human", "value": "<image>\\nwhat is it ?"}, ...]."""
    turns = example["conversations"]
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, Mapping) for turn in turns):
        raise ValueError(f"`conversations` must be a list of turns that is not empty, got {turns!r:.200}")
    messages = []
    for index, turn in enumerate(turns):
        speaker, text = turn.get("from", turn.get("role")), turn.get("value", turn.get("content"))
        if speaker not in SPEAKERS or not isinstance(text, str):
            raise ValueError(
                f"expected turn {index} of `conversations` to have `from`, one of {list(SPEAKERS)}, and a text as "
                f"`value`, got {dict(turn)!r:.200}"
            )
        others = {name: value for name, value in turn.items() if name not in ("from", "role", "value", "content")}
        messages.append({**others, "role": SPEAKERS[speaker], "content": text})
    return {"messages": messages}


def _texts(example: Mapping[str, Any], _: str) -> dict[str, Messages]:
    """Reads the form of The Cauldron and FineVision: [{"user": "what is it ?", "assistant": "a circle"}, ...]."""
    turns = example["texts"]
    kinds = ("user", "assistant")
    if not isinstance(turns, list) or not turns:
        raise ValueError(f"`texts` must be a list of turns that is not empty, got {turns!r:.200}")
    for index, turn in enumerate(turns):
        if not (isinstance(turn, Mapping) and all(isinstance(turn.get(kind), str) for kind in kinds)):
            raise ValueError(f"expected turn {index} of `texts` to have `user` and `assistant`, got {turn!r:.200}")
    messages = []
    for turn in turns:  # `source` names a data set and is ignored; other keys go to the answer
        others = {name: value for name, value in turn.items() if name not in (*kinds, "source")}
        messages.append({"role": "user", "content": turn["user"]})
        messages.append({**others, "role": "assistant", "content": turn["assistant"]})
    return {"messages": messages}


_MESSAGES_OF: dict[str, Callable[[Mapping[str, Any], str], dict[str, Messages]]] = {
    "text": lambda example, prompt: _asked(prompt, example["text"]),
    "caption": lambda example, prompt: _asked(prompt, example["caption"]),
    "question": lambda example, _: _asked(example["question"], example["answer"]),
    "conversations": _conversations,
    "texts": _texts,
}


def _with_files(message: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Returns the message with its images as paths of files or as the contents of files."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    return {**message, "content": [_file(part, folder) if part["type"] in IMAGES else part for part in content]}


def _file(part: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    source, *others = [part[name] for name in IMAGE_SOURCES if name in part]
    if others:
        raise ValueError(f"expected one image in a part, got {1 + len(others)}: {dict(part)!r:.200}")
    if isinstance(source, bytes):
        return {"type": "image", "image": source}
    if isinstance(source, Mapping):  # {"type": "image_url", "image_url": {"url": ...}}
        source = source.get("url")
    if not isinstance(source, str):
        raise ValueError(f"expected images as names of files, got {source!r:.200}")
    if source.startswith(("http:", "https:")):
        raise ValueError(f"expected images as files, got the web address {source[:60]!r}: download the image first")
    if source.startswith("data:") or "base64" in part:
        return {"type": "image", "image": content_of(source)}
    if source.startswith("file://"):
        source = url2pathname(source.removeprefix("file://").removeprefix("localhost"))
    return {"type": "image", "path": str(folder / source)}
