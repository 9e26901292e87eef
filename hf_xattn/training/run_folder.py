"""The folder of a run of `hf-xattn train`: its options, which a run that is resumed must share, and its checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..data.order import WITHOUT_BAD
from ..utils.whole_folder import replace_file
from .complete_checkpoints import STATE, find_checkpoints
from .launch import is_first_process, num_processes, say
from .training_options import STOP, option_of


OPTIONS_FILE = "training.json"
UNFINISHED = f".{OPTIONS_FILE}.part"  # the options while they are written
CHECKPOINTS = "checkpoints"
# Names beside the options: the digest of the text model's answers, and how the model starts.
KEPT, START = "kept_text", "start"
# How a run was launched, in the words of an error: `Trainer` reads other batches if it differs.
LAUNCHED = {"processes": "process(es)", "gpus": "GPU(s) for a process"}


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
    found = find_checkpoints(output / CHECKPOINTS, num_processes())
    for path, reason in found.skipped:
        say(f"{path} is skipped: it is not complete ({reason}).")
        if is_first_process():  # or a folder that is killed a second time would look complete, with files of both times
            (path / STATE).unlink(missing_ok=True)
    return found.last
