"""The files of a checkpoint of added weights (see `checkpoints/adapters.py`): their names, and where they are."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers.utils.hub import cached_file

from ..utils.checkpoint_files import SHARDS, check_inside
from ..utils.keywords import FILE_KEYWORDS, given
from .peft_adapters import PEFT_CONFIG


MANIFEST = "cross_attention.json"
WEIGHTS = "cross_attention"  # in place of the `model` of transformers' names


def weight_files_of(folder: Path) -> list[Path]:
    """The files of added weights in a folder: one, or shards. A longer name is that of another file."""
    return sorted(path for shards in ("", SHARDS) for path in folder.glob(f"{WEIGHTS}{shards}.safetensors"))


def files_of_adapter(folder: Path) -> Iterator[Path]:
    """What an earlier `adapter_only=True` left in a folder: its manifest and its weights."""
    if (folder / MANIFEST).is_file():
        yield folder / MANIFEST
        yield from weight_files_of(folder)


def find_manifest(name: Any, load_kwargs: dict[str, Any]) -> Path | None:
    """The manifest of a checkpoint, or None. Raises a `ValueError` for a folder that is half written."""
    if not isinstance(name, (str, os.PathLike)) or load_kwargs.get("state_dict") is not None:
        return None
    hub = given(FILE_KEYWORDS, load_kwargs)
    path = find_file(os.fspath(name), MANIFEST, hub)
    folder = Path(name) / hub.get("subfolder", "")
    if path is None and weight_files_of(folder) and not any(folder.glob("model*.safetensors")):
        raise ValueError(
            f"{folder} holds weights of blocks, but no {MANIFEST}: it was only half written. Save it again."
        )
    return path


def find_file(name: str, file: str, hub: dict[str, Any]) -> Path | None:
    """The path of a file in a folder or repository, downloaded if necessary. None if there is no such file."""
    if os.path.isdir(name):
        folder = Path(name) / hub.get("subfolder", "")
        if not (folder / file).is_file():
            return None
        check_inside(folder, folder / file)
        return folder / file
    quiet = {f"_raise_exceptions_for_{case}": False for case in ("gated_repo", "missing_entries", "connection_errors")}
    found = cached_file(name, file, **quiet, **hub)
    return None if found is None else Path(found)


def check_target(target: Path, adapter_only: bool = True) -> None:
    """Raises a `ValueError` for a folder with something that would be loaded in place of the save, or on top of it."""
    if target.is_file():
        raise ValueError(f"Expected `save_directory` to be a folder, got {target}, a file.")
    if adapter_only and (whole := sorted(path.name for path in target.glob("model*.safetensors"))):
        raise ValueError(f"`adapter_only=True`: {target} holds a whole model ({whole[0]}). Choose another folder.")
    if (target / PEFT_CONFIG).is_file():
        raise ValueError(
            f"{target} holds an adapter of PEFT ({PEFT_CONFIG}), which `from_pretrained` would put on top of the "
            "model. Choose another folder."
        )
