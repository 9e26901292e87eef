"""Pictures of rows: files or their contents, and what is equal for equal pictures."""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

from PIL import Image

from ..processing.chat_messages import IMAGES
from ..utils.checkpoint_files import sha256_of


KNOWN = 2**16  # files whose digests are kept


def picture_parts(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The parts of a row's messages that are pictures."""
    messages = row["messages"] if "messages" in row else [*row["prompt"], *row["completion"]]
    parts = [part for message in messages if isinstance(message.get("content"), list) for part in message["content"]]
    return [part for part in parts if part.get("type") in IMAGES]


def picture_of(part: Mapping[str, Any]) -> Any:
    """The picture of a part that [`row_of`] has made: a path, or the bytes of a file."""
    return Path(part["path"]) if "path" in part else part["image"]


def path_of(picture: str | Path) -> Path:
    text = str(picture)
    return Path(url2pathname(urlsplit(text).path)) if text.startswith("file://") else Path(picture)


def digest_of(picture: str | Path | bytes) -> str:
    """The SHA-256 of a picture's file. A file is read again only if it has changed."""
    if isinstance(picture, bytes):
        return hashlib.sha256(picture).hexdigest()
    path = path_of(picture)
    status = os.stat(path)
    return _digest_of_file(str(path), status.st_mtime_ns, status.st_size)


@functools.lru_cache(KNOWN)
def _digest_of_file(path: str, changed: int, size: int) -> str:
    return sha256_of(Path(path))


def what_is_wrong(part: Mapping[str, Any], folder: Path) -> str | None:
    """Why a picture cannot be read, or None."""
    picture = picture_of(part)
    if isinstance(picture, bytes):
        name, source = "in the row", BytesIO(picture)
    else:
        path = path_of(picture)
        name = repr(str(path.relative_to(folder) if path.is_relative_to(folder) else path))
        if not path.is_file():
            return f"the picture {name} does not exist"
        source = path  # type: ignore[assignment]
    try:
        with Image.open(source) as image:
            image.load()
    except Exception as error:  # Pillow raises errors of many kinds
        return f"the picture {name} cannot be read: {error}"
    return None
