"""Names the argument on a wrong device, after torch has raised an error.

Nothing is checked before: accelerate's hooks and transformers' own code move arguments, so a tensor on another device
than the model often works. If a call fails, this file compares the devices, and names the argument that torch's error
does not name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn


def name_wrong_device(text: Mapping[str, Any], embedding: nn.Module, error: Exception) -> None:
    """Raises a `ValueError` if the text arguments of a failed call are on different devices, or not on the embedding's
    device.

    Args:
        text (`Mapping`): `input_ids` or `inputs_embeds`, `attention_mask`, `position_ids`, `labels`, ...
        embedding (`nn.Module`): the decoder's embedding.
        error (`Exception`): torch's error, which becomes the cause.
    """
    if isinstance(error, torch.OutOfMemoryError):
        return
    name = "inputs_embeds" if text.get("input_ids") is None else "input_ids"
    given = text[name]
    weight: Any = getattr(embedding, "weight", None)
    # FSDP, DeepSpeed and accelerate keep weights elsewhere between the calls, sharded or empty: their device says
    # nothing then.
    is_whole = type(weight) is nn.Parameter and weight.dim() == 2 and weight.numel() and not weight.is_meta
    if is_whole and not hasattr(embedding, "_hf_hook"):
        _check(name, given, weight.device, "model's embeddings", error)
    for argument, value in text.items():
        if isinstance(value, torch.Tensor):
            _check(argument, value, given.device, "text", error)


def name_wrong_states(states: torch.Tensor, weight: torch.Tensor, error: RuntimeError) -> None:
    """Raises a `ValueError` if image features are on another device than the weight that failed to project them."""
    if not isinstance(error, torch.OutOfMemoryError) and not weight.is_meta:
        _check("cross_attention_states", states, weight.device, "cross-attention blocks", error)


def name_wrong_features(features: torch.Tensor, connector: nn.Module, error: RuntimeError) -> None:
    """Raises a `ValueError` if what the vision tower has returned is on another device than the connector that failed
    to read it.
    """
    weight = next(connector.parameters(), None)
    if weight is not None and not isinstance(error, torch.OutOfMemoryError) and not weight.is_meta:
        _check("vision_features", features, weight.device, "connector", error)


def _check(name: str, value: torch.Tensor, device: torch.device, owner: str, error: Exception) -> None:
    if value.device != device:
        raise ValueError(
            f"Expected `{name}` on {device}, the device of the {owner}, got it on {value.device}."
        ) from error
