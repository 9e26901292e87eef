"""Finds the files of a source, such as `pictures`, `llava.json:0.5`, `shards-{000..127}.tar` or a Hub id.

A source has the name that stands after `--data`. `load_dataset` of `datasets` also needs the kind of file; here the
name tells it.
"""

from __future__ import annotations

import glob
import math
import os
import re
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from .tables import Lines, Table, is_array, json_files, library, parquet_files, saved_table
from .tar_shards import tar_files


METADATA = "metadata.jsonl"
READERS = {".json": json_files, ".jsonl": json_files, ".parquet": parquet_files, ".tar": tar_files}
SOURCES = "a folder, a .json, .jsonl, .parquet or .tar file, or a data set on the Hub"
WEIGHT = re.compile(r"(.+):(\d+(?:\.\d+)?)")
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
# The name of a data set may end with `@` and its configuration, and with `#` and its split.
PARTS = re.compile(r"([^@#]+)(?:@([\w.-]+))?(?:#([\w.-]+))?")
BRACES = re.compile(r"\{([^{}]*)\}")
TABLES = (".parquet", ".tar", ".arrow")
MOST_NAMED = 6
SAVED = ("dataset_info.json", "state.json", "dataset_dict.json")  # what `save_to_disk` of `datasets` writes


class Source(NamedTuple):
    """One source: its files, and how often its rows are read."""

    name: str
    files: list[Table | Lines]
    pictures: Path | None  # the folder that names of images are relative to; None: the folder of each file
    weight: float  # how often each of its rows is read in an epoch

    @property
    def rows(self) -> int:
        return sum(map(len, self.files))

    def folder_of(self, file: int) -> Path:
        """Returns the folder that names of images in a file are relative to."""
        return Path(self.files[file].path).parent if self.pictures is None else self.pictures


def open_source(name: str | Path, pictures: str | Path | None = None) -> Source:
    """Finds the files of a source, and the rows in them.

    Args:
        name (`str` or `Path`): the source; `examples/data/README.md` has a table. With `:0.3` at its end, an epoch
            reads 0.3 of its rows.
        pictures (`str` or `Path`, *optional*): the folder that names of images are relative to. Default: the folder of
            each file.

    Raises:
        ValueError: for a source that does not exist, for a weight of 0, for files that cannot be read, and if there are
            no rows.
        ImportError: for a source that needs the extra `data`.
    """
    text, weight = str(name), 1.0
    if not os.path.exists(text) and (found := WEIGHT.fullmatch(text)):
        text, weight = found[1], float(found[2])
        if not (weight > 0 and math.isfinite(weight)):
            raise ValueError(f"Expected a weight above 0 after the colon of {str(name)!r}, got {found[2]}.")
    if pictures is not None and not Path(pictures).is_dir():
        raise ValueError(f"Expected `pictures` to be a folder, got {pictures}, which is not a folder.")
    files, folder = _files_of(text)
    source = Source(text, files, folder if pictures is None else Path(pictures), weight)
    if not source.rows:
        raise ValueError(f"Expected {files[0].path if files else text} to hold examples, got none.")
    return source


def _files_of(name: str) -> tuple[list[Table | Lines], Path | None]:
    """Returns the files of a source, and the folder that names of images are relative to (None: that of each file)."""
    if os.path.isdir(name):
        metadata = _metadata_of(name)
        return json_files([metadata]) if metadata else _data_set(name), Path(name)
    paths = _expanded(name)
    if paths:
        kinds = {os.path.splitext(path)[1] for path in paths}
        if len(kinds) != 1 or not kinds <= READERS.keys():
            raise ValueError(f"Expected `source` to be {SOURCES}, got {name}, of the kind {sorted(kinds)}.")
        return READERS[kinds.pop()](paths), None
    found = PARTS.fullmatch(name)
    if found and (os.path.isdir(found[1]) or HUB_ID.fullmatch(found[1])):
        if (found[2] or found[3]) or not os.path.exists(os.path.dirname(name)):
            return _data_set(found[1], found[2], found[3]), Path(found[1] if os.path.isdir(found[1]) else ".")
    raise ValueError(f"Expected `source` to be {SOURCES}, got {name}: there is no such file or folder.")


def _metadata_of(folder: str) -> str | None:
    """Returns the file that lists the images of a folder, or None if the folder holds data in other kinds of files."""
    files = sorted(name for name in os.listdir(folder) if not name.startswith("."))  # macOS leaves `._metadata.jsonl`
    lines = [file for file in files if file.endswith(".jsonl")]
    if METADATA in lines:
        return os.path.join(folder, METADATA)
    others = [name for name in files if name in SAVED] or _others_with_rows(folder)
    tables = {os.path.splitext(name)[1] for name in others if name in SAVED or name.endswith(TABLES)}
    if len(lines) == 1 and not others:
        return os.path.join(folder, lines[0])
    if lines or len(tables) > 1:
        found = [*lines, *others]
        more = f" and {len(found) - MOST_NAMED} more" if len(found) > MOST_NAMED else ""
        raise ValueError(
            f"Expected {folder} to hold {METADATA}, with one example per line, or rows of one kind, got "
            f"{found[:MOST_NAMED]}{more}. Name what to read, such as {os.path.join(folder, found[0])}."
        )
    if tables:
        return None
    raise ValueError(
        f"Expected {folder} to hold {METADATA}, with one example per line, or Parquet or tar files, got no such file."
    )


def _others_with_rows(folder: str) -> list[str]:
    """Returns the names of all files with rows in a folder and its subfolders, except `.jsonl` files at the top."""
    found = []
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(name for name in names if not name.startswith(".")):
            path, top = os.path.join(place, name), place == folder
            array = top and name.endswith(".json") and is_array(path)
            if array or name.endswith((*TABLES, ".jsonl.gz")) or (name.endswith(".jsonl") and not top):
                found.append(os.path.relpath(path, folder))
    return found


def _expanded(name: str) -> list[str]:
    """Returns the files of a name, of a pattern with `*`, or of all names that `{000..127}` and `{a,b}` make.

    Raises a `ValueError` if a name that braces make does not exist.
    """
    if os.path.isfile(name):
        return [name]
    pieces = BRACES.split(name)
    if len(pieces) > 1:
        choices = [_choices(piece) if index % 2 else [piece] for index, piece in enumerate(pieces)]
        paths = ["".join(chosen) for chosen in product(*choices)]
        missing = [path for path in paths if not os.path.isfile(path)]
        if missing:
            raise ValueError(f"Expected {len(paths)} files {name}, got {len(missing)} that do not exist: {missing[0]}.")
        return paths
    if any("**" in part and part != "**" for part in Path(name).parts):
        raise ValueError(f"Expected `**` to be the whole name of a folder, as in `data/**/*.jsonl`, got {name}.")
    return sorted(glob.glob(name, recursive=True)) if any(mark in name for mark in "*?[") else []


def _choices(piece: str) -> list[str]:
    found = re.fullmatch(r"(\d+)\.\.(\d+)", piece)
    if found is None:
        return piece.split(",")
    return [f"{number:0{len(found[1])}}" for number in range(int(found[1]), int(found[2]) + 1)]


def _data_set(path: str, config: str | None = None, split: str | None = None) -> list[Any]:
    """Returns the files of a data set that `datasets` reads: saved, in a folder like one of the Hub, or on the Hub."""
    datasets = library()
    if os.path.isdir(path) and any(os.path.isfile(os.path.join(path, name)) for name in SAVED):
        if config is not None:
            raise ValueError(f"Expected a saved data set without a configuration, got {path}@{config}.")
        saved = datasets.load_from_disk(path)
        return [saved_table(_split_of(saved, path, split) if isinstance(saved, dict) else saved, path)]
    try:
        builder = datasets.load_dataset_builder(path, config)
    except Exception as error:  # `datasets` raises errors of many kinds, also for the network
        raise ValueError(f"Expected `source` to be {SOURCES}, got {path}: {error}") from error
    files = builder.config.data_files or {}
    kind = type(builder).__module__.rpartition(".")[2]
    if kind in ("parquet", "json", "webdataset"):
        manager = datasets.DownloadManager()
        names = [file.removeprefix("file://") for file in _split_of(files, path, split)]
        if kind == "json":
            return json_files(manager.download_and_extract(names))  # `.jsonl.gz` too
        paths = manager.download(names)
        return tar_files(paths) if kind == "webdataset" else parquet_files(paths, names)
    builder.download_and_prepare()
    return [saved_table(_split_of(builder.as_dataset(), path, split), path)]


def _split_of(splits: Any, path: str, split: str | None) -> Any:
    """Returns the split of a name. Without a name, this is `train` or the only split."""
    names = sorted(str(name) for name in splits)
    chosen = split or ("train" if "train" in names or len(names) != 1 else names[0])
    if chosen not in names:
        raise ValueError(f"Expected a split of {path} after `#`, one of {names}, got {chosen!r}.")
    return splits[chosen]
