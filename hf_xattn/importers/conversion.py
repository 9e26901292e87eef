"""Helpers for conversions of checkpoints: recipes, and reading and writing of folders with safetensors files.

A recipe converts one family of checkpoints. It holds the new configuration, and says which parameter each tensor of the
source becomes.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub import snapshot_download
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from ..checkpoints.folders import PEFT_CONFIG, check_config_file
from ..configuration_xattn import CrossAttentionConfig, XAttnConfig
from ..decoders.block_stack import blocks_at
from ..decoders.insertion import BLOCKS
from ..utils.checkpoint_files import INDEX, Stored, check_inside, weight_files
from ..utils.checkpoint_files import read_headers as checked_headers
from ..utils.config_checks import check_layer_count
from ..utils.stub import is_own_file
from ..utils.whole_folder import is_free, refuse_unfinished


# Fields that are copied to the configuration of a Llama decoder.
LLAMA_FIELDS = """
    vocab_size hidden_size hidden_act num_attention_heads intermediate_size rope_parameters rms_norm_eps
    max_position_embeddings initializer_range use_cache tie_word_embeddings bos_token_id eos_token_id pad_token_id
    """.split()
# Files of the source that are not copied: those that are written anew (weights, index, configuration), and those that
# are not needed.
NOT_COPIED = ("*.safetensors", "*.index.json", "config.json", "*.bin", "*.pt", "*.pth", "*.md", ".*")


class Target(NamedTuple):
    """The parameter of [`XAttnForConditionalGeneration`] that gets a tensor of the source, or some of its rows."""

    name: str
    rows: slice = slice(None)


class Recipe(NamedTuple):
    """How to convert one checkpoint.

    `targets` maps the name of a tensor of the source to its targets, in the order of the rows that each target gets.
    It returns an empty list for a tensor that is not needed, and None for a name that the family does not have.
    """

    config: XAttnConfig
    targets: Callable[[str], list[Target] | None]


def block_config(text: PreTrainedConfig, **options: Any) -> CrossAttentionConfig:
    """Returns the configuration of trained blocks with the sizes of the decoder's own layers.

    Args:
        text: the configuration of the decoder.
        options: further fields of the new configuration.
    """
    return CrossAttentionConfig(
        hidden_size=text.hidden_size,
        num_attention_heads=text.num_attention_heads,
        head_dim=text.hidden_size // text.num_attention_heads,
        intermediate_size=text.intermediate_size,
        hidden_act=text.hidden_act,
        norm_eps=text.rms_norm_eps,
        qk_norm_eps=text.rms_norm_eps,
        attention_dropout=text.dropout,
        gate_init=0.0,
        zero_init=False,
        initializer_range=text.initializer_range,
        **options,
    )


def renamed(name: str, rules: list[tuple[str, str]]) -> str | None:
    """Applies the first rule (pattern, replacement) that matches the whole name. None if no rule matches."""
    matches = ((re.fullmatch(pattern, name), replacement) for pattern, replacement in rules)
    return next((match.expand(replacement) for match, replacement in matches if match is not None), None)


def block_names(layers: str, places: list[int], num_layers: int) -> list[str]:
    """Returns the name of each block. `places` are the `cross_attention_layers` of the configuration. A place of
    `num_layers` means behind the last layer.
    """
    before, after = BLOCKS
    names = []
    for index, place in enumerate(places):
        name = f"{layers}.{place}.{before}" if place < num_layers else f"{layers}.{num_layers - 1}.{after}"
        here = blocks_at(places, place)
        names.append(name if len(here) == 1 else f"{name}.{here.index(index)}")
    return names


def check_names(what: str, found: Iterable[str], expected: Iterable[str]) -> None:
    """Raises a `ValueError` for tensors that have no place, and for tensors that are missing. `what` holds them."""
    given, wanted = set(found), set(expected)
    for names, problem in (
        (given - wanted, "holds tensors that the model does not have:"),
        (wanted - given, "is not complete: no tensor for"),
    ):
        if names:
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            raise ValueError(f"{what} {problem} {', '.join(sorted(names)[:5])}{more}.")


def check_shape(what: str, name: str, shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
    """Raises a `ValueError` if shapes differ in more than axes of size 1."""
    if [size for size in shape if size != 1] != [size for size in expected if size != 1]:
        raise ValueError(f"{what} does not fit its configuration: expected shape {expected} for {name}, got {shape}.")


def shapes_of(model: PreTrainedModel) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the tensors in a checkpoint of this model, by name."""
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items() if name not in tied}


def folder_of(source: str | Path) -> Path:
    """Returns the folder of a source. A Hub id is downloaded."""
    folder = Path(source)
    if folder.is_dir():
        if (folder / PEFT_CONFIG).is_file():
            raise ValueError(
                f"`source` ({folder}) holds an adapter of PEFT ({PEFT_CONFIG}), whose weights would be left out. Merge "
                "it first (`merge_and_unload()`), and save the model."
            )
        return folder
    return Path(snapshot_download(str(source), ignore_patterns=["*.bin", "*.pth", "*.pt", "original/*"]))


def config_of(folder: Path, headers: dict[str, Stored]) -> PreTrainedConfig:
    """Returns the configuration in a folder, after a check of its fields and its number of layers."""
    check_layer_count(check_config_file(folder, {}), len(headers), f"{folder / 'config.json'}")
    return AutoConfig.from_pretrained(folder)


def read_headers(folder: Path) -> dict[str, Stored]:
    """Returns the file, the shape and the dtype of every tensor in a folder, by name.

    Raises:
        ValueError: if a file is missing, truncated or outside of the folder.
    """
    refuse_unfinished(folder)
    files, index = weight_files(folder)
    files = files or sorted(folder.glob("*.safetensors"))
    for file in files:
        check_inside(folder, file)
    if not files:
        raise ValueError(f"`source` ({folder}) holds no *.safetensors file.")
    return checked_headers(files, index, f"`source` ({folder})")


def read_tensor(folder: Path, headers: dict[str, Stored], name: str) -> torch.Tensor:
    with safe_open(folder / headers[name].file, "pt") as opened:
        return opened.get_tensor(name)


def check_folder(output: str | Path) -> None:
    """Raises a `ValueError` if `output` is a file, or a folder that is not empty."""
    if not is_free(Path(output)):
        raise ValueError(f"`output` ({output}) exists and is not an empty folder. Choose a new folder.")


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
    """Returns the files that [`copy_side_files`] copies.

    Raises:
        ValueError: for a link to a file elsewhere, whose content the copy would publish.
    """
    files = []
    for path in sorted(source.iterdir()):
        if not path.is_file() or any(path.match(pattern) for pattern in NOT_COPIED):
            continue
        check_inside(source, path)
        if not is_own_file(path):
            files.append(path)
    return files
