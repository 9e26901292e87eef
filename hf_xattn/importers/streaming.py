"""Safetensors folders, one tensor at a time, and an output that appears whole or not at all."""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file


INDEX = "model.safetensors.index.json"
# Weights and their index, the configuration, and what is never needed.
NOT_COPIED = ("*.safetensors", "*.index.json", "config.json", "*.bin", "*.pt", "*.pth", "*.md", ".*")


class Header(NamedTuple):
    """File and shape of a tensor."""

    file: str
    shape: tuple[int, ...]


def read_headers(folder: Path) -> dict[str, Header]:
    """Name, file and shape of every tensor of a folder. Reads no weights.

    Raises:
        ValueError: where a file is missing or truncated, or a tensor is not where the index says.
    """
    if (folder / INDEX).is_file():
        try:
            index = dict(json.loads((folder / INDEX).read_text())["weight_map"])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"`source` ({folder}): {INDEX} is damaged, it holds no `weight_map`.") from error
        files = sorted(set(index.values()))
        if strange := [file for file in files if Path(file).name != file]:
            raise ValueError(f"`source` ({folder}): {INDEX} names {strange[0]!r}, which is no file in the folder.")
    else:
        index, files = {}, sorted(path.name for path in folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"`source` ({folder}) holds no *.safetensors file.")
    headers: dict[str, Header] = {}
    for file in files:
        if not (folder / file).is_file():
            raise ValueError(f"`source` ({folder}) is not complete: {file} is missing.")
        try:
            with safe_open(folder / file, "pt") as opened:
                for name in opened.keys():
                    headers[name] = Header(file, tuple(opened.get_slice(name).get_shape()))
        except SafetensorError as error:
            raise ValueError(f"`source` ({folder}): {file} is truncated or no safetensors file ({error}).") from error
    if lost := [name for name, file in index.items() if name not in headers or headers[name].file != file]:
        raise ValueError(f"`source` ({folder}) is not complete: the index names {lost[0]}, which is not in its file.")
    return headers


def read_tensors(folder: Path, headers: dict[str, Header]) -> Iterator[tuple[str, Iterator[tuple[str, torch.Tensor]]]]:
    """The tensors of each file, read when they are asked for."""

    def tensors(file: str) -> Iterator[tuple[str, torch.Tensor]]:
        with safe_open(folder / file, "pt") as opened:
            for name, header in headers.items():
                if header.file == file:
                    yield name, opened.get_tensor(name)

    for file in sorted({header.file for header in headers.values()}):
        yield file, tensors(file)


class FolderTensors(Mapping[str, torch.Tensor]):
    """The tensors of a folder by name, each read when it is asked for."""

    def __init__(self, folder: Path, headers: dict[str, Header]):
        self.folder, self.headers = folder, headers

    def __getitem__(self, name: str) -> torch.Tensor:
        with safe_open(self.folder / self.headers[name].file, "pt") as opened:
            return opened.get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.headers)

    def __len__(self) -> int:
        return len(self.headers)


def check_folder(output: str | Path) -> None:
    """Raises a `ValueError` where a folder cannot be made, or is not empty."""
    output = Path(output)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ValueError(f"`output` ({output}) exists and is not an empty folder.")
    if not output.absolute().parent.is_dir():
        raise ValueError(f"`output` ({output}): its parent folder does not exist.")


@contextlib.contextmanager
def whole_folder(output: str | Path) -> Iterator[Path]:
    """A hidden folder beside `output`, which takes its name at the end; after an error nothing is left."""
    output = Path(output).absolute()
    folder = Path(tempfile.mkdtemp(prefix=f".{output.name}-", dir=output.parent))
    try:
        yield folder
        folder.chmod(0o755)
        if output.exists():
            output.rmdir()
        folder.rename(output)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


class FolderWriter:
    """Writes files of weights into a folder, and at the end their index."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.files: dict[str, list[str]] = {}
        self.size = 0

    def write(self, file: str, tensors: dict[str, torch.Tensor]) -> None:
        """One file of weights."""
        save_file(tensors, self.folder / file, metadata={"format": "pt"})
        self.files[file] = list(tensors)
        self.size += sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())

    def finish(self) -> None:
        """The index, or the one file under the name that needs none."""
        if len(self.files) == 1:
            (self.folder / next(iter(self.files))).rename(self.folder / "model.safetensors")
            return
        index = {name: file for file, names in self.files.items() for name in names}
        content = {"metadata": {"total_size": self.size}, "weight_map": index}
        (self.folder / INDEX).write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


def copy_side_files(source: Path, target: Path) -> None:
    """Tokenizer, processor and generation settings."""
    for path in sorted(source.iterdir()):
        if path.is_file() and not any(path.match(pattern) for pattern in NOT_COPIED):
            shutil.copy(path, target / path.name)
