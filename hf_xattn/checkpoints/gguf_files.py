"""GGUF files as sources of text models: one file holds configuration, weights, tokenizer and chat template.

transformers reads such a file with `from_pretrained(folder, gguf_file=name)`. Here a path to the file is enough, and
its weights are unpacked: the model is an ordinary one, so it trains, saves, and compares with others.
"""

from __future__ import annotations

import copy
import functools
import os
import re
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils import cached_file
from transformers.utils.import_utils import is_gguf_available

from ..utils.checkpoint_files import Stored, short
from ..utils.config_checks import check_fields
from ..utils.keywords import FILE_KEYWORDS, given
from ..utils.tensor_checks import type_name
from .folders import check_size


SUFFIX, MAGIC = ".gguf", b"GGUF"
KINDS = "a folder, a GGUF file or a Hub id"  # of text models
CUT_OFF = "If the file is cut off, download it again."
MOST_READS = 2**22  # a vocabulary of 2^18 tokens, with scores, types and twice as many merges, takes half of it
MOST_STRING = 2**24  # bytes
FEW_LAYERS = 16


def is_gguf_path(source: Any) -> bool:
    """Whether a source is a path that ends in `.gguf`. A folder is none."""
    return (
        isinstance(source, (str, os.PathLike))
        and os.fspath(source).lower().endswith(SUFFIX)
        and not os.path.isdir(source)
    )


def split_gguf(name: str, source: Any, load_kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Turns the path of a GGUF file into a folder and `gguf_file`, as transformers takes them.

    Args:
        name (`str`): the argument that the source came in.
        load_kwargs (`dict`): keyword arguments of `from_pretrained`. Not changed.

    Raises:
        TypeError: for a `gguf_file` that is no name.
        ValueError: for a `gguf_file` beside a path of a GGUF file, or beside a loaded model.
    """
    file = load_kwargs.get("gguf_file")
    if file is None:
        load_kwargs = {key: value for key, value in load_kwargs.items() if key != "gguf_file"}
        if not is_gguf_path(source):
            return source, load_kwargs
        folder, file = os.path.split(os.path.abspath(source))
        load_kwargs.pop("subfolder", None)
        return folder, {**load_kwargs, "gguf_file": file}
    if not isinstance(file, (str, os.PathLike)):
        raise TypeError(f"Expected `gguf_file` to be the name of a file, got {type_name(file)}.")
    if isinstance(source, PreTrainedModel):
        raise ValueError(f"`gguf_file` ({file}) names a file to load, but `{name}` is loaded already.")
    if is_gguf_path(source):
        raise ValueError(
            f"`{name}` ({source}) and `gguf_file` ({file}) both name a GGUF file. Pass the path alone, or a folder or "
            "Hub id with `gguf_file`."
        )
    return source, {**load_kwargs, "gguf_file": os.fspath(file)}


def gguf_path(name: str, source: str | Path, load_kwargs: dict[str, Any]) -> Path:
    """Finds the GGUF file of a source, fetches it where it must be, and checks its head. Arguments: [`split_gguf`].

    Raises an error without the package `gguf`, and if there is no such file, or no whole GGUF file.
    """
    if os.path.isdir(source):
        path = Path(source, load_kwargs.get("subfolder") or "", load_kwargs["gguf_file"])
        if not path.is_file():
            raise ValueError(
                f"Expected `{name}` to be a GGUF file, got {str(path)!r}, where there is no file. For a file on the "
                "Hub pass the repository's id, and the file's name as `gguf_file=` (`--gguf-file`)."
            )
    elif isinstance(source, Path) or os.path.isabs(source):
        raise ValueError(f"Expected `{name}` to be a GGUF file, got one in {str(source)!r}, where there is no folder.")
    else:
        try:
            found: Any = cached_file(source, load_kwargs["gguf_file"], **given(FILE_KEYWORDS, load_kwargs))
        except OSError as error:
            raise OSError(f"`{name}`: {load_kwargs['gguf_file']} of {source} cannot be fetched: {error}") from error
        path = Path(found)
    _check_head(name, path)
    return path.absolute()


def _check_head(name: str, path: Path) -> None:
    with open(path, "rb") as file:
        start = file.read(len(MAGIC))
    if start != MAGIC:
        raise ValueError(
            f"Expected `{name}` to be a GGUF file, got {str(path)!r}, which starts with {start!r} instead of {MAGIC!r}."
        )
    if not is_gguf_available():
        raise ImportError(f"`{name}` ({path}) is a GGUF file, which is read with the package gguf: pip install gguf")
    try:
        parts = _read_head(*_version_of(path)).parts
    except Exception as error:  # whatever the library's reader stumbles over
        raise ValueError(f"`{name}` ({path}) cannot be read: {error}. {CUT_OFF}") from error
    if parts > 1:
        raise ValueError(
            f"`{name}` ({path}) is one of {parts} parts of a model. Put them together: `llama-gguf-split --merge`."
        )


def gguf_config(name: str, path: Path) -> PreTrainedConfig:
    """The configuration in a GGUF file. transformers takes seconds to read a vocabulary, so the last one is kept."""
    try:
        config = copy.deepcopy(_read_config(*_version_of(path)))
        check_fields(config.to_dict(), "its settings")
    except (OSError, ImportError, MemoryError):
        raise
    except Exception as error:  # whatever the configuration's class stumbles over
        raise ValueError(
            f"`{name}` ({path}) is a GGUF file that transformers cannot read: {error} {CUT_OFF} Otherwise use the "
            "model's safetensors."
        ) from error
    return config


def load_gguf(name: str, source: str | Path, config: PreTrainedConfig, load_kwargs: dict[str, Any]) -> PreTrainedModel:
    """Loads the causal language model in a GGUF file, with all of its weights. Arguments: [`split_gguf`].

    Without a `quantization_config` its weights are unpacked. transformers alone leaves the model marked as quantized,
    and such a model cannot be saved.
    """
    from transformers import GgufConfig

    path = gguf_path(name, source, load_kwargs)
    # The whole path: of a file's name, transformers would take the file in the current folder.
    options = {**load_kwargs, "gguf_file": str(path), "config": config, "output_loading_info": True}
    if options.get("quantization_config") is None:
        options["quantization_config"] = GgufConfig(dequantize=True)
    tensors = _read_head(*_version_of(path)).tensors
    check_size(AutoModelForCausalLM, config, tensors, False, f"`{name}` ({path})")
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(source, **options)
    except (OSError, ImportError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # tensors of other shapes, among others
        raise ValueError(f"`{name}` ({path}) cannot be loaded: {error} {CUT_OFF}") from error
    model, found = loaded
    if missing := sorted(found["missing_keys"]):
        raise ValueError(
            f"`{name}` ({path}) holds no whole model: {len(missing)} weights are missing ({', '.join(missing[:3])}). "
            "It may be an adapter or a vocabulary."
        )
    _check_all_read(f"`{name}` ({path})", model, _read_head(*_version_of(path)))
    model._gguf_file = load_kwargs["gguf_file"]
    return model


def _check_all_read(file: str, model: PreTrainedModel, head: GgufHead) -> None:
    """Raises a `ValueError` for what transformers leaves out of a file: the model would compute something else."""
    rope = getattr(model.config, "rope_parameters", None) or {}
    if head.rope_scaling != "none" and rope.get("rope_type", "default") == "default":
        raise ValueError(
            f"{file} scales its rotary positions ({head.rope_scaling}), which transformers does not read from a GGUF "
            "file. Use the model's safetensors."
        )
    # By their values: a class may join the biases of several tensors, and names differ.
    biases = {name: stored.numel for name, stored in head.tensors.items() if name.endswith(".bias")}
    read = sum(tensor.numel() for name, tensor in model.state_dict().items() if name.endswith("bias"))
    if sum(biases.values()) > read:
        kinds = sorted({re.sub(r"^blk\.\d+", "blk.*", name) for name in biases})
        raise ValueError(
            f"{file} holds {len(biases)} biases ({', '.join(kinds)}) with {sum(biases.values())} values, and "
            f"transformers' {type(model).__name__} reads {read} of them from a GGUF file. Use the model's safetensors."
        )


def gguf_file_of(model: PreTrainedModel) -> str | None:
    """Name of the GGUF file that a model was loaded from, as it was given; None for other models."""
    quantization: Any = getattr(getattr(model, "hf_quantizer", None), "quantization_config", None)
    return getattr(model, "_gguf_file", None) or getattr(quantization, "gguf_file", None)


def _version_of(path: Path) -> tuple[Path, int, int]:
    """A file, its size and its time: what was read of it holds until they change."""
    facts = path.stat()
    return path.absolute(), facts.st_size, facts.st_mtime_ns


@functools.lru_cache(maxsize=1)
def _read_config(path: Path, size: int, time: int) -> PreTrainedConfig:
    return AutoConfig.from_pretrained(path.parent, gguf_file=path.name)


class GgufHead(NamedTuple):
    """What a file says of itself: its tensors by name, and of how many files it is one."""

    tensors: dict[str, Stored]
    parts: int
    rope_scaling: str  # how rotary positions are scaled: "none", or what the file says


class _Bounded:
    """Part of the reader of the library `gguf`: stops where a head leads out of the file, or asks for endless reading.

    The library and transformers believe the head: an array of 2^40 numbers is read number by number, 10^9 layers are
    built, and a tensor is taken from where its offset points.
    """

    data: Any  # a memory map at first
    reads = 0

    def _get(self, offset: int, dtype: Any, count: Any = 1, *_: Any, **__: Any) -> Any:
        if self.reads == 0:
            self.data = np.asarray(self.data)  # a plain array is cut three times as fast as a memory map
        kind = np.dtype(dtype)
        end = int(offset) + int(count) * kind.itemsize
        if end > len(self.data):
            raise ValueError(f"its head asks for bytes up to {short(end)}, and the file has {len(self.data)}")
        self.reads += 1
        if self.reads > MOST_READS:
            raise ValueError(f"its head has more than {MOST_READS} values")
        return self.data[offset:end].view(kind)

    def _get_str(self, offset: int) -> Any:
        reader: Any = super()
        length, text = reader._get_str(offset)
        if len(text) > MOST_STRING:
            raise ValueError(f"a text in its head has {len(text)} bytes, and {MOST_STRING} are allowed")
        return length, text


@functools.lru_cache(maxsize=1)
def _read_head(path: Path, size: int, time: int) -> GgufHead:
    """Reads all of a file but the values of its tensors. Raises whatever the library raises for a damaged file.

    The tensors must follow each other without gaps, as llama.cpp wants it: a changed offset would give the weights of
    one tensor to another.
    """
    from gguf import GGUFReader

    reader: Any = type("BoundedReader", (_Bounded, GGUFReader), {})(path)
    tensors: dict[str, Stored] = {}
    expected = 0
    for tensor in reader.tensors:
        offset = int(tensor.field.parts[-1][0])
        if offset != expected:
            raise ValueError(f"its tensor {short(tensor.name)} begins at byte {offset} of the data, not at {expected}")
        expected = offset + -(-tensor.n_bytes // int(reader.alignment)) * int(reader.alignment)
        tensors[tensor.name] = Stored(path.name, tuple(reversed(tensor.shape.tolist())))
    parts, layers = _number(reader, "split.count", 1), _number(reader, ".block_count", 0)
    found = len({name.split(".")[1] for name in tensors if name.startswith("blk.")})
    if parts == 1 and layers > found + FEW_LAYERS:
        # Thousands of layers take minutes to build, even without values. If few are missing, loading names them.
        raise ValueError(f"it has {layers} layers, and tensors of {found}")
    scaling = next((name for name in tensors if name.startswith(("rope_freqs", "rope_factors"))), "none")
    for name, field in reader.fields.items():
        if name.endswith(".rope.scaling.type"):
            scaling = bytes(field.parts[field.data[-1]]).decode()
    return GgufHead(tensors, parts, scaling)


def _number(reader: Any, ending: str, default: int) -> int:
    """The largest setting whose name ends so."""
    found = [int(field.parts[-1][0]) for name, field in reader.fields.items() if name.endswith(ending)]
    return max(found, default=default)
