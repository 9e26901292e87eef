"""The folder of a run of `hf-xattn train`: its options, which a resumed run must share, and its checkpoints.

`Trainer.train(resume_from_checkpoint=True)` takes the checkpoint with the highest number, even if the run was killed
while it wrote this checkpoint. This file finds the last checkpoint that is complete.
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
UNFINISHED = f".{OPTIONS_FILE}.part"  # name of the options file while it is written
CHECKPOINTS = "checkpoints"
# Further entries in the options file: the hash of the text model's answers, and how the model starts.
KEPT, START = "kept_text", "start"
# How a run was launched, with words for an error. If this differs, `Trainer` would read other batches.
LAUNCHED = {"processes": "the number of processes", "gpus": "the number of GPUs of a process"}


def last_complete_checkpoint(folder: str | os.PathLike[str]) -> str | None:
    """Returns the checkpoint from which a killed run should continue, for `trainer.train(resume_from_checkpoint=...)`.

    A checkpoint is complete if it has weights, if none of its files is cut off, and if it has `trainer_state.json`,
    which `Trainer` writes last. A warning names each incomplete checkpoint with a higher number, with the reason.
    Nothing is loaded or changed.

    Args:
        folder (`str` or `Path`): the `output_dir` of `TrainingArguments`, which holds folders `checkpoint-N`.

    Returns:
        `str` or None: the path of the complete checkpoint with the highest number. None if there is none, or if the
        folder does not exist. With None, `Trainer.train` starts from the beginning.

    Raises:
        ValueError: if `folder` is a file.

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
    """Finds the complete checkpoint with the highest number in a folder, which may be missing.

    Also returns the incomplete checkpoints with a higher number, each with the reason. A checkpoint of several
    `processes` must have the random state of each of them.
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
    """Returns the number of optimizer steps before a checkpoint."""
    return json.loads((checkpoint / STATE).read_text())["global_step"]


def _what_is_missing(checkpoint: Path, processes: int) -> str | None:
    """Returns why a checkpoint is not complete, or None if it is."""
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
    """Whether a file is complete, as far as its format shows."""
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
        # `is_zipfile` looks for the directory, which is at the end of a zip file.
        return path.stat().st_size > 0 and (not is_zip or zipfile.is_zipfile(path))
    return True


def check_resumed(output: Path, saved: dict[str, Any]) -> dict[str, Any]:
    """Returns the saved options of a run. Raises a `ValueError` if there is no run, or if options or data differ."""
    file = output / OPTIONS_FILE
    if not file.is_file():
        if (output / UNFINISHED).is_file():  # the run was killed before it trained anything
            return {}
        raise ValueError(f"`--resume` found no run in {output}: it has no {OPTIONS_FILE}. Start without `--resume`.")
    before = json.loads(file.read_text())
    if before.get("complete"):
        raise ValueError(f"`--resume`: the run in {output} is complete, so there is nothing to resume.")
    if before.get("order") == WITHOUT_BAD and (before.get("bad_rows") == STOP or before["stream"]):
        before["order"] = saved["order"]  # no row was left out, so the two orders are equal
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
        what = LAUNCHED.get(name, option_of(name))
        raise ValueError(
            f"`--resume`: expected {what} to be {before.get(name)!r}, as in the run in {output}, got {value!r}. Use "
            "the same value, or start in a new folder."
        )
    return before


def write_options(output: Path, saved: dict[str, Any]) -> None:
    """Writes the options of a run. They are written under another name first, so that no half-written file remains."""
    output.mkdir(parents=True, exist_ok=True)
    (output / UNFINISHED).write_text(json.dumps(saved, indent=2) + "\n")
    replace_file(output / UNFINISHED, output / OPTIONS_FILE)


def last_checkpoint(output: Path) -> Path | None:
    """Returns the last complete checkpoint. `Trainer` overwrites the incomplete ones when it reaches their steps."""
    last, skipped = find_checkpoints(output / CHECKPOINTS, num_processes())
    for path, reason in skipped:
        say(f"{path} is skipped: it is not complete ({reason}).")
        # If the run is killed again while it overwrites this folder, the old state file would make it look complete.
        if is_first_process():
            (path / STATE).unlink(missing_ok=True)
    return last


__all__ = ["last_complete_checkpoint"]
