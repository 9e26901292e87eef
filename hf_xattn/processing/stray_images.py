"""Images under a key where nobody reads them."""

from __future__ import annotations

import difflib
import io
import mimetypes
from collections.abc import Mapping, Sequence
from typing import Any

from PIL import Image

from .image_reading import is_array, is_pil


# A key whose name is close to one of these is probably meant as `images`.
NAMES_OF_IMAGES = ("images", "image", "imgs", "img", "pictures", "picture", "photos", "photo", "pixel_values")
NEAR = 0.82  # similarity for `difflib`. `image_id` and `image_ids` stay below it: they hold no images
ADDRESSES = ("image_url", "input_image")


def check_images_inside(message: Mapping[str, Any], where: str) -> None:
    """Raises a `ValueError` for a key beside `content` that holds images, as in Ollama's messages."""
    for name, value in message.items():
        if name in ("role", "content"):
            continue
        if looks_like_images(name, value) or (name in ADDRESSES and value is not None):
            raise ValueError(
                f"Expected the images of {where} in its `content`, got `{name}` beside it, which is not read. Put them "
                "into `content` as image parts."
            )


def looks_like_images(name: str, value: Any) -> bool:
    """Whether a key or its value says that it holds images."""
    return value is not None and (_holds_images(value) or (is_near_images(name) and not _holds_numbers(value)))


def is_near_images(name: Any) -> bool:
    return isinstance(name, str) and bool(difflib.get_close_matches(name.lower(), NAMES_OF_IMAGES, n=1, cutoff=NEAR))


def _holds_images(value: Any) -> bool:
    """Whether a value is an image or holds one: PIL, an array of rank 3 or more, or the dict of `datasets`."""
    if isinstance(value, (str, int, float)):
        return False
    if isinstance(value, bytes):
        return is_picture(value)
    if isinstance(value, Mapping):  # `datasets` keeps sound in such a dict too, so the content decides
        content, path = value.get("bytes"), value.get("path")
        if isinstance(content, bytes):
            return is_picture(content)
        kind = mimetypes.guess_type(path)[0] if isinstance(path, str) else None
        return set(value) <= {"bytes", "path"} and (kind or "").startswith("image/")
    if isinstance(value, Sequence):
        return any(_holds_images(each) for each in value)
    return value.ndim >= 3 if is_array(value) else is_pil(value)


def is_picture(content: bytes) -> bool:
    """Whether the beginning of a file is that of a picture which Pillow opens."""
    try:
        Image.open(io.BytesIO(content)).close()  # reads the header only
    except Exception:  # Pillow raises errors of many kinds
        return False
    return True


def _holds_numbers(value: Any) -> bool:
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return bool(value) and all(isinstance(each, (int, float)) for each in value)
    return isinstance(value, (int, float))
