"""Tar shards in the form of WebDataset. Files whose names are equal up to the first dot are one sample.

`000012.jpg` and `000012.json` are an image and its example, and `000012.txt` is a caption. The places of the files in
the shard are found once and kept by `datasets`. The samples stay in the shard and can be read in any order. The builder
`webdataset` of `datasets` would copy them instead, and drop fields that its first five samples lack.
"""

from __future__ import annotations

import functools
import itertools
import json
import mimetypes
import os
import re
import tarfile
from collections.abc import Iterator, Mapping
from typing import Any

from PIL import Image

from ..processing.chat_messages import is_picture
from .tables import Table, converted, read_json


# Endings of images that Pillow does not read, and of arrays, in which some programs store images. `mimetypes` knows
# most other endings.
OTHER_PICTURES = (".heic", ".heif", ".jxl", ".dng", ".cr2", ".nef", ".arw")
ARRAYS = (".npy", ".npz", ".pth", ".pt", ".pyd", ".pkl", ".pickle", ".safetensors")
HEAD = 2**16  # bytes that are read to see whether a file with another ending is an image
OWN_PICTURES = "__pictures__"  # field for the image files of a sample; other fields may name them again


@functools.cache
def endings() -> tuple[str, ...]:
    """Returns the endings of images that Pillow reads."""
    Image.init()
    read = {kind for kind, mime in Image.MIME.items() if kind in Image.OPEN and mime.startswith("image/")}
    return tuple(ending for ending, kind in Image.registered_extensions().items() if kind in read)


def tar_files(paths: list[str]) -> list[Any]:
    """Opens shards, whose rows are samples.

    Raises:
        ValueError: for a shard that is compressed, cut off or not a tar file, and for a sample whose files are not next
            to one another.
        ImportError: without the extra `data`.
    """
    return converted(Shard, _samples, paths)


def _samples(path: str) -> Iterator[str]:
    """Yields names, places and sizes of the files of each sample, as JSON."""
    known = set[str]()
    files = (member for member in _members(path) if not _is_left_by_a_system(member.name))
    for key, members in itertools.groupby(files, lambda member: _key(member.name)[0]):
        if key in known:
            raise ValueError(
                f"Expected the files of a sample to stand together in {path}, got those of {key!r} apart: they would "
                "become two rows. Pack the shard with `tar --sort=name`."
            )
        known.add(key)
        yield json.dumps([(member.name, member.offset_data, member.size) for member in members])


def _members(path: str) -> Iterator[tarfile.TarInfo]:
    """Yields the files of a shard. Raises a `ValueError` for what cannot be read, such as links."""
    if not os.path.getsize(path):
        return
    with open(path, "rb") as file:
        try:
            archive: Any = tarfile.open(fileobj=file, mode="r:", errors="backslashreplace")
        except tarfile.ReadError as error:
            raise ValueError(
                f"Expected a tar file, got {path}: {error}. Is it compressed? Unpack it: no sample can be found in it."
            ) from None
        try:
            while (member := archive.next()) is not None:
                archive.members.clear()  # the archive would keep all of them in memory
                if member.islnk() or member.issym():
                    raise ValueError(
                        f"Expected files in {path}, got a link, {member.name}, whose content is elsewhere. Pack the "
                        "shard with `tar --dereference --hard-dereference`."
                    )
                if member.issparse():
                    raise ValueError(f"Expected whole files in {path}, got {member.name} with holes (`tar --sparse`).")
                if member.isreg():
                    yield member
        except tarfile.ReadError as error:
            raise ValueError(f"{path} is cut off or damaged: {error}.") from None
        file.seek(archive.offset)
        if any(chunk.strip(b"\0") for chunk in iter(lambda: file.read(2**20), b"")):
            raise ValueError(
                f"{path} is cut off or damaged, or holds a second archive, behind byte {archive.offset}: samples would "
                "be left out. Pack it anew, and give each archive as a file of its own."
            )


def _is_left_by_a_system(name: str) -> bool:
    """Whether macOS or Windows has put a file into a folder by itself, such as `._000.png` beside `000.png`."""
    *folders, file = name.split("/")
    return file.startswith("._") or file in (".DS_Store", "Thumbs.db", "desktop.ini") or "__MACOSX" in folders


def _key(name: str) -> tuple[str, str]:
    """Returns the sample that a file belongs to, and its extension, which begins at the first dot of its name."""
    dot = name.find(".", name.rfind("/") + 1)
    return (name, "") if dot < 0 else (name[:dot], name[dot:].lower())


class Shard(Table):
    """The samples of a shard. Their contents are read when they are asked for."""

    def example(self, place: int) -> Mapping[str, Any]:
        """Returns the fields of the sample's `.json`, its `.txt` as `text`, and its images as `OWN_PICTURES`."""
        found: dict[str, Any] = {}
        pictures, others = [], []
        with open(self.path, "rb") as file:
            for name, start, size in sorted(self._members(place), key=lambda each: _in_numbers(_key(each[0])[1])):
                extension = _key(name)[1]
                if extension.endswith(endings()):
                    pictures.append({"bytes": os.pread(file.fileno(), size, start), "path": name})
                elif extension.endswith((".json", ".txt")):
                    fields = _fields(extension, name, os.pread(file.fileno(), size, start))
                    if again := sorted(found.keys() & fields.keys()):
                        raise ValueError(f"expected a field once in a sample, got {again} again in {name}")
                    found |= fields
                elif (mimetypes.guess_type(name, strict=False)[0] or "").startswith(("image/", "video/")) or (
                    extension.endswith(OTHER_PICTURES)
                ):
                    raise ValueError(f"expected images of a kind that Pillow reads, got {name}")
                elif is_picture(os.pread(file.fileno(), min(size, HEAD), start)):
                    raise ValueError(f"expected the image to have the ending of its kind, such as .jpg, got {name}")
                elif extension.endswith(ARRAYS):
                    others.append(name)
        if others and not pictures:
            raise ValueError(f"expected the sample to have an image file, got {others[0]}, an array, which is not read")
        return {**found, OWN_PICTURES: pictures}

    def name(self, place: int) -> str:
        return f"sample {_key(self._members(place)[0][0])[0]}"

    def _members(self, place: int) -> list[tuple[str, int, int]]:
        return json.loads(super().example(place)["text"])


def _in_numbers(extension: str) -> list[tuple[int, str]]:
    """Returns a key that sorts `.2.jpg` in front of `.10.jpg`."""
    return [(int(piece), "") if piece.isdigit() else (-1, piece) for piece in re.split(r"(\d+)", extension)]


def _fields(extension: str, name: str, content: bytes) -> dict[str, Any]:
    """Returns the fields that a text file of a sample holds."""
    try:
        text = content.decode("utf-8-sig")
        fields = {"text": text.strip()} if extension.endswith(".txt") else read_json(text)
    except ValueError as error:  # also for text that is not UTF-8
        raise ValueError(f"{name} cannot be read: {error}") from None
    if not isinstance(fields, dict):
        raise ValueError(f"expected {name} to hold a JSON object, got {type(fields).__name__}")
    return fields
