"""Parquet files, whose unit is a row group, and tables of `datasets`, whose unit is a range of rows.

Both need the libraries of the extra `data`. Pictures stay as they are stored: nothing is decoded here.
"""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Callable, Mapping
from typing import Any

from .json_files import read_json
from .units import ROWS_OF_A_UNIT, DataFile, Unit


OPEN_FILES = 64


class UnreachableError(OSError):
    """A file that is somewhere else could not be read: an error of the network, and none of the file or its rows."""


class _Remote:
    """A file somewhere else. `pyarrow` raises an `OSError` for broken contents, so errors of the way get their own."""

    def __init__(self, path: str):
        import fsspec

        self._path = path
        self._file = self._tried(fsspec.open(path, "rb").open)

    def read(self, *size: int) -> bytes:
        return self._tried(self._file.read, *size)

    def _tried(self, function: Callable[..., Any], *args: Any) -> Any:
        try:
            return function(*args)
        except Exception as error:  # each kind of address has errors of its own
            why = str(error) or type(error).__name__
            raise UnreachableError(f"{self._path} cannot be reached: {why}") from error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def index_parquet(path: str) -> DataFile:
    """Reads the footer of a file. `path` may be any address of `fsspec`, such as one on the Hub.

    Raises:
        ValueError: for a file that is no Parquet file, or is cut off.
        UnreachableError: for an address that does not answer. It is no error of a row, so reading rows raises it too.
    """
    metadata = _parquet_file(path).metadata
    units, first = [], 0
    for group in range(metadata.num_row_groups):
        about = metadata.row_group(group)
        if about.num_rows:
            units.append(Unit(about.num_rows, first, group, group + 1, about.total_byte_size))
        first += about.num_rows
    facts = f"{metadata.schema.to_arrow_schema()} {[(unit.rows, unit.nbytes) for unit in units]}"
    return DataFile(path, units, hashlib.sha256(facts.encode()).hexdigest(), _OpenRowGroup)


def _parquet_file(path: str) -> Any:
    return _opened(path, os.getpid())


@functools.lru_cache(OPEN_FILES)
def _opened(path: str, process: int) -> Any:
    """A file with its footer, which takes as long to read as many row groups. Each process has its own."""
    try:
        import pyarrow.parquet
        from pyarrow import ArrowException
    except ImportError as error:
        raise ImportError('Reading Parquet needs pyarrow: `pip install "datasets>=4"`.') from error
    try:
        if "://" not in path:
            return pyarrow.parquet.ParquetFile(path, memory_map=True)
        return pyarrow.parquet.ParquetFile(_Remote(path))
    except UnreachableError:
        raise
    except (ArrowException, OSError) as error:
        raise ValueError(f"Expected a Parquet file, got {path}, which cannot be read: {error}") from error


class _OpenRowGroup:
    def __init__(self, path: str, unit: Unit):
        from pyarrow import ArrowException

        self._first = unit.first
        try:
            self._table = _parquet_file(path).read_row_group(unit.start)
        except UnreachableError:
            raise
        except (ArrowException, OSError) as error:
            raise ValueError(f"row group {unit.start} cannot be read: {error}") from error
        self._json = _json_columns(_features_of(self._table.schema))

    def example(self, place: int) -> Mapping[str, Any]:
        return _without_json(self._table.slice(place, 1).to_pylist()[0], self._json)

    def name(self, place: int) -> str:
        return f"row {self._first + place}"


def table_of(dataset: Any, path: str) -> DataFile:
    """A table of `datasets` that lies in files (`datasets.Dataset`)."""
    rows = len(dataset)
    units = [
        Unit(min(ROWS_OF_A_UNIT, rows - first), first, first, min(first + ROWS_OF_A_UNIT, rows))
        for first in range(0, rows, ROWS_OF_A_UNIT)
    ]
    files = [(os.path.basename(each["filename"]), os.path.getsize(each["filename"])) for each in dataset.cache_files]
    digest = hashlib.sha256(f"{dataset.features} {rows} {files}".encode()).hexdigest()
    return DataFile(path, units, digest, functools.partial(_OpenRange, dataset.with_format("arrow")))


class _OpenRange:
    def __init__(self, dataset: Any, path: str, unit: Unit):
        self._dataset, self._first, self._json = dataset, unit.first, _json_columns(dataset.features)

    def example(self, place: int) -> Mapping[str, Any]:
        row = self._first + place
        return _without_json(self._dataset[row : row + 1].to_pylist()[0], self._json)

    def name(self, place: int) -> str:
        return f"row {self._first + place}"


def _features_of(schema: Any) -> Mapping[str, Any]:
    """The features that `datasets` gives a table. Only those of type `Json` matter: without one there are none."""
    if "json" not in f"{schema} {schema.metadata}".lower():
        return {}
    try:
        from datasets import Features
    except ImportError as error:
        raise ImportError(
            'Reading columns of the type `Json` needs `datasets`: `pip install "datasets>=4"`.'
        ) from error
    # `from_arrow_schema` drops what the file says of itself if a program has written JSON as plain texts.
    told = read_json((schema.metadata or {}).get(b"huggingface", b"{}")).get("info", {}).get("features")
    return Features.from_dict(told) if told else Features.from_arrow_schema(schema)


def _json_columns(features: Mapping[str, Any]) -> dict[str, Any]:
    """The columns that hold the type `Json`, which `datasets` gives messages that mix texts and lists of parts."""
    return {name: feature for name, feature in features.items() if "Json(" in repr(feature)}


def _without_json(value: Any, feature: Any) -> Any:
    """A value in which JSON texts, where its feature says that they are some, are what they say."""
    if type(feature).__name__ == "Json":
        return read_json(value) if isinstance(value, (str, bytes)) else value
    if isinstance(feature, Mapping) and isinstance(value, Mapping):
        return {name: _without_json(each, feature.get(name)) for name, each in value.items()}
    inner = feature[0] if isinstance(feature, list) else getattr(feature, "feature", None)
    if inner is not None and isinstance(value, list):
        return [_without_json(each, inner) for each in value]
    return value
