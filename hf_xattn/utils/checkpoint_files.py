"""Checks the files of a checkpoint before anything is loaded from them.

A checkpoint may come from a stranger or be damaged. transformers opens the files that an index names, wherever they
are. Here each file must lie in the folder of the checkpoint and be whole. Only the headers of the files are read, so a
bit that has flipped inside a weight is not noticed.

If weights are missing, transformers initialises them, and it opens a checkpoint with the class that is registered for
its model type, even if another class has saved it. It warns at most. A model of this package is loaded with all of its
weights and by the class that has saved it, or not at all.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from huggingface_hub.utils.sha import sha_fileobj
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers.utils import logging


logger = logging.get_logger(__name__)

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
NUMBER = "[0-9][0-9][0-9][0-9][0-9]"
SHARDS = f"-{NUMBER}-of-{NUMBER}"  # what transformers appends to the names of shards
SHARDS_OF_RANKS = f"shard-{NUMBER}-model{SHARDS}.safetensors"  # files of several processes (DCP), with parts of tensors
OFFSETS = "DCP_SHARDING_INFO"  # the key of the places of these parts, in the metadata of a file
CARD = "README.md"  # the model card
SIDE_FILES = ("generation_config.json",)  # transformers takes defaults without an error if it cannot read them
INTEGERS = ("BOOL", "U8", "I8", "U16", "I16", "U32", "I32", "U64", "I64")
NAMED = 3  # number of weights that a message names


class Stored(NamedTuple):
    """The header of a tensor in a file. `dtype` is the name that safetensors gives it."""

    file: str
    shape: tuple[int, ...]
    dtype: str = "F32"

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def check_inside(folder: Path, path: Path) -> None:
    """Raises a `ValueError` for a file outside of a folder, behind `..` or behind a symbolic link.

    A snapshot in the cache of huggingface_hub consists of links to the files of its repository. They are allowed.
    """
    real = Path(os.path.realpath(path))
    allowed = [Path(os.path.realpath(folder))]
    for parent in (Path(os.path.abspath(folder)), *Path(os.path.abspath(folder)).parents):
        if parent.parent.name == "snapshots":
            allowed.append(Path(os.path.realpath(parent.parent.parent / "blobs")))
    if not any(real.is_relative_to(root) for root in allowed):
        raise ValueError(
            f"{path}: expected a file in {folder}, got one that leads out of it. If you trust the file, copy "
            "it into the folder."
        )


def short(value: object) -> str:
    """Returns a value as a text for a message. Of a long text, only the beginning is returned."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer with too many digits, or lists that are nested too deeply
        return f"a very large {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:60]}... ({len(text)} characters)"


def read_json(path: Path) -> dict[str, Any]:
    """Reads a file with one JSON object. Raises a `ValueError` for any other file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # a `ValueError` comes also for text that is not UTF-8
        raise ValueError(f"{path} is damaged: expected JSON ({error}).") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} is damaged: expected a JSON object, got {short(content)}.")
    return content


def read_index(path: Path) -> dict[str, str]:
    """Returns the file of each tensor, from the index of a sharded checkpoint.

    Raises a `ValueError` for a damaged index, and for one that names anything but safetensors files in its folder.
    """
    content = read_json(path)
    index = content.get("weight_map")
    if not isinstance(index, dict) or not index:
        raise ValueError(f"{path} is damaged: expected a `weight_map` of tensors and files, got {short(index)}.")
    for file in index.values():
        if not isinstance(file, str) or not re.fullmatch(r"(?!/)(?!.*\.\.)[^\\\0]+\.safetensors", file):
            raise ValueError(f"{path} names {short(file)}: expected a *.safetensors file in its folder.")
    return index


def weight_files(
    folder: Path, variant: str | None = None, named: str | None = None
) -> tuple[list[Path], dict[str, str]]:
    """Returns the weight files that `from_pretrained` would read from a folder, and their index.

    The index is empty if there is none.

    Args:
        named (`str`, *optional*): the file or the index, if the configuration names it (`transformers_weights`).

    Raises:
        ValueError: as [`read_index`], for a file that leads out of the folder, and for the files of two saves in one
            folder.
    """
    single, index_file = (folder / _variant(name, variant) for name in (WEIGHTS, INDEX))
    if named is not None:
        single, index_file = (folder / "", folder / named) if named.endswith(".json") else (folder / named, folder / "")
    elif single.is_file() and index_file.is_file():  # transformers leaves an index without its shards
        shards = sorted({folder / file for file in read_index(index_file).values()} - {single})
        _check_one_save(folder, [single, *filter(Path.is_file, shards)])
    index: dict[str, str] = {}
    if named is None and (ranks := sorted(folder.glob(SHARDS_OF_RANKS))):
        files = ranks
        others = [path for ending in ("", SHARDS) for path in folder.glob(f"model{ending}.safetensors")]
        _check_one_save(folder, [ranks[0], *others])
    elif single.is_file() or single.is_symlink():
        files = [single]
    elif index_file.is_file() or index_file.is_symlink():
        check_inside(folder, index_file)
        index = read_index(index_file)
        files = [folder / file for file in sorted(set(index.values()))]
    else:
        files = []
    for file in files:
        check_inside(folder, file)
    return files, index


def _check_one_save(folder: Path, files: list[Path]) -> None:
    """Raises a `ValueError` if there are files of two saves, of which one is older."""
    if len(files) > 1:
        raise ValueError(
            f"{folder} holds weights twice, in {files[0].name} and in {files[1].name}. Remove those of the older save, "
            "or save again in another folder."
        )


def _variant(name: str, variant: str | None) -> str:
    stem, _, ending = name.rpartition(".")
    return name if variant is None else f"{stem}.{variant}.{ending}"


def read_headers(files: Iterable[Path], index: dict[str, str], where: str) -> dict[str, Stored]:
    """Returns the headers of the tensors in safetensors files, by name. `index` is empty if there is none.

    Raises:
        ValueError: for a damaged file, and, without an index, for a tensor that is in two files.
    """
    headers: dict[str, Stored] = {}
    for path in files:
        for name, stored in _header(path, where).items():
            if name in headers and not index:
                raise ValueError(f"{where}: {path.name} and {headers[name].file} hold the same tensor {short(name)}.")
            headers[name] = stored
    return headers


def read_headers_of_ranks(files: Iterable[Path], where: str) -> dict[str, Stored]:
    """Returns the headers of the tensors in files that several processes have written, by name.

    Raises:
        ValueError: for a damaged file, and for parts that do not make up a whole tensor, because a file is missing or
            comes from another save.
    """
    parts: dict[str, set[tuple[Stored, tuple[int, ...]]]] = {}
    for path in files:
        header = _header(path, where)
        with safe_open(path, "pt") as opened:
            text = (opened.metadata() or {}).get(OFFSETS, "{}")
        offsets = {name: tuple(entry["saved_offsets"]) for name, entry in json.loads(text).items()}
        for name, stored in header.items():
            start = offsets.get(name, (0,) * len(stored.shape))
            parts.setdefault(name, set()).add((stored._replace(file=""), start))
    headers: dict[str, Stored] = {}
    for name, found in parts.items():
        any_part = next(iter(found))[0]
        ends = [[at + size for at, size in zip(start, stored.shape)] for stored, start in found]
        whole = any_part._replace(shape=tuple(max(sizes) for sizes in zip(*ends)))
        if (held := sum(stored.numel for stored, _ in found)) != whole.numel:
            raise ValueError(
                f"{where} is not one checkpoint: the files of its ranks hold {held} values of {short(name)}, expected "
                f"{whole.numel}. A file is missing, or is of an older save. Save the model again in another folder."
            )
        headers[name] = whole
    return headers


def _header(path: Path, where: str) -> dict[str, Stored]:
    try:
        with safe_open(path, "pt") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}
            return {name: Stored(path.name, tuple(part.get_shape()), part.get_dtype()) for name, part in slices.items()}
    except FileNotFoundError as error:
        raise ValueError(f"{where} is not complete: {path.name} is missing.") from error
    except (SafetensorError, OSError, ValueError) as error:
        raise ValueError(f"{where}: {path.name} is truncated or not a safetensors file ({error}).") from error


def check_weights(headers: dict[str, Stored], quantized: bool, where: str) -> None:
    """Raises a `ValueError` for integers in a checkpoint that is not quantized: cast to floats, they would be wrong."""
    if quantized:
        return
    for name, stored in headers.items():
        if name.endswith(".weight") and stored.dtype in INTEGERS:
            raise ValueError(
                f"{where}: {stored.file} holds {short(name)} of dtype {stored.dtype}: expected floating-point weights, "
                "because the configuration names no `quantization_config`."
            )


def sha256_of(path: Path) -> str:
    """Returns the SHA-256 of a file, as 64 hexadecimal digits."""
    with open(path, "rb") as file:
        return sha_fileobj(file).hex()


class NotesWhatIsMissing:
    """Mixin for models that are loaded with all weights or not at all."""

    # The names of weights that the checkpoint lacked, and of weights in the checkpoint that the model does not have.
    _lacking: tuple[set[str], set[str]] | None = None

    def _adjust_missing_and_unexpected_keys(self, loading_info: Any) -> None:
        """Notes all missing weights at the end of loading, also those that a class allows to be missing."""
        missing = set(loading_info.missing_keys)
        noted: Any = super()
        noted._adjust_missing_and_unexpected_keys(loading_info)
        self._lacking = missing, set(loading_info.unexpected_keys)


def check_class(model_class: type, architectures: object, source: object, ours: Iterable[str]) -> None:
    """Raises a `ValueError` if a class of the user's own has saved a checkpoint, and another class would load it.

    Args:
        model_class (`type`): the class that would load the checkpoint.
        architectures (`list[str]`, *optional*): the classes that the configuration names.
        source: the name of the checkpoint.
        ours (`Iterable[str]`): the classes of this package, whose checkpoints any class may load.
    """
    if not isinstance(architectures, (list, tuple)) or not architectures:
        return
    names = [str(name).removeprefix("FSDP") for name in architectures]
    if {each.__name__ for each in model_class.__mro__}.isdisjoint(names) and set(ours).isdisjoint(names):
        raise ValueError(
            f"{source} was saved by a class {names[0]}, so {model_class.__name__} may answer otherwise. Load it with "
            f"`{names[0]}.from_pretrained`, or register that class with the Auto class that you use."
        )


def check_complete(model: nn.Module, source: object, allowed: bool = False) -> None:
    """Raises a `ValueError` if a loaded model ([`NotesWhatIsMissing`]) did not get all of its weights.

    With `allowed`, the argument `allow_missing_weights` of the caller, it warns in place of the error.
    """
    missing, unexpected = vars(model).pop("_lacking", (set(), set()))
    if not missing:
        return
    what = incomplete(source, missing, unexpected)
    if not allowed:
        raise ValueError(
            f"{what} Copy it again. With `allow_missing_weights=True`, `from_pretrained` initialises these weights, "
            "most of them with random values."
        )
    logger.warning(f"{what} These weights have first values, most of them random.")


def incomplete(source: object, missing: Collection[str], unexpected: Collection[str]) -> str:
    """Returns the message for a checkpoint that lacks weights."""
    what = f"{source} is not complete: {len(missing)} weights are missing, {_first(missing)}."
    if unexpected:
        others = f"It holds {len(unexpected)} for which the model has no place, {_first(unexpected)}"
        return f"{what} {others}: were weights renamed?"
    return f"{what} It is damaged, or belongs to another configuration."


def _first(names: Collection[str]) -> str:
    first = ", ".join(map(short, sorted(names)[:NAMED]))
    return first + (f" and {len(names) - NAMED} more" if len(names) > NAMED else "")
