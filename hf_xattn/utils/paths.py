"""Checks of paths, before anything is read or written."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub.utils import HFValidationError, validate_repo_id

from .tensor_checks import type_name
from .whole_folder import HIDDEN


def check_path(name: str, path: Any) -> None:
    """Raises a `TypeError` if `path` is not a path."""
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"Expected `{name}` to be a path, got {type_name(path)}.")


def is_free(folder: Path) -> bool:
    """Whether a folder is new, or empty but for what a killed process has left before it changed anything."""
    return not folder.exists() or (folder.is_dir() and all(path.name.startswith(HIDDEN) for path in folder.iterdir()))


def check_source(name: str, source: str | Path, kinds: str = "a folder or a Hub id") -> None:
    """Raises a `ValueError` for a local path that is not a folder. Every name that the Hub does not allow is a path.

    Without this check, transformers would look for the path on the Hub and report an invalid Hub id.
    """
    text = str(source)
    try:
        validate_repo_id(text)
        is_local = isinstance(source, Path) or Path(source).is_file()
    except HFValidationError:
        is_local = True
    if is_local and not Path(source).is_dir():
        what = "which is a file" if Path(source).is_file() else "but there is no such folder"
        raise ValueError(f"Expected `{name}` to be {kinds}, got {text!r}, {what}.")


@contextmanager
def both_readings(source: str | Path) -> Iterator[None]:
    """Tells of a name that may be a folder or a Hub id, and can be read as neither, that there is no such folder."""
    try:
        yield
    except OSError as error:
        if os.path.isdir(source):
            raise
        raise OSError(f"There is no folder {str(source)!r} here, and as a Hub id it cannot be read: {error}") from error
