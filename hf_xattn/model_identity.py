"""Which model, with which weights, made keys and values.

Keys and values of another model, or of this one before more training, have the right shape and would be read as noise. So encoded
images carry an identity: a hash over the configuration and the weights that images pass on their way to keys and values. The weights
of the text decoder are not among them.

Reading all these weights takes about as long as memory needs to deliver them (a 400 MB tower: about 0.2 s on two CPU cores). So each
weight's sum is kept for as long as its storage, its version counter and a few of its values stay the same. An optimizer step, a loaded
checkpoint or a conversion changes these; a write through `.data` that spares those few values is not noticed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers.integrations.accelerate import load_offloaded_parameter

from .configuration_xattn import XAttnConfig


SAMPLES = 4  # values of each weight that are compared
CHUNK = 1 << 20  # words that are summed at once

# Of the block's configuration, what changes keys and values without changing a weight's shape.
BLOCK_FIELDS = ("num_key_value_heads", "head_dim", "qk_norm", "norm_eps", "quiet_softmax")
MODEL_FIELDS = ("connector_type", "connector_hidden_act", "vision_feature_select_strategy")


class ModelIdentity:
    """The identity of the image side of a model.

    Args:
        config ([`XAttnConfig`]): the model's configuration.
    """

    def __init__(self, config: XAttnConfig):
        self._config = config
        self._sums: dict[str, tuple[Any, int]] = {}

    def current(self, parts: dict[str, nn.Module]) -> str:
        """SHA-256 over configuration, names, dtypes, shapes and sums of the weights as they are now.

        Args:
            parts (`dict[str, nn.Module]`): modules that images pass, by name.
        """
        digest = hashlib.sha256(json.dumps(self._facts(parts), sort_keys=True, default=str).encode())
        tensors = list(_tensors(parts))
        samples = _samples([tensor for _, tensor, _ in tensors])
        for (name, tensor, offloaded), sample in zip(tensors, samples):
            counts = not tensor.is_inference()  # a tensor of `torch.inference_mode()` does not count its versions
            key = (tensor.data_ptr(), tensor._version if counts else None, sample, offloaded)
            known = self._sums.get(name)
            if known is None or known[0] != key or not counts:
                known = self._sums[name] = (key, _checksum(tensor))
            digest.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)}:{known[1]}".encode())
        return digest.hexdigest()

    def _facts(self, parts: dict[str, nn.Module]) -> dict[str, Any]:
        config, block = self._config, self._config.cross_attention_config
        facts: dict[str, Any] = {name: getattr(block, name) for name in BLOCK_FIELDS}
        facts.update((name, getattr(config, name)) for name in MODEL_FIELDS)
        for name in ("vision_config", "perceiver_config"):
            part = getattr(config, name)
            facts[name] = None if part is None else _shape_of(part.to_dict())
        # Adapters change a layer's output without changing its weights.
        facts["adapters"] = {
            f"{name}.{inner}": [
                str(module.active_adapters),
                bool(getattr(module, "disable_adapters", False)),
                str(getattr(module, "scaling", None)),
            ]
            for name, part in parts.items()
            for inner, module in part.named_modules()
            if hasattr(module, "active_adapters") and hasattr(module, "lora_A")
        }
        return facts


def _tensors(parts: dict[str, nn.Module]) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """Name, values, and whether accelerate keeps it elsewhere, of every weight."""
    for name, part in sorted(parts.items()):
        for inner, tensor in sorted(part.state_dict(keep_vars=True).items()):
            if not isinstance(tensor, torch.Tensor):
                continue
            offloaded = tensor.is_meta
            if offloaded:
                tensor = load_offloaded_parameter(part, inner)  # type: ignore[arg-type]  # reads the hooks of any module
            yield f"{name}.{inner}", getattr(tensor, "_local_tensor", tensor).detach(), offloaded


def _shape_of(config: dict[str, Any]) -> dict[str, Any]:
    """A configuration without what says where it came from or which kernel runs it."""
    dropped = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "architectures")
    return {name: value for name, value in config.items() if name not in dropped and not name.startswith("_attn")}


def _samples(tensors: list[torch.Tensor]) -> list[tuple[float, ...]]:
    """A few values of each tensor; one copy to the host for each device and dtype."""
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for index, tensor in enumerate(tensors):
        if tensor.numel() and tensor.is_contiguous() and not tensor.is_meta:
            groups.setdefault((tensor.device, tensor.dtype), []).append(index)
    samples: list[tuple[float, ...]] = [()] * len(tensors)
    for indices in groups.values():
        parts = [_few(tensors[index].view(-1)) for index in indices]
        values = torch.cat(parts).to(torch.float64).tolist()
        start = 0
        for index, part in zip(indices, parts):
            samples[index] = tuple(values[start : start + part.shape[0]])
            start += part.shape[0]
    return samples


def _few(flat: torch.Tensor) -> torch.Tensor:
    return flat[:: max(1, flat.shape[0] // SAMPLES)][:SAMPLES]


def _checksum(tensor: torch.Tensor) -> int:
    """A sum of the words of a tensor, each multiplied by an odd number of its own, modulo 2^64."""
    data = tensor.contiguous().view(-1).view(torch.uint8)
    if data.shape[0] % 8:
        data = nn.functional.pad(data, (0, -data.shape[0] % 8))
    words = data.view(torch.int64)
    count = min(CHUNK, words.shape[0])
    weights = torch.arange(1, count + 1, device=words.device) * 6364136223846793005 + 1442695040888963407
    weights = (weights ^ (weights >> 29)) | 1
    total = 0
    for index, chunk in enumerate(words.split(CHUNK)):
        mixed = (chunk ^ (chunk >> 32)) * weights[: chunk.shape[0]]
        part = int((mixed ^ (mixed >> 29)).sum())
        total = (total + part * (2 * index + 1)) % 2**64
    return total
