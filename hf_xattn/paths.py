"""Checks of paths, before anything is read or written."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from .tensor_checks import type_name


def check_path(name: str, path: Any) -> None:
    """Raises a `TypeError` if `path` is not a path."""
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"Expected `{name}` to be a path, got {type_name(path)}.")


def check_source(name: str, source: str | Path, kinds: str = "a folder or a Hub id") -> None:
    """Raises a `ValueError` for a local path that is not a folder. A name with at most one slash may be a Hub id.

    Without this check, transformers would look for the path on the Hub and report an invalid Hub id.
    """
    text = str(source)
    is_local = isinstance(source, Path) or text.startswith((".", "~", os.sep)) or text.count("/") > 1
    if is_local and not Path(source).is_dir():
        raise ValueError(f"Expected `{name}` to be {kinds}, got {text!r}, which is not a folder.")
