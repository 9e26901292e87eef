"""Files whose rows can be read in any order, without keeping rows in memory.

- **Saved data sets** are tables of `datasets`, which are mapped into memory.
- **Parquet files** are converted to such a table once, by `datasets`.
- **Arrays of JSON** have to be parsed to find their objects. The texts of the objects are kept in a table, too.
- **Lines of JSON** stay in their file. `datasets` would copy them, and take a broken byte for the end of the file.

Images stay as they are stored; nothing is decoded here.
"""

from __future__ import annotations

import bisect
import codecs
import glob
import hashlib
import json
import os
import re
from array import array
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np


if TYPE_CHECKING:
    from datasets import Dataset

FORM = 1  # version of the tables that this file keeps. With another version, they are made anew
BOM = codecs.BOM_UTF8
HEAD = 2**20  # bytes that are read to see whether a file is an array
SPACE, COMMAS = re.compile(r"[ \t\r\n]*"), re.compile(r"[ \t\r\n,]*")


class Table:
    """The rows of a file in a table of `datasets`.

    Args:
        path (`str`): the file, for errors.
        table (`datasets.Dataset`): the table, which may hold the rows of several files.
        rows (`range`): the rows of this file in the table.
        digest (`str`): a hash that changes if the file changes.
    """

    def __init__(self, path: str, table: Any, rows: range, digest: str):
        self.path, self.table, self.rows, self.digest = path, table, rows, digest

    def __len__(self) -> int:
        return len(self.rows)

    def example(self, place: int) -> Mapping[str, Any]:
        """Returns what the file holds for a row."""
        return self.table[self.rows[place]]

    def name(self, place: int) -> str:
        """Returns what errors call the row: "line 12", "row 3", "sample 000012"."""
        return f"row {place}"


class Stored(Table):
    """The rows of a table of `datasets` as they are stored: images stay the bytes or the names of their files."""

    def __init__(self, path: str, table: Any, rows: range, digest: str):
        super().__init__(path, table.with_format("arrow"), rows, digest)
        # Arrow knows a value of the type `Json` as a text.
        self._json = [name for name, feature in table.features.items() if "Json(" in repr(feature)]

    def example(self, place: int) -> Mapping[str, Any]:
        (row,) = super().example(place).to_pylist()  # type: ignore[attr-defined]  # a table of Arrow
        return row | {name: self.table.features.decode_column([row[name]], name)[0] for name in self._json}


def saved_table(dataset: Dataset, path: str) -> Table:
    """Makes a [`Table`] of a `datasets.Dataset` that is stored in files."""
    files = [(os.path.basename(each["filename"]), os.path.getsize(each["filename"])) for each in dataset.cache_files]
    digest = hashlib.sha256(f"{dataset.features} {len(dataset)} {files}".encode()).hexdigest()
    return Stored(path, dataset, range(len(dataset)), digest)


def parquet_files(paths: list[str], names: list[str] | None = None) -> list[Table]:
    """Opens Parquet files. `datasets` converts those that it has not converted before.

    Args:
        paths (`list[str]`): the files.
        names (`list[str]`, *optional*): what errors call them. Default: `paths`.

    Raises:
        ValueError: for a file that is not a Parquet file, or that is cut off or broken.
    """
    datasets = library()
    import pyarrow.parquet

    names = names or paths
    footers = []
    for path, name in zip(paths, names):
        try:
            footers.append(pyarrow.parquet.read_metadata(path))
        except (pyarrow.ArrowException, OSError) as error:
            raise ValueError(f"Expected a Parquet file, got {name}, which cannot be read: {error}") from error
    if not any(footer.num_rows for footer in footers):
        return []
    alike: dict[Any, list[int]] = {}  # files with equal columns. `datasets` would give all files the types of the first
    for number, footer in enumerate(footers):
        schema = footer.schema.to_arrow_schema()
        kind = f"{schema.remove_metadata()}", (schema.metadata or {}).get(b"huggingface")
        alike.setdefault(kind, []).append(number)
    tables: dict[int, Table] = {}
    for numbers in alike.values():
        rows = sum(footers[number].num_rows for number in numbers)
        try:
            table = _converted_parquet(datasets, [paths[number] for number in numbers], footers[numbers[0]])
            if len(table) != rows:
                raise ValueError(f"{len(table)} of {rows} rows")
        except Exception as error:  # `datasets` raises errors of many kinds
            told = [names[number] for number in numbers]
            found = _broken_part([paths[number] for number in numbers], told) or (
                "Expected Parquet files, and space for a copy of them in the cache of `datasets`, got "
                f"{', '.join(told[:3])}{', ...' * (len(told) > 3)}"
            )
            raise ValueError(f"{found}: {error.__cause__ or error}") from error
        start = 0
        for number in numbers:
            footer = footers[number]
            groups = [footer.row_group(each) for each in range(footer.num_row_groups)]
            facts = f"{footer.schema.to_arrow_schema()} {[(each.num_rows, each.total_byte_size) for each in groups]}"
            digest = hashlib.sha256(facts.encode()).hexdigest()
            tables[number] = Stored(names[number], table, range(start, start + footer.num_rows), digest)
            start += footer.num_rows
    return [tables[number] for number in range(len(paths))]


def _converted_parquet(datasets: Any, paths: list[str], footer: Any) -> Any:
    """Returns the table of files with the same columns."""
    features = _features_of(datasets, footer.schema.to_arrow_schema())
    # `datasets` recognises a file by its name and time. A file that was written anew may have the same, so its state is
    # put into the name of the cache.
    state = hashlib.sha256(repr([(os.path.abspath(path), _state(path)) for path in paths]).encode()).hexdigest()
    cache = os.path.join(datasets.config.HF_DATASETS_CACHE, f"hf_xattn-{state}")
    files = list(map(glob.escape, paths))  # `datasets` would read the paths as patterns
    return datasets.load_dataset("parquet", data_files=files, split="train", features=features, cache_dir=cache)


def _state(path: str) -> tuple[int, ...]:
    """Returns facts that change if a file is written, even if another program sets back its time."""
    facts = os.stat(path)
    return facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns, facts.st_ino


def converted(kind: type[Table], find: Callable[[str], Iterator[str]], paths: list[str]) -> list[Any]:
    """Makes a table of each file, with a row for each text that `find` yields for the file.

    `datasets` keeps the tables in its cache until a file changes. If there are several processes, the first one calls
    `find`, and the others wait.

    Args:
        kind (`type[Table]`): the class of the tables.
        find (`Callable`): yields the texts of a file.
        paths (`list[str]`): the files.
    """
    datasets = library()
    states = tuple((*_state(path), FORM) for path in paths)
    features = datasets.Features({"file": datasets.Value("int32"), "text": datasets.Value("large_string")})
    # Tuples, because `datasets` would split lists and call the generator for each part.
    given = {"find": find, "paths": tuple(map(os.path.abspath, paths)), "states": states}
    try:
        table = datasets.Dataset.from_generator(_found, features, gen_kwargs=given)
    except datasets.exceptions.DatasetGenerationError as error:
        raise error.__cause__ or error from None
    digest = hashlib.sha256()
    for batch in table.data.to_batches():
        digest.update(batch.serialize())
    ends = np.cumsum(np.bincount(table.data.column("file").to_numpy(), minlength=len(paths))).tolist()
    return [
        kind(path, table, range(start, end), digest.hexdigest()) for path, start, end in zip(paths, [0, *ends], ends)
    ]


def _found(find: Any, paths: tuple[str, ...], states: Any) -> Iterator[dict[str, Any]]:
    for number, path in enumerate(paths):
        for text in find(path):
            yield {"file": number, "text": text}
    yield {"file": len(paths), "text": ""}  # belongs to no file: `datasets` refuses a table without rows


def library() -> ModuleType:
    """Imports `datasets`, or raises an `ImportError` that says how to install it."""
    try:
        import datasets
    except ImportError as error:
        raise ImportError('Reading this source needs `datasets`: `pip install "datasets>=4"`.') from error
    return datasets


def _features_of(datasets: Any, schema: Any) -> Any:
    """Returns the features of a Parquet file in which columns of the type `Json` are stored as texts.

    None if there are no such columns: `datasets` then finds the features by itself.
    """
    stated = (schema.metadata or {}).get(b"huggingface", b"")
    if b'"Json"' not in stated:
        return None
    features = datasets.Features.from_arrow_schema(schema)
    for name, feature in datasets.Features.from_dict(json.loads(stated)["info"]["features"]).items():
        if name in features and "Json(" in repr(feature):
            features[name] = feature
    return features


def _broken_part(paths: list[str], names: list[str]) -> str | None:
    """Names the first row group that cannot be read, or returns None."""
    import pyarrow.parquet

    for path, name in zip(paths, names):
        file, first = pyarrow.parquet.ParquetFile(path), 0
        for number in range(file.num_row_groups):
            last = first + file.metadata.row_group(number).num_rows - 1
            try:
                file.read_row_group(number)
            except (pyarrow.ArrowException, OSError):
                return f"{name}, row {first} to row {last} (row group {number}) cannot be read"
            first = last + 1
    return None


def json_files(paths: list[str]) -> list[Any]:
    """Opens `.json` and `.jsonl` files.

    Raises:
        ValueError: for a broken array, in which the objects cannot be found.
        ImportError: for an array without the extra `data`.
    """
    arrays = [path for path in paths if is_array(path) and not path.endswith(".jsonl")]
    found = converted(Objects, _objects, arrays) if arrays else []
    return [found.pop(0) if path in arrays else Lines(path) for path in paths]


def read_json(text: str | bytes) -> Any:
    """Parses a JSON text. Raises a `ValueError` if it is broken, or nested too deeply for Python's parser."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"broken JSON: {error.msg} at column {error.colno}") from None
    except RecursionError:
        raise ValueError("broken JSON: its brackets are nested too deeply") from None


class Lines:
    """The lines of a file that are not empty.

    Only a line feed ends a line, because JSON allows other line breaks (U+2028, U+0085) inside a text.
    """

    def __init__(self, path: str):
        self.path = path
        # Where lines begin, and how many lines are in front of each empty line.
        self._starts, self._empty = array("Q"), array("Q")
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
    """The objects of a JSON array. `datasets` keeps their texts."""

    def example(self, place: int) -> Mapping[str, Any]:
        return _object(super().example(place)["text"])

    def name(self, place: int) -> str:
        return f"object {place}"


def _object(text: str) -> Mapping[str, Any]:
    example = read_json(text)
    if not isinstance(example, dict):
        raise ValueError(f"expected a JSON object, got {type(example).__name__}")
    return example


def is_array(path: str) -> bool:
    """Whether a file begins like an array of objects, which may be empty or have a comma too many."""
    with open(path, "rb") as file:
        return re.match(rb"\s*\[[\s,]*(?:[{\]]|\Z)", file.read(HEAD).removeprefix(BOM)) is not None


def _objects(path: str) -> Iterator[str]:
    """Yields the texts of the elements of an array. The whole file is in memory during this."""
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
        except (RecursionError, ValueError) as error:  # too deep nesting, or a number with thousands of digits
            why = str(error)
            break
        yield text[start:end]
        number += 1
    raise ValueError(f"{path} holds an array of JSON that cannot be read: object {number}: {why}")


def _behind(pattern: re.Pattern[str], text: str, start: int) -> int:
    found = pattern.match(text, start)
    assert found is not None  # both match an empty text
    return found.end()
