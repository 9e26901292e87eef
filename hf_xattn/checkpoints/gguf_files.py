"""Loads text models from GGUF files. One such file holds configuration, weights, tokenizer and chat template.

transformers reads such a file with `from_pretrained(folder, gguf_file=name)`. Here the path of the file is enough. The
weights are unpacked, so the result is an ordinary model, which trains, saves, and can be compared with others.
"""

from __future__ import annotations

import copy
import functools
import math
import os
import re
import struct
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeGuard, TypeVar

from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils import cached_file

from ..utils.architectures import text_num_hidden_layers
from ..utils.checkpoint_files import Stored, short
from ..utils.config_checks import check_layer_count
from ..utils.keywords import FILE_KEYWORDS, given
from .folders import check_size


SUFFIX, MAGIC = ".gguf", b"GGUF"
# The types of numbers in a file, with their codes in the module `struct`.
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
TEXT, ARRAY = 8, 9
MOST_VALUES = 2**21  # a vocabulary of 2^18 tokens, with scores, types and twice as many merges, takes half of it
MOST_STRING = 2**24  # bytes


Source = TypeVar("Source")


def is_gguf_path(source: object) -> TypeGuard[str | os.PathLike[str]]:
    """Whether a source is a path that ends in `.gguf`, and no folder."""
    return (
        isinstance(source, (str, os.PathLike))
        and os.fspath(source).lower().endswith(SUFFIX)
        and not os.path.isdir(source)
    )


def split_gguf(name: str, source: Source, load_kwargs: dict[str, Any]) -> tuple[Source | str, dict[str, Any]]:
    """Turns the path of a GGUF file into a folder and `gguf_file`, as transformers takes them.

    Args:
        name (`str`): name of the argument that holds the source, for messages.
        source: a path, a Hub id or a loaded model.
        load_kwargs (`dict`): keyword arguments of `from_pretrained`. They are not changed.

    Returns:
        the folder or Hub id, and the keyword arguments, with `gguf_file` if the source is a GGUF file.

    Raises:
        ValueError: for a `gguf_file` beside a loaded model.
    """
    file = load_kwargs.get("gguf_file")
    if file is not None:
        if isinstance(source, PreTrainedModel):
            raise ValueError(
                f"`gguf_file` ({file}) is for a file to load, but `{name}` is loaded already. Leave it out."
            )
        return source, {**load_kwargs, "gguf_file": os.fspath(file)}
    if not is_gguf_path(source):
        return source, {key: value for key, value in load_kwargs.items() if key != "gguf_file"}
    folder, file = os.path.split(os.path.abspath(source))
    return folder, {**{key: value for key, value in load_kwargs.items() if key != "subfolder"}, "gguf_file": file}


def gguf_path(source: str | Path, load_kwargs: dict[str, Any]) -> Path:
    """Returns the path of a GGUF file, which is downloaded if necessary. The arguments are what [`split_gguf`]
    returns.
    """
    if os.path.isdir(source):
        path = Path(source, load_kwargs.get("subfolder") or "", load_kwargs["gguf_file"])
    else:
        path = Path(str(cached_file(source, load_kwargs["gguf_file"], **given(FILE_KEYWORDS, load_kwargs))))
    return path.absolute()


def gguf_config(path: Path) -> PreTrainedConfig:
    """Reads the configuration in a GGUF file.

    transformers takes seconds for this, because it also reads the vocabulary. So the last result is kept.

    Raises:
        ValueError: for a file with a damaged header, or with more layers than tensors.
    """
    head = _read_head(*_version_of(path))
    config = copy.deepcopy(_read_config(*_version_of(path)))
    # Without this check, a damaged file with thousands of layers would take minutes: a model is built before loading
    # finds that weights are missing.
    check_layer_count({"num_layers": text_num_hidden_layers(config)}, len(head.tensors), str(path))
    return config


def load_gguf(source: str | Path, config: PreTrainedConfig, load_kwargs: dict[str, Any]) -> PreTrainedModel:
    """Loads the text model in a GGUF file. `source` and `load_kwargs` are what [`split_gguf`] returns.

    Without a `quantization_config` the weights are unpacked. transformers would mark such a model as quantized, and a
    model with that mark cannot be saved. So the mark is removed.

    Raises:
        ValueError: for a file that lacks weights, or that holds something that transformers does not read.
    """
    from transformers import GgufConfig

    path = gguf_path(source, load_kwargs)
    head = _read_head(*_version_of(path))
    # The whole path is passed, because transformers looks for a bare name in the current folder first.
    options = {**load_kwargs, "gguf_file": str(path), "config": config, "output_loading_info": True}
    if options.get("quantization_config") is None:
        options["quantization_config"] = GgufConfig(dequantize=True)
    check_size(AutoModelForCausalLM, config, head.tensors, False, str(path))
    loaded: Any = AutoModelForCausalLM.from_pretrained(source, **options)
    model, found = loaded
    if missing := sorted(found["missing_keys"]):
        raise ValueError(
            f"{path} holds no whole model: {len(missing)} weights are missing ({', '.join(missing[:3])}). It may be an "
            "adapter, a vocabulary, or one of several parts, which `llama-gguf-split --merge` puts together."
        )
    _check_all_read(path, model, head)
    model._gguf_file = load_kwargs["gguf_file"]
    return model


def _check_all_read(path: Path, model: PreTrainedModel, head: GgufHead) -> None:
    """Raises a `ValueError` if transformers leaves something in a file out, so that the model would compute something
    else than the file says.
    """
    rope = getattr(model.config, "rope_parameters", None) or {}
    if head.rope_scaling != "none" and rope.get("rope_type", "default") == "default":
        raise ValueError(
            f"{path} scales its rotary positions ({head.rope_scaling}), which transformers does not read from a GGUF "
            "file. Use the model's safetensors."
        )
    # The numbers of values are compared, not the tensors: a class may join several biases in one tensor.
    biases = {name: stored.numel for name, stored in head.tensors.items() if name.endswith(".bias")}
    read = sum(tensor.numel() for name, tensor in model.state_dict().items() if name.endswith("bias"))
    if sum(biases.values()) > read:
        kinds = sorted({re.sub(r"^blk\.\d+", "blk.*", name) for name in biases})
        raise ValueError(
            f"{path} holds {len(biases)} biases ({', '.join(kinds)}) with {sum(biases.values())} values, and "
            f"transformers' {type(model).__name__} reads {read} of them from a GGUF file. Use the model's safetensors."
        )


def gguf_file_of(model: PreTrainedModel) -> str | None:
    """Returns the name of the GGUF file that a model was loaded from, as it was passed. None for other models."""
    quantization: Any = getattr(getattr(model, "hf_quantizer", None), "quantization_config", None)
    return getattr(model, "_gguf_file", None) or getattr(quantization, "gguf_file", None)


def _version_of(path: Path) -> tuple[Path, int, int]:
    """Returns the path of a file, its size and its time, as a key for a cache of what was read from it."""
    facts = path.stat()
    return path.absolute(), facts.st_size, facts.st_mtime_ns


@functools.lru_cache(maxsize=1)
def _read_config(path: Path, size: int, time: int) -> PreTrainedConfig:
    return AutoConfig.from_pretrained(path.parent, gguf_file=path.name)


class GgufHead(NamedTuple):
    """The header of a file: its tensors by name, and the kind of scaling of its rotary positions (`"none"`)."""

    tensors: dict[str, Stored]
    rope_scaling: str


class _Fields:
    """Reads the header of a file (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md) and checks its numbers.

    This happens before the library `gguf` and transformers read the file, because these would believe an array of 2^40
    numbers, or a model of 10^9 layers.
    """

    def __init__(self, file: BinaryIO, size: int):
        self.file, self.size, self.left = file, size, MOST_VALUES

    def bytes(self, count: int) -> bytes:
        if count > min(MOST_STRING, self.size - self.file.tell()):
            raise ValueError(f"its head asks for {short(count)} bytes, which the file does not have")
        return self.file.read(count)

    def number(self, kind: str = "Q") -> Any:
        return struct.unpack(f"<{kind}", self.bytes(struct.calcsize(kind)))[0]

    def value(self, kind: int = TEXT) -> Any:
        """Reads a text or a number. Of an array, it returns the last value."""
        if kind != ARRAY:
            return self.bytes(self.number()).decode() if kind == TEXT else self.number(NUMBERS[kind])
        kind, count = self.number("I"), self.number()
        self.left -= count
        if self.left < 0:
            raise ValueError(f"its head has more than {MOST_VALUES} values")
        return [self.value(kind) for _ in range(count)][-1:]


@functools.lru_cache(maxsize=1)
def _read_head(path: Path, size: int, time: int) -> GgufHead:
    """Reads a file without the values of its tensors. Raises a `ValueError` for a damaged file.

    As in llama.cpp, the tensors must follow each other without gaps. Otherwise a changed offset could give the weights
    of one tensor to another.
    """
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    tensors: dict[str, Stored] = {}
    expected = 0
    try:
        with open(path, "rb") as file:
            fields = _Fields(file, size)
            if (start := fields.bytes(len(MAGIC))) != MAGIC:
                raise ValueError(f"it starts with {start!r} instead of {MAGIC!r}")
            _, num_tensors, num_settings = fields.number("I"), fields.number(), fields.number()
            settings = {fields.value(): fields.value(fields.number("I")) for _ in range(num_settings)}
            alignment = settings.get("general.alignment", 32)
            for _ in range(num_tensors):
                name, shape = fields.value(), [fields.number() for _ in range(fields.number("I"))]
                per_block, num_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(fields.number("I"))]
                if (offset := fields.number()) != expected:
                    raise ValueError(f"its tensor {short(name)} begins at byte {offset} of the data, not at {expected}")
                expected += -(-(math.prod(shape) // per_block * num_bytes) // alignment) * alignment
                tensors[name] = Stored(path.name, tuple(reversed(shape)))
    except (ValueError, KeyError, struct.error) as error:
        raise ValueError(f"{path} is no GGUF file, or cut off: {error}. Download it again.") from error
    scaling = next((name for name in tensors if name.startswith(("rope_freqs", "rope_factors"))), "none")
    types = (value for name, value in settings.items() if name.endswith(".rope.scaling.type"))
    return GgufHead(tensors, next(types, scaling))
