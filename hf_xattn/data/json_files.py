"""Files of text: a JSON object a line, or one JSON array of objects.

Lines stay where they are: `datasets` would copy them, and take a broken byte for the end of the file. An array has to
be parsed once to find its objects, which `datasets` then keeps.
"""

from __future__ import annotations

import bisect
import codecs
import hashlib
import json
import re
from array import array
from collections.abc import Iterator, Mapping
from typing import Any

from .tables import Table, converted


BOM = codecs.BOM_UTF8
SPACE, COMMAS = re.compile(r"[ \t\r\n]*"), re.compile(r"[ \t\r\n,]*")


def json_files(paths: list[str]) -> list[Any]:
    """The rows of `.json` or `.jsonl` files.

    Raises:
        ValueError: for an array that is broken, which hides where its objects begin.
        ImportError: for an array without the extra `data`.
    """
    arrays = [path for path in paths if _is_array(path)]
    found = converted(Objects, _objects, arrays) if arrays else []
    return [found.pop(0) if path in arrays else Lines(path) for path in paths]


def read_json(text: str | bytes) -> Any:
    """What a JSON text says. Raises a `ValueError` for one that is broken, or too deep for Python's parser."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"broken JSON: {error.msg} at column {error.colno}") from None
    except RecursionError:
        raise ValueError("broken JSON: its brackets are nested too deeply") from None


class Lines:
    """The lines of a file that are not empty. Only a line feed ends a line: JSON allows U+2028 and U+0085 in a text."""

    def __init__(self, path: str):
        self.path = path
        self._starts, self._empty = array("Q"), array("Q")  # of lines; how many lines are in front of each empty one
        digest, position = hashlib.sha256(), 0
        with open(path, "rb") as file:
            for line in file:
                if (line if position else line.removeprefix(BOM)).strip():
                    self._starts.append(position)
                    digest.update(line)
                else:
                    self._empty.append(len(self._starts))
                position += len(line)
        self.digest = digest.hexdigest()

    def __len__(self) -> int:
        return len(self._starts)

    def example(self, place: int) -> Mapping[str, Any]:
        start = self._starts[place]
        with open(self.path, "rb") as file:
            file.seek(start)
            line = file.readline()
        try:
            return _object((line if start else line.removeprefix(BOM)).decode())
        except UnicodeDecodeError as error:
            raise ValueError(f"expected UTF-8, got the byte {error.object[error.start]:#04x}") from None

    def name(self, place: int) -> str:
        return f"line {1 + place + bisect.bisect_right(self._empty, place)}"


class Objects(Table):
    """The objects of an array, whose texts `datasets` keeps."""

    def example(self, place: int) -> Mapping[str, Any]:
        return _object(super().example(place)["text"])

    def name(self, place: int) -> str:
        return f"object {place}"


def _object(text: str) -> Mapping[str, Any]:
    example = read_json(text)
    if not isinstance(example, dict):
        raise ValueError(f"expected a JSON object, got {type(example).__name__}")
    return example


def _is_array(path: str) -> bool:
    with open(path, "rb") as file:
        return not path.endswith(".jsonl") and file.read(2**20).removeprefix(BOM).lstrip().startswith(b"[")


def _objects(path: str) -> Iterator[str]:
    """The texts of the elements of an array. The file is held whole meanwhile."""
    decoder = json.JSONDecoder()
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            text = file.read()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} holds an array of JSON that cannot be read: {error}") from None
    end, number = _behind(SPACE, text, 0) + 1, 0  # behind the bracket
    while True:
        start = _behind(COMMAS, text, end)
        commas, ends = text.count(",", end, start), text[start : start + 1] == "]"
        if commas != (number > 0 and not ends) and start < len(text):
            why = f"expected one comma between two objects, got {commas} in front of character {start}."
            break
        if ends:
            if text[start + 1 :].strip():
                raise ValueError(f"{path} holds more than one array: it goes on behind character {start + 1}.")
            return
        try:
            _, end = decoder.raw_decode(text, start)
        except json.JSONDecodeError as error:
            why = f"{error.msg} behind character {start}."
            break
        except (RecursionError, ValueError) as error:  # brackets in brackets, or a number of thousands of digits
            why = str(error)
            break
        yield text[start:end]
        number += 1
    raise ValueError(f"{path} holds an array of JSON that cannot be read: object {number}: {why}")


def _behind(pattern: re.Pattern[str], text: str, start: int) -> int:
    found = pattern.match(text, start)
    assert found is not None  # both match an empty text
    return found.end()
