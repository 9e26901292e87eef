"""The folder of a run of `hf-xattn train`: its options, which a run that is resumed must share, and its checkpoints.

A run that was killed in the middle of a checkpoint goes on from the last complete one.
`Trainer.train(resume_from_checkpoint=True)` takes the highest number, even if that folder cannot be loaded.
"""

from __future__ import annotations

import json
import os
import re
import zipfile
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from transformers.utils import logging

from ..data.loading import WITHOUT_BAD
from ..utils.whole_folder import replace_file
from .launch import is_first_process, num_processes, say
from .training_options import STOP, option_of


logger = logging.get_logger(__name__)

STATE = "trainer_state.json"
NUMBERED = re.compile(r"checkpoint-(\d+)")
WEIGHTS = ("*.safetensors", "*.bin", "*.distcp", "*.pt")
BESIDE_WEIGHTS = ("training_args.bin", "optimizer.pt", "optimizer.bin", "scheduler.pt", "scaler.pt")
OPTIONS_FILE = "training.json"
UNFINISHED = f".{OPTIONS_FILE}.part"  # the options while they are written
CHECKPOINTS = "checkpoints"
# Names beside the options: the digest of the text model's answers, and how the model starts.
KEPT, START = "kept_text", "start"
# How a run was launched, in the words of an error: `Trainer` reads other batches if it differs.
LAUNCHED = {"processes": "process(es)", "gpus": "GPU(s) for a process"}


def last_complete_checkpoint(folder: str | os.PathLike[str]) -> str | None:
    """Returns the checkpoint that a killed run goes on from, for `trainer.train(resume_from_checkpoint=...)`.

    A checkpoint is complete if it has `trainer_state.json`, which `Trainer` writes last, if it has weights, and if none
    of its files is cut off. A warning names each checkpoint with a higher number that is skipped, with the reason.
    Nothing is loaded or changed.

    Args:
        folder (`str` or `Path`): the `output_dir` of `TrainingArguments`, with folders `checkpoint-N`.

    Returns:
        `str`: the path of the complete checkpoint with the highest number. `None` if there is none, or no such folder:
        with `None`, `Trainer.train` starts from the beginning.

    Raises:
        ValueError: for a `folder` that is a file.

    Example:

    ```python
    >>> import hf_xattn

    >>> checkpoint = hf_xattn.last_complete_checkpoint("trainer")  # the `output_dir` of a run that was killed
    >>> print(checkpoint)  # there is none yet, so `trainer.train(resume_from_checkpoint=checkpoint)` starts anew
    None
    ```
    """
    if os.path.isfile(folder):
        raise ValueError(f"Expected `folder` to be a folder with checkpoints, got a file: {os.fspath(folder)!r}.")
    last, skipped = find_checkpoints(Path(folder))
    for path, reason in skipped:
        logger.warning(f"{path} is skipped: it is not complete ({reason}).")
    return None if last is None else str(last)


def find_checkpoints(folder: Path, processes: int = 1) -> tuple[Path | None, list[tuple[Path, str]]]:
    """The complete checkpoint of a folder with the highest number, and those with a higher one, each with what it
    misses.

    The folder may be missing. Each of the `processes` of a run saves its own random state.
    """
    numbered = [
        (int(match[1]), path) for path in folder.glob("checkpoint-*") if (match := NUMBERED.fullmatch(path.name))
    ]
    skipped: list[tuple[Path, str]] = []
    for _, path in sorted(numbered, reverse=True):
        if not path.is_dir():
            continue
        reason = _what_is_missing(path, processes)
        if reason is None:
            return path, skipped
        skipped.append((path, reason))
    return None, skipped


def step_of(checkpoint: Path) -> int:
    """The number of optimizer steps before a checkpoint."""
    return json.loads((checkpoint / STATE).read_text())["global_step"]


def _what_is_missing(checkpoint: Path, processes: int) -> str | None:
    """Why a checkpoint is not complete, or None."""
    if not (checkpoint / STATE).is_file():
        return f"{STATE}, which is written last, is missing"
    files = sorted(path for path in checkpoint.rglob("*") if path.is_file())
    weights = [path for path in files if path.name not in BESIDE_WEIGHTS and not path.name.startswith("rng_state")]
    if not any(path.match(kind) for path in weights for kind in WEIGHTS):
        return "it has no weights"
    for path in files:
        name = path.relative_to(checkpoint)
        if not _is_whole(path):
            return f"{name} is cut off"
        if path.name.endswith(".index.json"):
            index = json.loads(path.read_text(encoding="utf-8"))
            shards = index.get("weight_map") if isinstance(index, dict) else None
            if not isinstance(shards, dict):
                return f"{name} is damaged"
            if missing := sorted({str(each) for each in shards.values() if not (path.parent / str(each)).is_file()}):
                return f"{missing[0]} of {name} is missing"
        if path.suffix == ".distcp" and not (path.parent / ".metadata").is_file():
            return f"{name.parent / '.metadata'}, which is written last, is missing"
    try:
        step_of(checkpoint)
    except (KeyError, TypeError, ValueError):
        return f"{STATE} is damaged"
    for rank in range(processes if processes > 1 else 0):
        if not (checkpoint / f"rng_state_{rank}.pth").is_file():
            return f"rng_state_{rank}.pth is missing"
    return None


def _is_whole(path: Path) -> bool:
    """Whether a file has its end, as far as its format tells."""
    try:
        if path.suffix == ".safetensors":
            with safe_open(str(path), framework="pt"):  # compares the size of the file with its header
                return True
        if path.suffix == ".json":
            json.loads(path.read_text(encoding="utf-8"))
    except (OSError, RecursionError, SafetensorError, ValueError):
        return False
    if path.suffix in (".pt", ".pth", ".bin"):
        with path.open("rb") as file:
            is_zip = file.read(2) == b"PK"
        return path.stat().st_size > 0 and (not is_zip or zipfile.is_zipfile(path))  # a zip file's directory is its end
    return True


def check_resumed(output: Path, saved: dict[str, Any]) -> dict[str, Any]:
    """Returns what was saved of a run. Raises a `ValueError` if there is none, or one with other options or data."""
    file = output / OPTIONS_FILE
    if not file.is_file():
        if (output / UNFINISHED).is_file():  # killed before anything was trained
            return {}
        raise ValueError(f"`--resume` found no run in {output}: it has no {OPTIONS_FILE}. Start without `--resume`.")
    before = json.loads(file.read_text())
    if before.get("complete"):
        raise ValueError(f"`--resume`: the run in {output} is complete, so there is nothing to resume.")
    if before.get("order") == WITHOUT_BAD and (before.get("bad_rows") == STOP or before["stream"]):
        before["order"] = saved["order"]  # none was left out
    if before.get("order") != saved["order"]:
        raise ValueError(
            f"`--resume`: expected a run that reads rows in the order of this version of hf_xattn ({saved['order']}), "
            f"got the run in {output}, which another version began. Finish it with that version, or start in a new "
            "folder."
        )
    for name, value in saved.items():
        if before.get(name) == value:
            continue
        if name == "fingerprints":
            raise ValueError(
                f"`--resume`: expected the data of the run in {output}, got other data. Start in a new folder."
            )
        if name in LAUNCHED:
            raise ValueError(
                f"`--resume`: expected {before[name]} {LAUNCHED[name]}, as in the run in {output}, got {value}, which "
                "would train on other batches. Launch it in the same way, or start in a new folder."
            )
        raise ValueError(
            f"`--resume`: expected {option_of(name)} to be {before.get(name)!r}, as in the run in {output}, got "
            f"{value!r}. Use the same value, or start in a new folder."
        )
    return before


def write_options(output: Path, saved: dict[str, Any]) -> None:
    """Writes the options under another name first: a run that is killed meanwhile leaves no half of a file."""
    (output / UNFINISHED).write_text(json.dumps(saved, indent=2) + "\n")
    replace_file(output / UNFINISHED, output / OPTIONS_FILE)


def last_checkpoint(output: Path) -> Path | None:
    """Returns the last complete checkpoint. `Trainer` writes over the others when it reaches their steps again."""
    last, skipped = find_checkpoints(output / CHECKPOINTS, num_processes())
    for path, reason in skipped:
        say(f"{path} is skipped: it is not complete ({reason}).")
        if is_first_process():  # or a folder that is killed a second time would look complete, with files of both times
            (path / STATE).unlink(missing_ok=True)
    return last


__all__ = ["last_complete_checkpoint"]
