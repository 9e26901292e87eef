"""Files of text: a JSON object a line, or one JSON array of objects.

Lines are found by their ends. An array has to be parsed once to find where its objects begin; it is never held whole.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from .units import ROWS_OF_A_UNIT, DataFile, Unit


CHUNK = 2**20
BOM = codecs.BOM_UTF8


def index_json(path: str) -> DataFile:
    """Finds the objects of a `.json` or `.jsonl` file.

    Raises:
        ValueError: for an array that is broken, which hides where its objects begin.
    """
    with open(path, "rb") as file:
        head = file.read(CHUNK).removeprefix(BOM).lstrip()
    if head.startswith(b"[") and not path.endswith(".jsonl"):
        units, digest = _units_of(_objects(path), array=True)
        return DataFile(path, units, digest, _OpenArray)
    units, digest = _units_of(_lines(path), array=False)
    return DataFile(path, units, digest, _OpenLines)


class _Piece(NamedTuple):
    start: int  # first byte
    content: bytes
    number: int  # what errors call it


def _units_of(pieces: Iterator[_Piece], array: bool) -> tuple[list[Unit], str]:
    units: list[Unit] = []
    held: list[_Piece] = []
    digest = hashlib.sha256()

    def close() -> None:
        last = held[-1]
        start, end = held[0].start, last.start + len(last.content)
        units.append(Unit(len(held), held[0].number, start, end, end - start))
        digest.update(b"\n".join(piece.content for piece in held))
        held.clear()

    for piece in pieces:
        held.append(piece)
        if len(held) == ROWS_OF_A_UNIT:
            close()
    if held:
        close()
    return units, digest.hexdigest()


def _lines(path: str) -> Iterator[_Piece]:
    """The lines that are not empty. Only a line feed ends a line: JSON allows U+2028 and U+0085 in a text."""
    position = 0
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if (line if position else line.removeprefix(BOM)).strip():
                yield _Piece(position, line, number)
            position += len(line)


def _objects(path: str) -> Iterator[_Piece]:
    """The elements of an array, without holding more than a few of them."""
    decoder = json.JSONDecoder()
    with open(path, "rb") as file:
        reader = codecs.getincrementaldecoder("utf-8")()
        first = file.read(CHUNK)
        position = len(BOM) if first.startswith(BOM) else 0
        text = reader.decode(first.removeprefix(BOM))
        ended = False

        def skip(space: str) -> None:
            nonlocal text, position
            rest = text.lstrip(space)
            position += len(text[: len(text) - len(rest)].encode())
            text = rest

        skip(" \t\r\n")
        text, position = text[1:], position + 1  # the bracket
        number, start = 0, 0  # start: of what is left, in `text`
        commas = 0  # behind the last object
        while True:
            while start < len(text) and text[start] in " \t\r\n,":
                commas += text[start] == ","
                start += 1
                position += 1
            ends = start < len(text) and text[start] == "]"
            if start < len(text) and commas != (number > 0 and not ends):
                raise ValueError(
                    f"{path} holds an array of JSON that cannot be read: object {number}: expected one comma between "
                    f"two objects, got {commas} in front of byte {position}."
                )
            if ends:
                left = text[start + 1 :].encode()
                while left or (left := file.read(CHUNK)):
                    if left.strip():
                        raise ValueError(f"{path} holds more than one array: it goes on behind byte {position + 1}.")
                    left = b""
                return
            try:
                value, end = decoder.raw_decode(text, start)
                complete = end < len(text)  # a number may go on in the next chunk
            except json.JSONDecodeError as error:
                complete, failure = False, f"{error.msg} behind byte {position}"
            except (RecursionError, ValueError) as error:  # brackets in brackets, or a number of thousands of digits
                raise ValueError(
                    f"{path} holds an array of JSON that cannot be read: object {number}: {error}"
                ) from None
            else:
                failure = f"the end of the array is missing behind byte {position}"
            if not complete:
                chunk = file.read(max(CHUNK, len(text) - start))  # doubled, so that a long object is parsed few times
                if ended or len(text) - start > MAX_OBJECT:
                    raise ValueError(f"{path} holds an array of JSON that cannot be read: object {number}: {failure}.")
                ended = not chunk
                text, start = text[start:] + reader.decode(chunk, final=ended), 0
                continue
            content = text[start:end].encode()
            del value
            yield _Piece(position, content, number)
            number, position, start, commas = number + 1, position + len(content), end, 0


MAX_OBJECT = 2**28  # characters; a broken array is not read to its end


def _read(path: str, unit: Unit) -> bytes:
    with open(path, "rb") as file:
        return os.pread(file.fileno(), unit.end - unit.start, unit.start)


def read_json(text: str | bytes) -> Any:
    """What a JSON text says. Raises a `ValueError` for one that is broken, or too deep for Python's parser."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"broken JSON: {error.msg} at column {error.colno}") from None
    except RecursionError:
        raise ValueError("broken JSON: its brackets are nested too deeply") from None


def _parsed(text: str) -> Mapping[str, Any]:
    example = read_json(text)
    if not isinstance(example, dict):
        raise ValueError(f"expected a JSON object, got {type(example).__name__}")
    return example


class _OpenLines:
    def __init__(self, path: str, unit: Unit):
        content = _read(path, unit)
        lines = (content if unit.start else content.removeprefix(BOM)).split(b"\n")
        self._lines = [(number, line) for number, line in enumerate(lines, start=unit.first) if line.strip()]

    def example(self, place: int) -> Mapping[str, Any]:
        try:
            text = self._lines[place][1].decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"expected UTF-8, got the byte {error.object[error.start]:#04x}") from None
        return _parsed(text)

    def name(self, place: int) -> str:
        return f"line {self._lines[place][0]}"


class _OpenArray:
    def __init__(self, path: str, unit: Unit):
        self._first = unit.first
        self._values = read_json(b"[" + _read(path, unit) + b"]")

    def example(self, place: int) -> Mapping[str, Any]:
        value = self._values[place]
        if not isinstance(value, dict):
            raise ValueError(f"expected a JSON object, got {type(value).__name__}")
        return value

    def name(self, place: int) -> str:
        return f"object {self._first + place}"
