"""The images of rows: finds them, tells whether they can be read, and gives equal images an equal hash.

An image stays a path, or the bytes of a file, until a collator needs its pixels.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import os
import stat
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit
from urllib.request import url2pathname

from PIL import Image

from ..utils.checkpoint_files import sha256_of
from .rows import image_parts


LONGEST_NAME = 300  # characters of a name that are shown
KNOWN = 2**16  # files whose digests are kept


def picture_parts(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the parts of a row's messages that are images."""
    messages = row["messages"] if "messages" in row else [*row["prompt"], *row["completion"]]
    return image_parts(messages)


def picture_of(part: Mapping[str, Any]) -> Path | bytes:
    """Returns the image of a part that [`row_of`] has made: a path, or the bytes of a file."""
    return Path(part["path"]) if "path" in part else part["image"]


def path_of(picture: str | Path) -> Path:
    """Returns the path of an image that is named by a path or by an address `file://`."""
    text = str(picture)
    return Path(url2pathname(urlsplit(text).path)) if text.startswith("file://") else Path(picture)


def content_of(address: str) -> bytes:
    """Returns the bytes of an image that is written as a text: a data URL, or base64 without its head."""
    head, _, text = address.rpartition(",")
    if head and not head.endswith(";base64"):
        raise ValueError(f"expected an image as `data:image/png;base64,...`, got {address[:60]!r}")
    try:
        return base64.b64decode("".join(unquote(text).split()), validate=True)
    except ValueError as error:
        raise ValueError(f"expected an image in base64, got {address[:60]!r}: {error}") from None


def why_no_file(path: Path) -> str | None:
    """Returns why a path is not a file that can be opened, or None if it is. Never raises an error."""
    try:
        return None if stat.S_ISREG(os.stat(path).st_mode) else "is no file"
    except (FileNotFoundError, NotADirectoryError):
        return "does not exist"
    except (OSError, ValueError) as error:  # a long name, a folder that may not be read, a null character
        return f"cannot be opened: {getattr(error, 'strerror', None) or error}"


def digest_of(picture: str | Path | bytes) -> str:
    """Returns the SHA-256 of an image's file. A file is read again only if it has changed."""
    if isinstance(picture, bytes):
        return hashlib.sha256(picture).hexdigest()
    path = path_of(picture)
    status = os.stat(path)
    return _digest_of_file(str(path), status.st_mtime_ns, status.st_size)


@functools.lru_cache(KNOWN)
def _digest_of_file(path: str, changed: int, size: int) -> str:
    return sha256_of(Path(path))


def what_is_wrong(part: Mapping[str, Any], folder: Path) -> str | None:
    """Returns why an image cannot be read, or None if it can."""
    picture = picture_of(part)
    if isinstance(picture, bytes):
        name, source = "in the row", BytesIO(picture)
    else:
        path = path_of(picture)
        name = repr(str(path.relative_to(folder) if path.is_relative_to(folder) else path))
        name = name if len(name) <= LONGEST_NAME else f"{name[:LONGEST_NAME]}...'"
        if reason := why_no_file(path):
            return f"the image {name} {reason}"
        source = path  # type: ignore[assignment]
    try:
        with Image.open(source) as image:
            image.load()
    except Exception as error:  # Pillow raises errors of many kinds
        return f"the image {name} cannot be read: {error}"
    return None
