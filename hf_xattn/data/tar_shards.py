"""Shards of tar, in the form of WebDataset: files of one name, but for what follows its first dot, are one sample.

`000012.jpg` and `000012.json` are a picture and its example; `000012.txt` is a caption. Of the headers alone the place
of every file is known, so samples are read in any order and nothing else is.
"""

from __future__ import annotations

import functools
import hashlib
import mimetypes
import mmap
import os
import re
import tarfile
from array import array
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from PIL import Image

from ..processing.stray_images import is_picture
from .json_files import read_json
from .units import DataFile, Unit


BLOCK = 512
REGULAR = (b"0", b"\0")
LINKS = (b"1", b"2")
LONG_NAME, PAX = b"L", b"x"
# Pictures that Pillow does not read, and arrays, as which other programs keep some. `mimetypes` knows most of the rest.
OTHER_PICTURES = (".heic", ".heif", ".jxl", ".dng", ".cr2", ".nef", ".arw")
ARRAYS = (".npy", ".npz", ".pth", ".pt", ".pyd", ".pkl", ".pickle", ".safetensors")
HEAD = 2**16  # bytes that tell whether a file of another ending is a picture
PAX_PATH = re.compile(rb"\d+ path=([^\n]*)\n")


@functools.cache
def endings() -> tuple[str, ...]:
    """The endings of pictures that Pillow reads."""
    Image.init()
    read = {kind for kind, mime in Image.MIME.items() if kind in Image.OPEN and mime.startswith("image/")}
    return tuple(ending for ending, kind in Image.registered_extensions().items() if kind in read)


class Member(NamedTuple):
    name: str
    start: int
    size: int


def index_tar(path: str) -> DataFile:
    """Finds the samples of a shard, by its headers.

    Raises:
        ValueError: for a shard that is compressed, cut off or no tar file, and for a sample whose files stand apart.
    """
    index, digest, last = _Index(array("Q"), array("Q"), {}), hashlib.sha256(), None
    end, keys = 0, set[bytes]()
    for name, start, size, renamed in _members(path):
        if _is_left_by_a_system(name):
            continue
        key = _key(name)[0]
        if key != last:
            if key in keys:
                raise ValueError(
                    f"Expected the files of a sample to stand together in {path}, got those of {key.decode()!r} apart: "
                    "they would become two rows. Pack the shard with `tar --sort=name`."
                )
            keys.add(key)
            index.samples.append(len(index.starts))
            last = key
        if renamed:
            index.names[len(index.starts)] = name
        index.starts.append(start)
        end = start + size
        digest.update(b"%s %d;" % (name, size))
    unit = [Unit(len(index.samples), 0, 0, end)] if index.samples else []
    return DataFile(path, unit, digest.hexdigest(), functools.partial(_OpenShard, index))


def _is_left_by_a_system(name: bytes) -> bool:
    """Whether macOS or Windows has put a file into a folder by itself, such as `._000.png` beside `000.png`."""
    *folders, file = name.split(b"/")
    return file.startswith(b"._") or file in (b".DS_Store", b"Thumbs.db", b"desktop.ini") or b"__MACOSX" in folders


class _Index(NamedTuple):
    """Where the files of a shard lie: 16 bytes for a file, because a data set has millions."""

    starts: array  # of each file's content; its header is in front of it
    samples: array  # the first file of each sample
    names: dict[int, bytes]  # names that have no place in their header


def _members(path: str) -> Iterator[tuple[bytes, int, int, bool]]:
    """Name, start and size of the files in a shard, and whether the name stands elsewhere than in its header.

    `tarfile` takes ten times as long, because it makes an object of every header.
    """
    total = os.path.getsize(path)
    if not total:
        return
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        _check_first(path, content[:BLOCK])
        position, other = 0, None
        while position < total and content[position]:
            header = content[position : position + BLOCK]
            size, kind, start = _size(path, header, position), header[156:157], position + BLOCK
            if start + size > total:
                raise ValueError(f"{path} is cut off: expected {start + size} bytes or more, got {total}.")
            position = start + (size + BLOCK - 1) // BLOCK * BLOCK
            if kind in REGULAR:
                yield other or _name(header), start, size, other is not None
            elif kind in LINKS:
                raise ValueError(
                    f"Expected files in {path}, got a link, {(other or _name(header)).decode()}, whose content is "
                    "elsewhere. Pack the shard with `tar --dereference --hard-dereference`."
                )
            other = _long_name(content[start : start + size], kind) or other if kind in (LONG_NAME, PAX) else None
        if content[position:].strip(b"\0"):
            raise ValueError(
                f"{path} goes on behind its end, byte {position}: it holds a second archive, whose samples would be "
                "left out. Give each archive as a file of its own."
            )


def _check_first(path: str, header: bytes) -> None:
    try:
        tarfile.TarInfo.frombuf(header, "utf-8", "surrogateescape")  # compares its checksum
    except tarfile.HeaderError as error:
        raise ValueError(
            f"Expected a tar file, got {path}: {error}. Is it compressed? Unpack it: no sample can be found in it."
        ) from None


def _size(path: str, header: bytes, position: int) -> int:
    try:
        if header[124] & 0x80:  # GNU's form for sizes from 8 GiB on
            return int.from_bytes(header[125:136], "big")
        return int(header[124:136].strip(b"\0 ") or b"0", 8)
    except (IndexError, ValueError):
        raise ValueError(f"{path} is damaged: expected the header of a file at byte {position}.") from None


def _name(header: bytes) -> bytes:
    name = header[:100].partition(b"\0")[0]
    if header[345] and header[257:265] == b"ustar\x0000":
        return header[345:500].partition(b"\0")[0] + b"/" + name
    return name


def _long_name(content: bytes, kind: bytes) -> bytes | None:
    if kind == LONG_NAME:
        return content.rstrip(b"\0")
    found = PAX_PATH.search(content)
    return None if found is None else found[1]


def _key(name: bytes) -> tuple[bytes, bytes]:
    """The sample that a file belongs to, and its extension, which begins at the first dot behind the last slash."""
    dot = name.find(b".", name.rfind(b"/") + 1)
    return (name, b"") if dot < 0 else (name[:dot], name[dot:].lower())


class _OpenShard:
    """The samples of a shard. Their contents are read when they are asked for."""

    def __init__(self, index: _Index, path: str, unit: Unit):
        self._index, self._path = index, path

    def example(self, place: int) -> Mapping[str, Any]:
        """The fields of the sample's `.json`, its `.txt` as `text`, and its pictures as `images`."""
        found: dict[str, Any] = {}
        pictures, others = [], []
        with open(self._path, "rb") as file:
            members = sorted(self._members(file.fileno(), place), key=lambda each: _in_numbers(each[0]))
            for extension, member in members:
                if extension.endswith(endings()):
                    content = os.pread(file.fileno(), member.size, member.start)
                    pictures.append({"bytes": content, "path": member.name})
                elif extension.endswith((".json", ".txt")):
                    fields = _fields(extension, member.name, os.pread(file.fileno(), member.size, member.start))
                    if again := sorted(found.keys() & fields.keys()):
                        raise ValueError(f"expected a field once in a sample, got {again} again in {member.name}")
                    found |= fields
                elif _is_other_picture(member.name, extension):
                    raise ValueError(f"expected pictures of a kind that Pillow reads, got {member.name}")
                elif is_picture(os.pread(file.fileno(), min(member.size, HEAD), member.start)):
                    raise ValueError(
                        f"expected the picture to have the ending of its kind, such as .jpg, got {member.name}"
                    )
                elif extension.endswith(ARRAYS):
                    others.append(member.name)
        if others and not pictures:
            raise ValueError(f"expected a picture as the file of one, got {others[0]}, which is not read")
        return {**found, OWN_PICTURES: pictures}

    def name(self, place: int) -> str:
        with open(self._path, "rb") as file:
            return f"sample {_key(next(self._members(file.fileno(), place))[1].name.encode())[0].decode()}"

    def _members(self, file: int, place: int) -> Iterator[tuple[str, Member]]:
        starts, samples, names = self._index
        stop = samples[place + 1] if place + 1 < len(samples) else len(starts)
        for number in range(samples[place], stop):
            start = starts[number]
            header = os.pread(file, BLOCK, start - BLOCK)
            name = names.get(number) or _name(header)
            yield _key(name)[1].decode(), Member(name.decode(), start, _size(self._path, header, start - BLOCK))


def _is_other_picture(name: str, extension: str) -> bool:
    kind = mimetypes.guess_type(name, strict=False)[0] or ""
    return kind.startswith(("image/", "video/")) or extension.endswith(OTHER_PICTURES)


def _in_numbers(extension: str) -> list[tuple[int, str]]:
    """Sorts `.2.jpg` in front of `.10.jpg`."""
    return [(int(piece), "") if piece.isdigit() else (-1, piece) for piece in re.split(r"(\d+)", extension)]


def _fields(extension: str, name: str, content: bytes) -> dict[str, Any]:
    """What the text files of a sample say."""
    try:
        text = content.decode("utf-8-sig")
        fields = {"text": text.strip()} if extension.endswith(".txt") else read_json(text)
    except ValueError as error:  # of its encoding, too
        raise ValueError(f"{name} cannot be read: {error}") from None
    if not isinstance(fields, dict):
        raise ValueError(f"expected {name} to hold a JSON object, got {type(fields).__name__}")
    return fields


OWN_PICTURES = "__pictures__"  # of a sample; its fields may name them again
