"""What `from_pretrained` and `retrofit` check of a checkpoint, before it takes endless work or memory."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedConfig

from ..utils.checkpoint_files import (
    PICKLED,
    SHARDS_OF_RANKS,
    SIDE_FILES,
    Stored,
    check_inside,
    check_name,
    check_weights,
    read_headers,
    read_headers_of_ranks,
    read_json,
    refuse_pickled,
    short,
    weight_files,
)
from ..utils.config_checks import check_against_weights, check_fields, check_layer_count, is_quantized
from ..utils.first_values import ValuesComeLater, incomplete
from ..utils.transformers_api import has, needs
from ..utils.whole_folder import refuse_unfinished
from .adapter_files import MANIFEST
from .saved_names import pieces_missing


class CheckedFolder(NamedTuple):
    """What was read of a folder."""

    fields: dict[str, Any]  # its config.json; empty if there is none
    headers: dict[str, Stored]  # its weights; empty if it has none


def refuse_pickles(load_kwargs: dict[str, Any]) -> None:
    """Raises a `ValueError` for a caller who asks for pickled weights."""
    if load_kwargs.get("use_safetensors") is False:
        raise ValueError(
            "`use_safetensors=False` would read pickled weights, which can run code. Only safetensors are supported."
        )


def check_config_file(source: Any, load_kwargs: dict[str, Any]) -> dict[str, Any]:
    """Checks the JSON files in a folder, and returns config.json; empty if there is none, or for a Hub id.

    Raises a `ValueError` for a file that is damaged or leads out of the folder, and for fields that no model has.
    """
    if not isinstance(source, (str, os.PathLike)) or not os.path.isdir(source):
        return {}
    folder = Path(source) / (load_kwargs.get("subfolder") or "")
    for name in SIDE_FILES:
        if (folder / name).is_file():
            check_inside(folder, folder / name)
            read_json(folder / name)
    config = folder / "config.json"
    if not config.is_file():
        return {}
    check_inside(folder, config)
    fields = read_json(config)
    check_fields(fields, str(config))
    return fields


def check_folder(source: Any, load_kwargs: dict[str, Any]) -> CheckedFolder | None:
    """Checks a checkpoint in a folder. None for a Hub id: [`check_shapes`] checks its files when they are fetched.

    Raises a `ValueError` as [`check_config_file`], for a save that was cut off, and for damaged or pickled weights.
    """
    if not isinstance(source, (str, os.PathLike)) or not os.path.isdir(source):
        return None
    folder = Path(source, load_kwargs.get("subfolder") or "")
    refuse_unfinished(folder)
    fields = check_config_file(source, load_kwargs)
    if load_kwargs.get("state_dict") is not None or load_kwargs.get("gguf_file") is not None:
        return CheckedFolder(fields, {})
    files, index = weight_files(folder, load_kwargs.get("variant"), fields.get("transformers_weights"))
    if not files:
        is_adapter = (folder / MANIFEST).is_file()  # beside its weights, a trainer's files are no weights
        if fields and not is_adapter and any(path.is_file() for pattern in PICKLED for path in folder.glob(pattern)):
            refuse_pickled(folder, str(folder))
        return CheckedFolder(fields, {})
    of_ranks = files[0].match(SHARDS_OF_RANKS)
    if of_ranks and not has("parts of ranks"):
        raise ValueError(needs("parts of ranks", f"A checkpoint that several ranks wrote together, as {folder},"))
    headers = read_headers_of_ranks(files, str(folder)) if of_ranks else read_headers(files, index, where=str(folder))
    check_weights(headers, is_quantized(fields), str(folder))
    check_layer_count(fields, len(headers), f"{folder / 'config.json'}")
    return CheckedFolder(fields, headers)


def check_size(
    model_class: Any, config: PreTrainedConfig, headers: dict[str, Stored], quantized: bool, what: str
) -> None:
    """Checks, before it is built, that a model is not far larger than its weights. See `check_against_weights`.

    `model_class` may be an Auto class. A model that cannot be built passes: loading it says why.
    """
    build = getattr(model_class, "from_config", None) or model_class._from_config
    try:
        with torch.device("meta"), ValuesComeLater():
            model = build(copy.deepcopy(config))
    except Exception:
        return
    check_against_weights(model, headers, quantized, what)


def check_shapes(model: nn.Module, state_dict: Any, checkpoint_files: Any, load_config: Any) -> None:
    """Checks a model without values against the weights that it is to get.

    Raises a `ValueError` for files that are damaged or no safetensors, for a weight of another shape or dtype, for a
    model that is far larger than its weights, and for a layer of which some experts are missing.
    """
    quantized = getattr(load_config, "hf_quantizer", None) is not None
    what = str(getattr(load_config, "pretrained_model_name_or_path", None) or "The checkpoint")
    if isinstance(state_dict, dict):
        headers = {
            name: Stored("", tuple(tensor.shape)) for name, tensor in state_dict.items() if hasattr(tensor, "shape")
        }
    elif checkpoint_files:
        refuse_other_files(checkpoint_files)
        metadata = getattr(load_config, "sharded_metadata", None) or {}
        index = metadata.get("weight_map") or {}
        for file in set(index.values()):
            check_name(file, f"{what}: the index of shards")
        headers = read_headers([Path(file) for file in checkpoint_files], index, where=what)
        check_weights(headers, quantized, what)
    else:
        return
    check_against_weights(model, headers, quantized, what)
    if quantized:
        return
    missing, unexpected = pieces_missing(model, headers.keys())
    if missing:
        raise ValueError(incomplete(what, missing, unexpected))
    if not getattr(load_config, "ignore_mismatched_sizes", False):
        _check_each(model, headers, load_config, what)


def refuse_other_files(checkpoint_files: Any) -> None:
    """Raises a `ValueError` for weights that are no safetensors files, as transformers finds them on the Hub."""
    for file in checkpoint_files or ():
        if not str(file).endswith(".safetensors"):
            raise ValueError(
                f"Expected weights in safetensors files, got {file}. Pickled weights can run code, and are not read."
            )


def _check_each(model: nn.Module, headers: dict[str, Stored], load_config: Any, what: str) -> None:
    rules = getattr(load_config, "weight_mapping", None) or ()
    converted = any(hasattr(rule, "operations") for rule in rules)  # names alone change otherwise
    own = model.state_dict(keep_vars=True)
    for name, stored in headers.items():
        target = own.get(name)
        if not isinstance(target, torch.Tensor) or tuple(target.shape) == stored.shape:
            continue
        if not converted or stored.numel > target.numel():
            raise ValueError(
                f"{what} holds {short(name)} of shape {stored.shape}: expected {tuple(target.shape)}, as its "
                "configuration says. Pass `ignore_mismatched_sizes=True` to start this weight anew."
            )
