"""Reads a folder of pictures with `metadata.jsonl`, as in `datasets`' ImageFolder, as rows to train on.

Each line is one example, in one of these forms:

    {"file_name": "a.png", "text": "a red circle"}                           a caption
    {"file_name": "a.png", "question": "which colour ?", "answer": "red"}    a question about a picture
    {"messages": [...]}                                                      a chat
    {"prompt": [...], "completion": [...]}                                   a chat; only the completion is trained on

In a chat, a picture is a part {"type": "image", "path": "a.png"} of a message. Instead of `file_name`, an example may
have `images`, a list of files. Paths are relative to the folder.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image
from tqdm.auto import tqdm

from ..processing.chat_messages import IMAGES
from ..utils.checkpoint_files import sha256_of
from ..utils.keywords import suggestion
from .launch import is_first_process
from .training_rows import IMAGE_SOURCES, read_row


METADATA = "metadata.jsonl"
CAPTION_PROMPT = "Describe the image."
# The forms of an example, each with the fields that it needs.
FORMS = (("text",), ("question", "answer"), ("messages",), ("prompt", "completion"))
PICTURES = ("file_name", "images")
MAX_PROBLEMS = 20


class PictureRows(NamedTuple):
    file: Path
    rows: list[dict[str, Any]]  # for a collator, with the paths of their pictures
    lines: list[int]  # of each row, counted from 1
    fingerprint: str  # changes if the file or a picture changes
    problems: list[tuple[int, str]]  # lines that are not examples, each with the reason
    captions: int  # number of lines that are captions: `prompt` is their question
    contents: dict[Path, str]  # SHA-256 of the file of each picture; "" for a file that is missing


def read_folder(folder: str | Path, prompt: str = CAPTION_PROMPT, more_fields: Sequence[str] = ()) -> PictureRows:
    """Reads the examples of a folder. [`check_rows`] raises the errors of its lines and of its pictures, all at once.

    `prompt` is the user's message in an example that is a caption. `more_fields` may stand in a line, too, and are kept
    in its row.

    Raises:
        ValueError: for a missing folder or file, or an empty file.
    """
    folder = Path(folder)
    file = _metadata_file(folder)
    rows, lines, problems, captions = [], [], [], 0
    digest = hashlib.sha256()
    contents: dict[Path, str] = {}  # a file is read once, however many lines show it
    # `splitlines` would also split at U+2028 and U+0085, which JSON allows in a text.
    for number, line in enumerate(file.read_text(encoding="utf-8-sig").split("\n"), start=1):
        if not line.strip():
            continue
        digest.update(line.encode())
        try:
            row, pictures, is_caption = _read_line(line, folder, prompt, more_fields)
        except (TypeError, ValueError) as error:
            problems.append((number, str(error)))
            continue
        for picture in pictures:
            if picture not in contents:  # `check_rows` tells which files are missing
                contents[picture] = sha256_of(picture) if picture.is_file() else ""
            digest.update(f"{picture.name}{contents[picture]}".encode())
        rows.append(row)
        lines.append(number)
        captions += is_caption
    if not rows and not problems:
        raise ValueError(f"Expected {file} to hold examples, one per line, got none.")
    return PictureRows(file, rows, lines, digest.hexdigest(), problems, captions, contents)


def pictures_by_content(data: PictureRows) -> dict[str, Path]:
    """Returns the pictures of a folder by the SHA-256 of their files. Of equal files it returns one.

    Raises a `ValueError` that lists the lines that are not examples, and those of pictures that do not exist.
    """
    problems = list(data.problems)
    pictures: dict[str, Path] = {}
    for row, line in zip(data.rows, data.lines):
        for part in _picture_parts(row):
            path = Path(part["path"])
            if path.is_file():
                pictures.setdefault(data.contents[path], path)
            else:
                problems.append((line, str(_unreadable(path, data.file.parent))))
    if problems:
        raise ValueError(_list_problems(data.file, sorted(problems)))
    return pictures


def check_rows(
    folders: Sequence[PictureRows],
    collate: Callable[[list[dict[str, Any]]], Any],
    with_pixels: Callable[[list[dict[str, Any]]], Any] | None = None,
) -> int:
    """Makes a batch of each row alone, to find unreadable pictures, empty or cut answers, and templates that fail.

    `with_pixels` makes batches of pictures in memory, where `collate` needs files. Returns the number of tokens in the
    longest row.

    Raises:
        ValueError: for rows that cannot be trained on. The message lists their lines, in all folders.
    """
    longest, told = 0, []
    for data in folders:
        problems = list(data.problems)
        progress = tqdm(data.rows, f"Checking {data.file.name}", leave=False, disable=not is_first_process())
        for row, line in zip(progress, data.lines):
            try:
                longest = max(longest, collate([row])["input_ids"].shape[1])
            except (TypeError, ValueError) as error:
                problems.append((line, _reason(row, error, data.file.parent, with_pixels or collate)))
        if problems:
            told.append(_list_problems(data.file, sorted(problems)))
    if told:
        raise ValueError("\n".join(told))
    return longest


def _reason(row: dict[str, Any], error: Exception, folder: Path, collate: Callable[[list[dict[str, Any]]], Any]) -> str:
    """Why a row cannot be trained on: all pictures that cannot be read, and what is wrong beside them."""
    found = {part["path"]: _unreadable(Path(part["path"]), folder) for part in _picture_parts(row)}
    reasons = {path: reason for path, reason in found.items() if reason}
    if not reasons:
        return _without_row(error)
    readable = copy.deepcopy(row)
    for part in _picture_parts(readable):
        if part["path"] in reasons:
            part["image"] = Image.new("RGB", (64, 64), "white")
            del part["path"]
    try:
        collate([readable])
    except (TypeError, ValueError) as other:
        return "; ".join([*reasons.values(), _without_row(other)])
    return "; ".join(reasons.values())


def _without_row(error: Exception) -> str:
    """An error of the collator, without the row's place in a batch of one."""
    return str(error).partition(": ")[2]


def _picture_parts(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    messages = row["messages"] if "messages" in row else [*row["prompt"], *row["completion"]]
    parts = [part for message in messages if isinstance(message.get("content"), list) for part in message["content"]]
    return [part for part in parts if "path" in part]


def _unreadable(path: Path, folder: Path) -> str | None:
    """Why a picture cannot be read, or None."""
    name = str(path.relative_to(folder) if path.is_relative_to(folder) else path)
    if not path.is_file():
        return f"the picture {name!r} does not exist"
    try:
        with Image.open(path) as picture:
            picture.load()
    except Exception as error:  # Pillow raises errors of many kinds
        return f"the picture {name!r} cannot be read: {error}"
    return None


def _list_problems(file: Path, problems: list[tuple[int, str]]) -> str:
    shown = "".join(f"\n  line {number}: {problem}" for number, problem in problems[:MAX_PROBLEMS])
    more = f"\n  and {len(problems) - MAX_PROBLEMS} more" if len(problems) > MAX_PROBLEMS else ""
    return f"{file} has {len(problems)} line(s) that cannot be used:{shown}{more}"


def _metadata_file(folder: Path) -> Path:
    if not folder.is_dir():
        raise ValueError(f"Expected a folder with pictures and {METADATA}, got {folder}, which is not a folder.")
    if (folder / METADATA).is_file():
        return folder / METADATA
    others = sorted(folder.glob("*.jsonl"))
    if len(others) != 1:
        found = f"several other files: {[file.name for file in others]}" if others else "no .jsonl file"
        raise ValueError(f"Expected {folder} to hold {METADATA}, with one example per line, got {found}.")
    return others[0]


def _read_line(
    line: str, folder: Path, prompt: str, more_fields: Sequence[str]
) -> tuple[dict[str, Any], list[Path], bool]:
    """A row, its pictures, and whether it is a caption."""
    try:
        example = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"broken JSON: {error.msg} at column {error.colno}") from None
    if not isinstance(example, dict):
        raise ValueError(f"expected a JSON object, got {type(example).__name__}")
    more = {name: example[name] for name in more_fields if name in example}
    _check_fields(example, more)
    row = _as_row(example, prompt)
    pictures: list[Path] = []
    messages = [_with_paths(message, folder, pictures) for message in read_row(row).messages]
    if "prompt" in row:
        first = len(row["prompt"])
        return {**more, "prompt": messages[:first], "completion": messages[first:]}, pictures, False
    return {**more, "messages": messages}, pictures, "text" in example


def _check_fields(example: Mapping[str, Any], more: Mapping[str, Any]) -> None:
    known = [*PICTURES, *(name for form in FORMS for name in form), *more]
    for name in example:
        if name not in known:
            raise ValueError(f"unknown field {name!r}.{suggestion(name, known)} Known are {known}")
    forms = [form for form in FORMS if any(name in example for name in form)]
    if len(forms) != 1:
        raise ValueError(f"expected the fields of one of {[list(form) for form in FORMS]}, got {sorted(example)}")
    for name in forms[0]:
        if name not in example:
            raise ValueError(f"the field {name!r} is missing, got {sorted(example)}")
        if forms[0] in FORMS[:2] and not (isinstance(example[name], str) and example[name].strip()):
            raise ValueError(f"{name!r} must be a text that is not empty, got {example[name]!r}")
    if "text" in example and not any(name in example for name in PICTURES):
        raise ValueError("a caption needs the field 'file_name'")


def _as_row(example: Mapping[str, Any], prompt: str) -> dict[str, Any]:
    if all(name in example for name in PICTURES):
        raise ValueError("expected 'file_name' or 'images', got both")
    images = example.get("images", [])
    if "file_name" in example:
        images = [example["file_name"]]
    if not isinstance(images, list) or not all(isinstance(image, str) and image for image in images):
        raise ValueError(f"pictures must be names of files, got {images!r}")
    with_images: dict[str, Any] = {"images": images} if images else {}
    if "messages" in example or "prompt" in example:
        return {**{name: value for name, value in example.items() if name not in PICTURES}, **with_images}
    question, answer = (example["question"], example["answer"]) if "question" in example else (prompt, example["text"])
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"messages": messages, **with_images}


def _with_paths(message: dict[str, Any], folder: Path, pictures: list[Path]) -> dict[str, Any]:
    """Returns the message with paths of files as its pictures, and adds these paths to `pictures`."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    parts = []
    for part in content:
        if part["type"] in IMAGES:
            source = next(part[name] for name in IMAGE_SOURCES if name in part)
            if isinstance(source, Mapping):  # {"type": "image_url", "image_url": {"url": ...}}
                source = source.get("url")
            if not isinstance(source, str):
                raise ValueError(f"pictures must be names of files, got {source!r}")
            if source.startswith(("http:", "https:", "data:")) or "base64" in part:
                raise ValueError(f"pictures must be files in the folder, got {source[:60]!r}")
            picture = folder / source.removeprefix("file://")
            pictures.append(picture)
            part = {"type": "image", "path": str(picture)}
        parts.append(part)
    return {**message, "content": parts}
