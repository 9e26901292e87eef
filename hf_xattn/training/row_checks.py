"""Checks the names in a row of a data set: columns, keys of a message and roles.

Without these checks a misspelt name raises no error: the model is trained without the images, or on a chat with an unknown role.
"""

from __future__ import annotations

import difflib
import mimetypes
from collections.abc import Iterable, Mapping, Sequence
from io import BytesIO
from typing import Any

from ..processing.image_reading import is_array, is_pil
from ..utils.keywords import suggestion


COLUMNS = ("messages", "prompt", "completion", "images", "image", "tools", "chat_template_kwargs")
# Roles of transformers' and TRL's chat templates. `ipython` is Llama's name for a tool, `function` OpenAI's old one.
ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
ROLES_ELSEWHERE = {
    "model": "assistant",
    "gpt": "assistant",
    "bot": "assistant",
    "chatbot": "assistant",
    "human": "user",
}
# A column whose name is close to one of these is probably meant as `images`.
NAMES_OF_IMAGES = ("images", "image", "imgs", "img", "pictures", "picture", "photos", "photo", "pixel_values")
NEAR = 0.82  # similarity for `difflib`. `image_id` and `image_ids` stay below it: they hold no images


def check_columns(row: Mapping[str, Any]) -> None:
    """Raises a `ValueError` for a column that is not read, but holds images or has nearly the name `images`."""
    for name, value in row.items():
        if name in COLUMNS or value is None:
            continue
        if holds_images(value):
            raise ValueError(
                f"Expected images in the column `images`, got the column `{name}` with images, which is not read. Rename it to "
                "`images`, or remove it."
            )
        if is_near_images(name) and not _holds_numbers(value):
            raise ValueError(
                f"Expected images in the column `images`, got the column `{name}`, which is not read. Did you mean `images`? Rename "
                "the column, or remove it."
            )


def check_message(where: str, message: Mapping[str, Any]) -> None:
    """Raises a `ValueError` for an unknown role, and for a key of a message, other than `content`, that holds images."""
    role = message["role"]
    if role not in ROLES:
        meant = ROLES_ELSEWHERE.get(role.lower())
        hint = f" Did you mean `{meant}`?" if meant else suggestion(role.lower(), ROLES)
        raise ValueError(f"Expected the `role` of {where} to be one of {ROLES}, got {role!r}.{hint}")
    for name, value in message.items():
        if name in ("role", "content") or value is None:
            continue
        if holds_images(value) or (is_near_images(name) and not _holds_numbers(value)):
            raise ValueError(
                f"Expected the images of {where} in its `content`, got `{name}` beside it, which is not read. Put them into "
                "`content` as image parts, or into the column `images`."
            )


def misnamed_images(names: Iterable[str]) -> str | None:
    """Returns the first column that is not read and has nearly the name `images`, or None."""
    return next((name for name in names if name not in COLUMNS and is_near_images(name)), None)


def is_near_images(name: Any) -> bool:
    """Returns whether a name is nearly `images` or one of its usual variants, in upper or lower case."""
    return isinstance(name, str) and bool(difflib.get_close_matches(name.lower(), NAMES_OF_IMAGES, n=1, cutoff=NEAR))


def holds_images(value: Any) -> bool:
    """Returns whether a value is an image or holds one: PIL, an array of rank 3 or more, or the dict of `datasets`."""
    if isinstance(value, (str, int, float)):
        return False
    if isinstance(value, bytes):
        return _is_picture(value)
    if isinstance(value, Mapping):  # `datasets` keeps sound in such a dict too, so the content decides
        content, path = value.get("bytes"), value.get("path")
        if isinstance(content, bytes):
            return _is_picture(content)
        return set(value) <= {"bytes", "path"} and isinstance(path, str) and _is_picture_path(path)
    if isinstance(value, Sequence):
        return any(holds_images(each) for each in value)
    return value.ndim >= 3 if is_array(value) else is_pil(value)


def _is_picture(content: bytes) -> bool:
    from PIL import Image

    try:
        Image.open(BytesIO(content)).close()  # reads the header only
    except Exception:  # Pillow raises errors of many kinds
        return False
    return True


def _is_picture_path(path: str) -> bool:
    return (mimetypes.guess_type(path)[0] or "").startswith("image/")


def _holds_numbers(value: Any) -> bool:
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return bool(value) and all(isinstance(each, (int, float)) for each in value)
    return isinstance(value, (int, float))
