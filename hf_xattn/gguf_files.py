"""GGUF files as sources of text models: one file holds configuration, weights, tokenizer and chat template.

transformers reads such a file with `from_pretrained(folder, gguf_file=name)`. Its weights are unpacked here, so the model is an ordinary
one: it trains, it can be saved, and its weights can be compared.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

from transformers import GgufConfig
from transformers.integrations.gguf import GGUF_CONFIG_ARCHS, is_gguf_arch_supported, read_gguf_metadata
from transformers.utils.import_utils import is_gguf_available


SUFFIX = ".gguf"
MAGIC = b"GGUF"


class GgufFile(NamedTuple):
    """A GGUF file, in the two arguments of `from_pretrained`.

    Attributes:
        folder (`str`): the folder, or a Hub id.
        name (`str`): the file in it, transformers' `gguf_file`.
    """

    folder: str
    name: str


def is_gguf_path(source: Any) -> bool:
    """Whether a source is a path that ends in `.gguf`. A folder is none."""
    return (
        isinstance(source, (str, os.PathLike))
        and os.fspath(source).lower().endswith(SUFFIX)
        and not os.path.isdir(source)
    )


def gguf_file_of(name: str, path: str | os.PathLike[str]) -> GgufFile:
    """Splits a path into folder and file, after a look at the file.

    Args:
        name (`str`): the argument that the path came in.
        path (`str`): path of a file.

    Raises:
        ImportError: if transformers needs the package `gguf` for this file.
        ValueError: if there is no such file, or no whole GGUF file.
    """
    check_gguf_file(name, Path(path))
    folder, file = os.path.split(os.path.abspath(path))
    return GgufFile(folder, file)


def check_gguf_file(name: str, path: Path) -> None:
    """Looks at the head of a GGUF file. Arguments and errors are those of [`gguf_file_of`]."""
    if not path.is_file():
        raise ValueError(
            f"Expected `{name}` to be a GGUF file, got {str(path)!r}, where there is no file. For a file in a repository of the "
            "Hub pass the repository's id and `gguf_file=`."
        )
    with open(path, "rb") as file:
        start = file.read(len(MAGIC))
    if start != MAGIC:
        raise ValueError(
            f"Expected `{name}` to be a GGUF file, got {str(path)!r}, which starts with {start!r} instead of {MAGIC!r}."
        )
    try:
        architecture = read_gguf_metadata(str(path))[0]["general.architecture"]
    except Exception as error:  # whatever the reader stumbles over
        raise ValueError(
            f"`{name}` ({path}) cannot be read as a GGUF file: {error} It may be cut off. Download it again."
        ) from error
    in_transformers = architecture in GGUF_CONFIG_ARCHS and is_gguf_arch_supported(architecture)
    if not in_transformers and not is_gguf_available():
        raise ImportError(
            f"`{name}` ({path}) is a GGUF file, and transformers reads it with the package gguf: pip install gguf"
        )


def unpacked() -> GgufConfig:
    """The quantizer's configuration that makes an ordinary model of a GGUF file.

    By default transformers keeps the weights packed where it has kernels for them. Even where it has unpacked them, it leaves the model
    marked as quantized, and such a model cannot be saved.
    """
    return GgufConfig(dequantize=True)
