"""Reads the head of a GGUF file with the library `gguf`, within bounds that the file sets.

The library and transformers believe the head: an array of 2^40 numbers is read number by number, 10^9 layers are built,
and a tensor is taken from where its offset points. So bounds come first, and the tensors must follow each other without
gaps, as llama.cpp wants it: a changed offset would give the weights of one tensor to another.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from gguf import GGUFReader

from ..utils.checkpoint_files import Stored, short


MOST_READS = 2**22  # a vocabulary of 2^18 tokens, with scores, types and twice as many merges, takes half of it
MOST_STRING = 2**24  # bytes
FEW_LAYERS = 16


class GgufHead(NamedTuple):
    """What a file says of itself: its tensors by name, and of how many files it is one."""

    tensors: dict[str, Stored]
    parts: int


class _BoundedReader(GGUFReader):
    """The library's reader, which stops where a count leads out of the file or asks for more than any model has."""

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
        length, text = super()._get_str(offset)
        if len(text) > MOST_STRING:
            raise ValueError(f"a text in its head has {len(text)} bytes, and {MOST_STRING} are allowed")
        return length, text


def read_gguf_head(path: Path) -> GgufHead:
    """Reads all of a file but the values of its tensors. Raises whatever the library raises for a damaged file."""
    reader = _BoundedReader(path)
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
    return GgufHead(tensors, parts)


def _number(reader: GGUFReader, ending: str, default: int) -> int:
    """The largest setting whose name ends so."""
    found = [int(field.parts[-1][0]) for name, field in reader.fields.items() if name.endswith(ending)]
    return max(found, default=default)
