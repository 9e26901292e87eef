"""Reads and writes safetensors folders one tensor at a time."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from ..utils.checkpoint_files import INDEX, Stored, check_inside, check_path, read_index, refuse_pickled, short
from ..utils.checkpoint_files import read_headers as checked_headers
from ..utils.stub import is_own_file
from ..utils.whole_folder import is_free, refuse_unfinished


# Files that are written anew (weights, index, configuration), and files that are not needed.
NOT_COPIED = ("*.safetensors", "*.index.json", "config.json", "*.bin", "*.pt", "*.pth", "*.md", ".*")


def read_headers(folder: Path) -> dict[str, Stored]:
    """Returns file, shape and dtype of every tensor in a folder, by name. Reads no weights.

    Raises:
        ValueError: if a file is missing, truncated or outside the folder, or if a tensor is not in the file that the
            index names.
    """
    refuse_unfinished(folder)
    where, index_file = f"`source` ({folder})", folder / INDEX
    index: dict[str, str] = {}
    try:
        if index_file.is_file():
            check_inside(folder, index_file)
            index = read_index(index_file)
        files = [folder / file for file in sorted(set(index.values()))] or sorted(folder.glob("*.safetensors"))
        for file in files:
            check_inside(folder, file)
            if file.parent != folder:
                raise ValueError(
                    f"{INDEX} names {short(str(file.relative_to(folder)))}, which is not a file in the folder."
                )
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    if not files:
        refuse_pickled(folder, where)
    return checked_headers(files, index, where)


def read_tensor(folder: Path, headers: dict[str, Stored], name: str) -> torch.Tensor:
    """Reads one tensor of a folder."""
    with safe_open(folder / headers[name].file, "pt") as opened:
        return opened.get_tensor(name)


def check_folder(output: str | Path) -> None:
    """Raises a `ValueError` if `output` is a file, a folder that is not empty, or has no parent folder."""
    check_path("output", output)
    output = Path(output)
    if not is_free(output):
        raise ValueError(f"`output` ({output}) exists and is not an empty folder.")
    if not output.absolute().parent.is_dir():
        raise ValueError(f"`output` ({output}): its parent folder does not exist.")


class FolderWriter:
    """Writes files of weights into a folder, then the index of the files."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.files: dict[str, list[str]] = {}
        self.size = 0

    def write(self, file: str, tensors: dict[str, torch.Tensor]) -> None:
        save_file(tensors, self.folder / file, metadata={"format": "pt"})
        self.files[file] = list(tensors)
        self.size += sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())

    def finish(self) -> None:
        """Writes the index. A single file needs no index and is renamed to `model.safetensors`."""
        if len(self.files) == 1:
            (self.folder / next(iter(self.files))).rename(self.folder / "model.safetensors")
            return
        index = {name: file for file, names in self.files.items() for name in names}
        content = {"metadata": {"total_size": self.size}, "weight_map": index}
        (self.folder / INDEX).write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


def copy_side_files(source: Path, target: Path) -> None:
    """Copies the files of the tokenizer, the processor and the generation settings."""
    for path in side_files(source):
        shutil.copy(path, target / path.name)


def side_files(source: Path) -> list[Path]:
    """Returns the files that [`copy_side_files`] copies. Refuses links to files elsewhere, which it would publish."""
    files = []
    for path in sorted(source.iterdir()):
        if not path.is_file() or any(path.match(pattern) for pattern in NOT_COPIED):
            continue
        try:
            check_inside(source, path)
        except ValueError as error:
            raise ValueError(f"`source` ({source}): {error}") from error
        if not is_own_file(path):
            files.append(path)
    return files
