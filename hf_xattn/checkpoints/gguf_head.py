"""Checks the head of a GGUF file against the size of the file, before transformers reads it.

transformers believes the head: it makes lists as long as an array says, as many layers as a number says, and takes the bytes of a tensor
from where an offset points. So a changed byte could ask for terabytes, or give the weights of one tensor to another. The layout is that of
ggml's `docs/gguf.md`; as in llama.cpp, tensors must follow each other without gaps.
"""

from __future__ import annotations

import mmap
import re
import struct
from math import prod
from pathlib import Path
from typing import Any

from ..utils.checkpoint_files import Stored, short
from ..utils.config_sizes import MAX_EXPERTS, MAX_LAYERS, MAX_POSITIONS, MAX_VOCABULARY, MAX_WIDTH


VERSIONS = (2, 3)
MOST_ENTRIES, MOST_KEY, MOST_STRING, MOST_ARRAY = 2**17, 2**16 - 1, 2**26, 2**24
FEW_LAYERS = 16
NUMBERS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
STRING, ARRAY = 8, 9
# Elements and bytes of a block. What is not in the table is not checked: transformers knows it or refuses it.
BLOCKS = {
    0: (1, 4), 1: (1, 2), 2: (32, 18), 3: (32, 20), 6: (32, 22), 7: (32, 24), 8: (32, 34), 10: (256, 84), 11: (256, 110), 12: (256, 144),
    13: (256, 176), 14: (256, 210), 15: (256, 292), 16: (256, 66), 17: (256, 74), 18: (256, 98), 19: (256, 50), 20: (32, 18), 21: (256, 110),
    22: (256, 82), 23: (256, 136), 24: (1, 1), 25: (1, 2), 26: (1, 4), 27: (1, 8), 28: (1, 8), 29: (256, 56), 30: (1, 2), 34: (256, 54),
    35: (256, 66), 39: (32, 17),
}  # fmt: skip
# Settings of the architecture, without its name; the first pattern that matches decides.
BOUNDS = (
    (re.compile(r"^block_count$"), 1, MAX_LAYERS),
    (re.compile(r"^embedding_length$"), 1, MAX_WIDTH),
    (re.compile(r"^vocab_size$"), 1, MAX_VOCABULARY),
    (re.compile(r"^expert_(used_)?count$"), 0, MAX_EXPERTS),
    (re.compile(r"^context_length$|window|original_context"), 0, MAX_POSITIONS),
    (re.compile(r"_length|head_count|dimension_|_size$|rank$"), 0, MAX_WIDTH),
)
TOKENS = "tokenizer.ggml.tokens"
OF_TOKENS = ("tokenizer.ggml.scores", "tokenizer.ggml.token_type")  # one value for each


class _Reader:
    """Reads numbers and strings one after another, and never beyond the end."""

    def __init__(self, data: mmap.mmap):
        self.data, self.place = data, 0

    def skip(self, count: int) -> int:
        """Returns the place of what is skipped."""
        begin = self.place
        if count > len(self.data) - begin:
            raise ValueError(
                f"its head asks for {short(count)} bytes at byte {begin}, and the file has {len(self.data)}"
            )
        self.place = begin + count
        return begin

    def number(self, kind: str) -> Any:
        return struct.unpack_from(kind, self.data, self.skip(struct.calcsize(kind)))[0]

    def string(self, most: int) -> str:
        length = self.number("<Q")
        if length > most:
            raise ValueError(f"a string in its head has {short(length)} bytes, and {most} are allowed")
        begin = self.skip(length)
        return self.data[begin : begin + length].decode("utf-8")

    def value(self) -> Any:
        """A number, a text, the numbers of an array, or how many strings an array has."""
        kind = self.number("<I")
        if kind in NUMBERS:
            return self.number(NUMBERS[kind])
        if kind == STRING:
            return self.string(MOST_STRING)
        if kind != ARRAY:
            raise ValueError(f"its head holds a value of type {kind}, which GGUF does not have")
        kind, count = self.number("<I"), self.number("<Q")
        if count > MOST_ARRAY:
            raise ValueError(f"an array in its head has {short(count)} values, and {MOST_ARRAY} are allowed")
        if kind in NUMBERS:
            each = NUMBERS[kind][1]
            begin = self.skip(count * struct.calcsize(f"<{each}"))
            return struct.unpack_from(f"<{count}{each}", self.data, begin)
        if kind != STRING:
            raise ValueError(f"its head holds an array of type {kind}, which is not read")
        for _ in range(count):
            self.skip(self.number("<Q"))
        return _Strings(count)


class _Strings(int):
    """The number of strings in an array, which are not read here."""


def read_gguf_head(path: Path) -> tuple[dict[str, Any], dict[str, Stored]]:
    """Returns the settings (of arrays of strings, their length) and the tensors of a GGUF file.

    Raises:
        ValueError: for a head that does not fit the file, contradicts itself, or names sizes that no model has. The message begins with
            a lower case letter: the caller names the file.
    """
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        reader = _Reader(data)
        reader.skip(4)  # the magic
        version, tensor_count, count = reader.number("<I"), reader.number("<Q"), reader.number("<Q")
        if version not in VERSIONS:
            raise ValueError(f"it is of version {version}, and versions {VERSIONS} are read")
        if max(tensor_count, count) > MOST_ENTRIES:
            raise ValueError(f"its head has {short(max(tensor_count, count))} entries, and {MOST_ENTRIES} are allowed")
        settings: dict[str, Any] = {}
        for _ in range(count):
            key = reader.string(MOST_KEY)
            if key in settings:
                raise ValueError(f"its head has two settings {short(key)}")
            settings[key] = reader.value()
        tensors = _tensors(reader, tensor_count, settings, path.name)
    _check_settings(settings)
    _check_layers(settings, tensors)
    _check_vocabulary(settings, tensors)
    return settings, tensors


def _tensors(reader: _Reader, count: int, settings: dict[str, Any], file: str) -> dict[str, Stored]:
    alignment = settings.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment not in [2**power for power in range(3, 17)]:
        raise ValueError(
            f"its `general.alignment` is {short(alignment)}, and powers of two from 8 to 65536 are allowed"
        )
    tensors: dict[str, Stored] = {}
    expected: int | None = 0  # None behind a tensor of unknown size
    last = 0
    for _ in range(count):
        name = reader.string(MOST_KEY)
        axes = reader.number("<I")
        if not 1 <= axes <= 4 or name in tensors:
            raise ValueError(f"its tensor {short(name)} has {axes} axes, or comes twice")
        shape = tuple(reversed([reader.number("<Q") for _ in range(axes)]))
        kind, offset = reader.number("<I"), reader.number("<Q")
        elements, size = BLOCKS.get(kind, (1, 0))
        if not all(shape) or prod(shape) >= 2**63 or shape[-1] % elements:
            raise ValueError(f"its tensor {short(name)} has the shape {short(shape)}")
        if offset != expected if expected is not None else offset < last or offset % alignment:
            raise ValueError(
                f"its tensor {short(name)} begins at byte {short(offset)} of the data, not behind the last one"
            )
        last = offset + prod(shape) // elements * size
        expected = -(-last // alignment) * alignment if kind in BLOCKS else None
        tensors[name] = Stored(file, shape)
    begin = -(-reader.place // alignment) * alignment
    if begin + last > len(reader.data):
        raise ValueError(f"its tensors end at byte {short(begin + last)}, and the file has {len(reader.data)}")
    return tensors


def _check_settings(settings: dict[str, Any]) -> None:
    architecture = settings.get("general.architecture")
    if not isinstance(architecture, str):
        raise ValueError(f"its `general.architecture` is {short(architecture)}, and a name is expected")
    for key, value in settings.items():
        name = key.removeprefix(f"{architecture}.")
        bound = None if name == key else next((bound for bound in BOUNDS if bound[0].search(name)), None)
        for each in value if isinstance(value, tuple) else (value,):
            if isinstance(each, float) and each != each and not key.startswith("tokenizer."):
                raise ValueError(f"its `{short(key)}` is not a number")
            if bound is not None and (not isinstance(each, int) or not bound[1] <= each <= bound[2]):
                raise ValueError(f"its `{short(key)}` is {short(each)}, and {bound[1]} to {bound[2]} are allowed")


def _check_layers(settings: dict[str, Any], tensors: dict[str, Stored]) -> None:
    """A model of many layers takes minutes to build, even without values. Where few are missing, loading names their weights."""
    count = settings.get(f"{settings['general.architecture']}.block_count")
    layers = {name.split(".")[1] for name in tensors if name.startswith("blk.")}
    parts = settings.get("split.count", 1)
    if isinstance(count, int) and count > len(layers) + FEW_LAYERS and parts == 1:
        raise ValueError(f"it has {count} layers, and tensors of {len(layers)}")


def _check_vocabulary(settings: dict[str, Any], tensors: dict[str, Stored]) -> None:
    tokens = settings.get(TOKENS)
    if tokens is None:
        return
    if not isinstance(tokens, _Strings):
        raise ValueError(f"its `{TOKENS}` is {short(tokens)}, and a list of strings is expected")
    for name in OF_TOKENS:
        if name in settings and (not isinstance(settings[name], tuple) or len(settings[name]) != tokens):
            raise ValueError(f"its `{name}` does not have one number for each of its {tokens} tokens")
    embedding = tensors.get("token_embd.weight")
    if embedding is not None and embedding.shape[0] < tokens:
        raise ValueError(f"it has {tokens} tokens, and embeddings of {embedding.shape[0]}")


__all__ = ["read_gguf_head"]
