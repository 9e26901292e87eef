"""Checks a configuration that came from a file, before anything is built from it.

transformers keeps any key and builds any size: 10^9 layers never return, 10^12 tokens ask for the memory, and a key
`to_dict` replaces the method. The bounds here are far above every published model. They keep the time and the
arithmetic finite. The weights bound the memory: see `check_against_weights`.
"""

from __future__ import annotations

import math
import re
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from .checkpoint_files import Stored, short


MAX_LAYERS, MAX_EXPERTS, MAX_VOCABULARY, MAX_POSITIONS, MAX_WIDTH = 2048, 2**14, 2**27, 2**31, 2**20
# The largest value of the fields whose names match a pattern. The first pattern that matches decides.
BOUNDS = {
    r"vocab|embeddings_size": MAX_VOCABULARY,
    r"(^|_)(n?layers?|blocks|depths?|stages|hidden_groups)(_|$)": MAX_LAYERS,
    r"experts$": MAX_EXPERTS,
    r"positions?(_embeddings)?$|len(gth)?$|n_ctx$|chunk_size$|window|_id$": MAX_POSITIONS,
    r"tiles$": 2**10,
    r"(image|patch)_size$": 2**16,
    r"(_size|_dims?|_width|_rank|heads|channels|latents|_buckets|embd|_inner|_model|ff)$|^num_|^n_": MAX_WIDTH,
}
OTHERS = 2**63 - 1  # what torch calls an integer
MOST_DEPTH = 16  # of objects in objects
POSITIVE = re.compile(r"^(hidden_size|vocab_size|num_hidden_layers|num_attention_heads|n_embd|n_layer|n_head)$")
WHOLE = re.compile(POSITIVE.pattern + r"|^(intermediate_size|num_key_value_heads|head_dim)$")  # integers, if present
KERNELS = re.compile(r"^_?(attn|experts)_implementation(_internal)?$")
DTYPES = ("dtype", "torch_dtype")

# The weights of a model may have this many times the elements of its files, and this many more: a new part starts with
# random weights, and some buffers are not saved.
TIMES, MORE = 4, 2**26
# Packed weights: at least this many bits hold one.
MAX_WEIGHTS_PER_BYTE = 8


def check_fields(
    fields: Any, where: str, depth: int = 0, config_class: type[PreTrainedConfig] = PreTrainedConfig
) -> None:
    """Checks the fields of a configuration, and of those inside it.

    Args:
        where (`str`): begins each message: the file, and the part.
        depth (`int`): in how many objects these fields are.

    Raises:
        ValueError: for a size that no model has, a value of a wrong type, a name that leads to code or to another
            folder, and a key that would replace a method of `config_class`. The message names the field.
    """
    if not isinstance(fields, dict):
        raise ValueError(f"{where}: expected an object, got {short(fields)}.")
    if depth > MOST_DEPTH:
        raise ValueError(f"{where}: expected at most {MOST_DEPTH} objects inside each other, got more.")
    for name, value in fields.items():
        if not isinstance(name, str) or name.startswith("__") or callable(getattr(config_class, name, None)):
            raise ValueError(
                f"{where}: expected the names of settings, got {short(name)}, which has a meaning in Python."
            )
        if KERNELS.match(name):
            _check_kernel(name, value, where)
        elif name in DTYPES:
            _check_dtype(name, value, where)
        elif name == "auto_map":
            if value is not None and not isinstance(value, dict):
                raise ValueError(f"{where}: expected `auto_map` to be an object of class names, got {short(value)}.")
        elif name == "transformers_weights":
            _check_weights_name(value, where)
        elif name.endswith("_config") and name != "quantization_config" and isinstance(value, dict):
            check_fields(value, f"{where}, `{name}`", depth + 1)
        else:
            _check_value(name, value, where, depth)


def _check_value(name: str, value: Any, where: str, depth: int) -> None:
    """Checks a number, or the numbers in a list or an object."""
    if isinstance(value, (dict, list)) and depth > MOST_DEPTH:
        kind = "objects" if isinstance(value, dict) else "lists"
        raise ValueError(f"{where}: expected at most {MOST_DEPTH} {kind} inside each other, got more in `{name}`.")
    if isinstance(value, dict):
        for inner, each in value.items():
            named = isinstance(inner, str) and _most(name) == OTHERS
            _check_value(inner if named else name, each, where, depth + 1)
    if isinstance(value, list):
        for each in value:
            _check_value(name, each, where, depth + 1)
    if isinstance(value, float) and (math.isnan(value) or (math.isinf(value) and name.endswith("eps"))):
        raise ValueError(f"{where}: expected `{name}` to be a finite number, got {value}.")
    if WHOLE.match(name) and isinstance(value, (str, bool, float)):
        raise ValueError(f"{where}: expected `{name}` to be an integer, got {short(value)}.")
    if isinstance(value, bool) or not isinstance(value, int):
        return
    most = _most(name)
    # -1 often means that there is none, or counts layers from the end. A width is never negative.
    least = 1 if POSITIVE.match(name) else -OTHERS if most in (MAX_LAYERS, MAX_POSITIONS, OTHERS) else 0
    if not least <= value <= most:
        raise ValueError(f"{where}: expected `{name}` to be from {least} to {most}, got {short(value)}.")


def _most(name: str) -> int:
    return next((most for names, most in BOUNDS.items() if re.search(names, name)), OTHERS)


def _check_kernel(name: str, value: Any, where: str) -> None:
    """A file names kernels of transformers. One with a slash is code on the Hub, which a user must ask for."""
    for each in value.values() if isinstance(value, dict) else (value,):
        if each is not None and (not isinstance(each, str) or not re.fullmatch(r"[\w|.-]+", each)):
            raise ValueError(
                f"{where}: expected `{name}` to be a kernel of transformers, such as 'sdpa', got {short(value)}. Code "
                "from elsewhere is not run because a file names it. Pass it to `from_pretrained`."
            )


def _check_dtype(name: str, value: Any, where: str) -> None:
    for each in value.values() if isinstance(value, dict) else (value,):
        if isinstance(each, torch.dtype) or each in (None, "auto"):
            continue
        known = getattr(torch, each.removeprefix("torch."), None) if isinstance(each, str) else None
        if not isinstance(known, torch.dtype):
            raise ValueError(
                f"{where}: expected `{name}` to be a dtype of torch, such as 'bfloat16', got {short(value)}."
            )


def _check_weights_name(value: Any, where: str) -> None:
    """transformers loads the file of this name in place of `model.safetensors`."""
    if value is not None and (
        not isinstance(value, str) or not re.fullmatch(r"[\w][\w.-]*\.safetensors(\.index\.json)?", value)
    ):
        raise ValueError(
            f"{where}: expected `transformers_weights` to be the name of a safetensors file in the folder, got "
            f"{short(value)}."
        )


def is_quantized(fields: dict[str, Any]) -> bool:
    """Whether a configuration, as in a file, names a quantization: its weights are packed integers."""
    return any(
        part.get("quantization_config") is not None for part in (fields, *fields.values()) if isinstance(part, dict)
    )


def check_layer_count(fields: Any, num_tensors: int, where: str) -> None:
    """Raises a `ValueError` for a configuration with more layers than its checkpoint has weights."""
    if not isinstance(fields, dict):
        return
    for name, value in fields.items():
        if isinstance(value, dict):
            check_layer_count(value, num_tensors, f"{where}, `{name}`")
        elif (
            re.fullmatch(r"num_(hidden_)?layers|n_layers?|depth", name)
            and isinstance(value, int)
            and value > num_tensors
        ):
            raise ValueError(f"{where}: `{name}` is {value}, but the checkpoint holds {num_tensors} weights in all.")


def check_against_weights(model: nn.Module, headers: dict[str, Stored], quantized: bool, what: str) -> None:
    """Checks a model on the meta device against the weights that it is to get, before memory is allocated.

    Args:
        headers (`dict[str, Stored]`): the weights in the checkpoint.
        quantized (`bool`): whether the checkpoint's weights are packed: their shapes say nothing then.
        what (`str`): begins each message: the checkpoint.

    Raises:
        ValueError: for a model that would be far larger than its weights. transformers reports other differences.
    """
    elements = sum(stored.numel for stored in headers.values())
    if quantized:
        elements *= 8 * MAX_WEIGHTS_PER_BYTE  # a word of eight bytes
    own: dict[int, int] = {id(tensor): tensor.numel() for tensor in (*model.parameters(), *model.buffers())}
    needed = sum(own.values())
    if needed > TIMES * elements + MORE:
        raise ValueError(
            f"{what}: the configuration asks for {needed} weights, but the checkpoint holds {elements}. Its "
            "configuration was changed or belongs to another checkpoint."
        )
