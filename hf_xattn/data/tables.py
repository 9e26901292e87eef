"""Parquet files, whose unit is a row group, and tables of `datasets`, whose unit is a range of rows.

Both need the libraries of the extra `data`. Pictures stay as they are stored: nothing is decoded here.
"""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Mapping
from typing import Any

from .units import ROWS_OF_A_UNIT, DataFile, Unit


OPEN_FILES = 64


def index_parquet(path: str) -> DataFile:
    """Reads the footer of a file. `path` may be any address of `fsspec`, such as one on the Hub.

    Raises:
        ValueError: for a file that is no Parquet file, or is cut off.
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
        import fsspec

        return pyarrow.parquet.ParquetFile(fsspec.open(path, "rb").open())
    except (ArrowException, OSError) as error:
        raise ValueError(f"Expected a Parquet file, got {path}, which cannot be read: {error}") from error


class _OpenRowGroup:
    def __init__(self, path: str, unit: Unit):
        from pyarrow import ArrowException

        self._first = unit.first
        try:
            self._table = _parquet_file(path).read_row_group(unit.start)
        except (ArrowException, OSError) as error:
            raise ValueError(f"row group {unit.start} cannot be read: {error}") from error

    def example(self, place: int) -> Mapping[str, Any]:
        return self._table.slice(place, 1).to_pylist()[0]

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
        self._dataset, self._first = dataset, unit.first

    def example(self, place: int) -> Mapping[str, Any]:
        row = self._first + place
        return self._dataset[row : row + 1].to_pylist()[0]

    def name(self, place: int) -> str:
        return f"row {self._first + place}"
