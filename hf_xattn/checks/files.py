"""Saves a model into a temporary folder, loads it, and compares both."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ..checkpoints.adapter_saving import equal_bits
from ..checkpoints.own_parts import adapter_layers
from .results import BROKEN, HOLDS, NOT_CHECKED, Result, listed


# Fields of a configuration that say where a model is, or who wrote it.
OF_THE_FILE = "_name_or_path name_or_path transformers_version auto_map architectures dtype torch_dtype".split()


def check_files(model: Any, reload: Callable[[Path], Any], adapter_only: bool) -> Result:
    """A saved model loads again with the same weights, bit for bit, and the same configuration."""
    layer = next((name for name, _ in adapter_layers(model)), None)
    if layer is not None:
        line = f"an adapter (PEFT) is saved without its model: {layer} is a layer of one"
        return Result("save-load", NOT_CHECKED, line)
    what = "only what was added (adapter-only)" if adapter_only else "the whole model"
    with tempfile.TemporaryDirectory(prefix="hf-xattn-check-") as name:
        tensors = () if adapter_only else model.state_dict().values()
        needed, free = sum(tensor.nbytes for tensor in tensors), shutil.disk_usage(name).free
        if needed > 0.9 * free:
            return Result(
                "save-load",
                NOT_CHECKED,
                f"needs {needed / 2**30:.1f} GiB, {tempfile.gettempdir()} has {free / 2**30:.1f}. Set TMPDIR, or save "
                "only what was added: `--adapter-only`",
            )
        folder = Path(name)
        try:
            model.save_pretrained(folder, adapter_only=adapter_only)
        except (ValueError, OSError) as error:
            return Result("save-load", NOT_CHECKED, f"saving {what} was refused: {error}")
        saved = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        again = reload(folder)
        differing, total = _differences(model, again)
        del again
    if differing:
        line = f"saved {what}, {len(differing)} differ: {listed(differing)}"
        return Result("save-load", BROKEN, line, len(differing), 0)
    line = f"0 of {total} tensors differ, bit for bit: saved {what}, {saved / 2**20:.1f} MiB"
    return Result("save-load", HOLDS, line, 0, 0)


def _differences(model: Any, again: Any) -> tuple[list[str], int]:
    # After saving: bitsandbytes rounds and packs 4-bit scales when it saves weights that have computed on a CPU.
    ours, theirs = model.state_dict(), again.state_dict()
    differing = [f"{name} (missing)" for name in ours if name not in theirs]
    differing += [f"{name} (not in the model)" for name in theirs if name not in ours]
    for name in ours.keys() & theirs.keys():
        mine, other = ours[name], theirs[name]
        if not isinstance(mine, torch.Tensor):
            continue
        if mine.dtype != other.dtype:
            differing.append(f"{name} ({mine.dtype}, loaded as {other.dtype})")
        elif not equal_bits(mine, other):
            differing.append(name)
    before, after = _settings(model.config.to_dict()), _settings(again.config.to_dict())
    names = before.keys() | after.keys()
    differing += [f"config.{name}" for name in names if before.get(name) != after.get(name)]
    return sorted(differing), len(ours)


def _settings(config: dict[str, Any]) -> dict[str, Any]:
    """The fields of a configuration without those about files."""
    return {
        str(name): _settings(value) if isinstance(value, dict) else value
        for name, value in config.items()
        if name not in OF_THE_FILE and not str(name).startswith("base_")
    }
