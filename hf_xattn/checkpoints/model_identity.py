"""Identifies the model and the weights that encoded images, because no other model can use their keys and values.

The identity is a hash of the configuration and of all weights that an image passes on its way from pixels to keys and
values. The weights of the text model are not among them. To read the weights takes about 0.2 s for a tower of 400 MB on
two CPU cores. So the sum of each weight is cached as long as its storage, its version counter and a few sample values
stay the same. An optimizer step, a loaded checkpoint or a conversion changes at least one of these.

Two changes are not noticed: hooks on modules, and writes through `.data` or a NumPy view that leave the sample values
as they are.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator
from itertools import islice
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.integrations.accelerate import load_offloaded_parameter

from ..cache.digests import mixed_sum, word_weights, words_of
from ..configuration_xattn import XAttnConfig
from ..utils.config_checks import own_fields
from .own_parts import adapter_layers


SAMPLES = 4  # number of sample values of each weight
CHUNK = 1 << 20  # number of words that are summed at once

# Every field of the configurations belongs to the identity, unless it stands in a list of harmless fields. The fields
# of the first files of encoded images are always part of it. Any other field is part of it only if it differs from its
# default. So the identity of a file stays the same when a new field is added, and the file stays valid.
BLOCK_FIELDS = ("num_key_value_heads", "head_dim", "qk_norm", "norm_eps", "quiet_softmax")
MODEL_FIELDS = ("connector_type", "connector_hidden_act", "vision_feature_select_strategy")
PERCEIVER_FIELDS = (
    "hidden_size intermediate_size num_latents num_hidden_layers num_attention_heads head_dim hidden_act qk_norm "
    "norm_eps"
).split()
# Harmless fields: they change no image, or the names and shapes of the weights, which count too, show them.
HARMLESS_OF_BLOCK = (
    "hidden_size num_attention_heads context_size intermediate_size hidden_act mlp_type norm_type attention_bias "
    "mlp_bias attention_dropout gate gate_options gate_granularity gate_init zero_init position_bias "
    "position_bias_num_buckets position_bias_max_distance initializer_range"
).split()
HARMLESS_OF_MODEL = (
    "text_config cross_attention_layers image_token_id image_visibility additional_vocab_size additional_vocab_in_head "
    "additional_vocab_scaled connector_bias source_config vision_hidden_size"
).split()
# Fields that `_facts` writes by itself.
WRITTEN_OF_BLOCK = ("qk_norm_eps", "position", "position_options", "context_norm")
PARTS = ("vision_config", "perceiver_config", "cross_attention_config")
# Fields about what is done with the features of a tower, which do not count for the tower alone.
BEHIND_TOWER = (*MODEL_FIELDS, "connector_options")
# Fields that change no image: where a part came from, and how it is loaded and written.
DROPPED = (
    "_name_or_path base_revision base_subfolder base_gguf_file transformers_version dtype torch_dtype architectures"
).split()


class XAttnIdentityMixin:
    """The method of [`XAttnModel`] that returns its identity."""

    _identity: ModelIdentity | None = None

    def image_identity(self: Any) -> str:
        """Returns a hash of the configuration and the weights that encode images.

        Two models with the same identity make the same keys and values of an image.
        """
        if self._identity is None:
            self._identity = ModelIdentity(self.config)
        return self._identity.current(self._image_parts())

    def _image_parts(self: Any) -> dict[str, nn.Module]:
        """Returns the modules that images pass on their way to keys and values, by name."""
        parts: dict[str, nn.Module] = {}
        for block in self.blocks:
            parts.update((f"blocks.{block.layer_idx}.{name}", part) for name, part in block.attn.image_parts())
        if self.vision_tower is not None and self.connector is not None:
            parts.update(vision_tower=self.vision_tower, connector=self.connector)
        return parts


class ModelIdentity:
    """Computes the identity of the image side of a model."""

    def __init__(self, config: XAttnConfig):
        self._config = config
        self._sums: dict[str, tuple[Any, int]] = {}

    def current(self, parts: dict[str, nn.Module]) -> str:
        """Returns the SHA-256 of configuration and weights. `parts` are the modules from pixels to keys and values."""
        tensors = list(_tensors(parts))
        samples = _samples([tensor for _, tensor, _ in tensors])
        sums = []
        for (name, tensor, offloaded), sample in zip(tensors, samples):
            counts = not tensor.is_inference()  # a tensor of `torch.inference_mode()` does not count its versions
            key = (tensor.data_ptr(), tensor._version if counts else None, sample, offloaded)
            known = self._sums.get(name)
            if known is None or known[0] != key or not counts:
                known = self._sums[name] = (key, checksum(tensor))
            sums.append(line_of(name, tensor, known[1]))
        return digest_of(_json(self._facts(parts)), *sums)

    def _facts(self, parts: dict[str, nn.Module]) -> dict[str, Any]:
        config, block = self._config, self._config.cross_attention_config
        facts: dict[str, Any] = {name: getattr(block, name) for name in BLOCK_FIELDS}
        if block.qk_norm_eps != block.norm_eps:
            facts["qk_norm_eps"] = block.qk_norm_eps
        if block.position != "none":
            facts["position"] = [block.position, block.position_options]
        if block.context_norm:
            facts["context_norm"] = block.norm_type
        others = _others(block, {*BLOCK_FIELDS, *WRITTEN_OF_BLOCK, *HARMLESS_OF_BLOCK})
        facts |= {f"block.{name}": value for name, value in others.items()}
        facts.update((name, getattr(config, name)) for name in MODEL_FIELDS)
        facts |= _others(config, {*MODEL_FIELDS, *PARTS, *HARMLESS_OF_MODEL})
        for name in ("vision_config", "perceiver_config"):
            part = getattr(config, name)
            facts[name] = None if part is None else _shape_of(part.to_dict())
        if (perceiver := config.perceiver_config) is not None:
            usual = own_fields(type(perceiver)).keys() - _others(perceiver, ()).keys() - {*PERCEIVER_FIELDS}
            facts["perceiver_config"] = {
                name: value for name, value in facts["perceiver_config"].items() if name not in usual
            }
        # Adapters (PEFT) change the output of a layer without changing its weights. So do modules of `modules_to_save`.
        facts["adapters"] = _adapters_of(parts)
        return facts


def tower_identity(config: XAttnConfig, tower: nn.Module) -> str:
    """Returns the SHA-256 of the configuration and the weights of a vision tower, and of which layers are read."""
    assert config.vision_config is not None
    parts = {"vision_tower": tower}
    facts: dict[str, Any] = {
        "vision_config": _shape_of(config.vision_config.to_dict()),
        "adapters": _adapters_of(parts),
    }
    facts |= _others(config, {*BEHIND_TOWER, *PARTS, *HARMLESS_OF_MODEL})
    return digest_of(_json(facts), *(line_of(name, tensor, checksum(tensor)) for name, tensor, _ in _tensors(parts)))


def _others(config: PreTrainedConfig, known: Collection[str]) -> dict[str, Any]:
    """Returns the fields of a configuration that are not `known` and differ from their defaults."""
    fields = {name: default for name, default in own_fields(type(config)).items() if name not in known}
    return {name: value for name, default in fields.items() if (value := getattr(config, name)) != default}


def _adapters_of(parts: dict[str, nn.Module]) -> dict[str, list[Any]]:
    """Returns the active adapters of each layer that has some."""
    return {
        f"{name}.{inner}": [
            str(module.active_adapters),
            bool(module.disable_adapters),
            str(getattr(module, "scaling", None)),
        ]
        for name, part in parts.items()
        for inner, module in adapter_layers(part)
    }


def _tensors(parts: dict[str, nn.Module]) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """Yields the name and the values of each weight, and whether accelerate has offloaded it."""
    for name, part in sorted(parts.items()):
        for inner, tensor in sorted(part.state_dict(keep_vars=True).items()):
            if not isinstance(tensor, torch.Tensor):
                continue
            offloaded = tensor.is_meta
            if offloaded:
                tensor = load_offloaded_parameter(part, inner)  # type: ignore[arg-type]  # of any module
            tensor = getattr(tensor, "_local_tensor", tensor).detach()
            if hasattr(tensor, "__tensor_flatten__"):  # quantized by torchao: integers and their scales
                for field in tensor.__tensor_flatten__()[0]:
                    yield f"{name}.{inner}.{field}", getattr(tensor, field), offloaded
            else:
                yield f"{name}.{inner}", tensor, offloaded


def _shape_of(config: dict[str, Any]) -> dict[str, Any]:
    """Returns a configuration without its origin, its dtype and its attention kernel."""
    return {name: value for name, value in config.items() if name not in DROPPED and not name.startswith("_attn")}


def _samples(tensors: list[torch.Tensor]) -> list[tuple[float, ...]]:
    """Returns a few values of each tensor. They are copied to the host in one piece for each device and dtype."""
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for index, tensor in enumerate(tensors):
        if tensor.numel() and tensor.is_contiguous() and not tensor.is_meta:
            groups.setdefault((tensor.device, tensor.dtype), []).append(index)
    samples: list[tuple[float, ...]] = [()] * len(tensors)
    for indices in groups.values():
        parts = [_few(tensors[index].view(-1)) for index in indices]
        values = iter(torch.cat(parts).to(torch.float64).tolist())
        for index, part in zip(indices, parts):
            samples[index] = tuple(islice(values, part.shape[0]))
    return samples


def _few(flat: torch.Tensor) -> torch.Tensor:
    return flat[:: max(1, flat.shape[0] // SAMPLES)][:SAMPLES]


def checksum(tensor: torch.Tensor) -> int:
    """Returns the sum of the words of a tensor modulo 2^64, each word with a weight (see `cache/digests.py`)."""
    words = words_of(tensor.contiguous().view(-1))
    weights = word_weights(min(CHUNK, words.shape[0]), words.device)
    total = 0
    for index, chunk in enumerate(words.split(CHUNK)):
        total = (total + int(mixed_sum(chunk, weights[: chunk.shape[0]])) * (2 * index + 1)) % 2**64
    return total


def line_of(name: str, tensor: torch.Tensor, total: object) -> str:
    return f"{name}:{tensor.dtype}:{tuple(tensor.shape)}:{total}"


def _json(facts: dict[str, Any]) -> str:
    return json.dumps(facts, sort_keys=True, default=str)


def digest_of(*texts: str) -> str:
    return hashlib.sha256("".join(texts).encode()).hexdigest()
