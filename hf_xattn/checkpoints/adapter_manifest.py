"""Reads the manifest of a checkpoint of added weights (see `checkpoints/adapters.py`), and checks each entry before anything is fetched or read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ..utils.checkpoint_files import check_name, read_json, short


MANIFEST = "cross_attention.json"
FORMAT = 1
BASES = ("text_base", "vision_base")
# Entries of a base, the types that they may have, and whether they must be there.
BASE_ENTRIES: dict[str, tuple[tuple[type, ...], bool]] = {
    "name_or_path": ((str,), True),
    "revision": ((str, type(None)), True),
    "subfolder": ((str, type(None)), True),
    "gguf_file": ((str, type(None)), False),
    "prefix": ((str,), True),
    "dtype": ((str,), True),
    "dtypes": ((dict,), True),
    "absent": ((list,), True),
    "shapes": ((str,), True),
    "fingerprint": ((str,), True),
}


def read_manifest(path: Path) -> dict[str, Any]:
    """Reads and checks a manifest.

    Raises:
        ValueError: for a file that is damaged or was written by a later version, and for an entry of a wrong type, a dtype that torch does
            not have, or the name of a file elsewhere.
    """
    try:
        manifest = read_json(path)
    except ValueError as error:
        raise ValueError(f"{error} Save the model again.") from error
    if manifest.get("format") != FORMAT:
        raise ValueError(
            f"{path} has format {short(manifest.get('format'))}, this version of hf_xattn reads {FORMAT}. Update hf_xattn."
        )
    _check_files(manifest.get("files"), path)
    for argument in BASES:
        if argument in manifest:
            _check_base(manifest[argument], f"{path}, `{argument}`")
    quantization = manifest.get("quantization_config")
    if not isinstance(quantization, (dict, type(None))):
        raise ValueError(
            f"{path} is damaged: expected `quantization_config` to be an object, got {short(quantization)}."
        )
    return manifest


def _check_files(files: Any, path: Path) -> None:
    if not isinstance(files, dict):
        raise ValueError(f"{path} is damaged: expected `files` to be an object, got {short(files)}.")
    for name, facts in files.items():
        check_name(name, str(path))
        size, digest = (facts.get("bytes"), facts.get("sha256")) if isinstance(facts, dict) else (None, None)
        if type(size) is not int or not isinstance(digest, str):
            raise ValueError(f"{path} is damaged: expected `bytes` and `sha256` of {short(name)}, got {short(facts)}.")


def _check_base(record: Any, where: str) -> None:
    if not isinstance(record, dict):
        raise ValueError(f"{where} is damaged: expected an object, got {short(record)}.")
    for name, (kinds, required) in BASE_ENTRIES.items():
        if required or name in record:
            if name not in record or not isinstance(record[name], kinds):
                expected = " or ".join("None" if kind is type(None) else kind.__name__ for kind in kinds)
                raise ValueError(
                    f"{where} is damaged: expected `{name}` to be {expected}, got {short(record.get(name))}."
                )
    for name in ("subfolder", "gguf_file"):
        if record.get(name):
            check_name(record[name], where)
    if not all(isinstance(name, str) for name in record["absent"]):
        raise ValueError(f"{where} is damaged: expected `absent` to be a list of names, got {short(record['absent'])}.")
    for dtype in (record["dtype"], *record["dtypes"].values()):
        if not isinstance(dtype, str) or not isinstance(getattr(torch, dtype, None), torch.dtype):
            raise ValueError(f"{where} is damaged: expected dtypes of torch, got {short(dtype)}.")


__all__ = ["FORMAT", "MANIFEST", "read_manifest"]
