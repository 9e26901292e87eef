"""Checks that configurations share: of single fields, of names, and once more where `from_pretrained` overrides fields.

Transformers' configurations take any keyword and keep it as an attribute. So do these, but for a name that is nearly a field's: it is a
misspelt one, and the field would silently keep its default.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from transformers import GenerationConfig, PreTrainedConfig
from transformers.activations import ACT2FN

from .keywords import suggestion


# What `PreTrainedConfig` takes beside its fields.
GENERIC = frozenset(
    """attn_implementation auto_map experts_implementation model_type name_or_path num_labels output_attentions per_layer_config
quantization_config tie_word_embeddings torch_dtype use_cache""".split()
)


class CheckedConfig(PreTrainedConfig):
    """A configuration that checks its fields."""

    def _check_fields(self) -> None:
        """Raises a `ValueError` that names the field, its value and what would be right."""

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs) -> Any:
        """`PreTrainedConfig.from_dict`, which sets fields after all checks: they run once more.

        Attributes that a file holds and this version does not know are kept, whatever they are called.
        """
        later = {name: value for name, value in config_dict.items() if _resembles(cls, name)}
        made = super().from_dict({name: value for name, value in config_dict.items() if name not in later}, **kwargs)
        config = made[0] if isinstance(made, tuple) else made
        for name, value in later.items():
            setattr(config, name, value)
        for name, spec in cls.sub_configs_defaults.items():
            if isinstance(value := getattr(config, name), dict):
                setattr(config, name, spec.create_subconfig(name, value)[0])
        config._check_fields()
        return made


def _resembles(config_class: type[PreTrainedConfig], name: str) -> str:
    """What a name that is no field was meant to be; empty where it resembles none."""
    fields = {field.name for field in dataclasses.fields(config_class)}
    if name in fields or name in GENERIC or name.startswith("_") or hasattr(config_class, name):
        return ""
    if name in GenerationConfig._get_default_generation_params():
        return ""
    own = fields - {field.name for field in dataclasses.fields(PreTrainedConfig)}
    return suggestion(name, own, cutoff=0.8)


def refuse_misspelt(config_class: type[PreTrainedConfig], kwargs: dict[str, Any]) -> None:
    """Raises a `TypeError` for a keyword that is nearly a field's name."""
    for name in kwargs:
        if meant := _resembles(config_class, name):
            raise TypeError(f"{config_class.__name__} has no field `{name}`.{meant}")


def check_choice(field: str, value: Any, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"`{field}` must be one of {list(choices)}, got {value!r}.")


def check_bool_fields(config: PreTrainedConfig) -> None:
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.type in ("bool", bool) and not isinstance(value, bool):
            raise ValueError(f"`{field.name}` must be True or False, got {value!r}.")


def check_positive_int(field: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise ValueError(f"`{field}` must be a positive integer, got {value!r}.")


def check_number(field: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"`{field}` must be a finite number, got {value!r}.")


def check_positive_number(field: str, value: Any) -> None:
    check_number(field, value)
    if value <= 0:
        raise ValueError(f"`{field}` must be positive, got {value!r}.")


def check_activation(field: str, value: Any) -> None:
    if not isinstance(value, str) or value not in ACT2FN:
        raise ValueError(f"`{field}` must be an activation of transformers (one of {sorted(ACT2FN)}), got {value!r}.")


def check_probability(field: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0.0 <= value < 1.0:
        raise ValueError(f"`{field}` must be in [0, 1), got {value!r}.")


def check_token_id(field: str, value: Any, vocab_size: int | None) -> None:
    """An id of the text vocabulary, or None."""
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"`{field}` must be a token id or None, got {value!r}.")
    if value < 0 or (vocab_size is not None and value >= vocab_size):
        raise ValueError(
            f"`{field}` must be an id of the text vocabulary, which has {vocab_size} entries, got {value}."
        )


def check_parts(name: str, value: Any, parts: dict[str, Any]) -> None:
    """Keys of a dictionary that sets something for each part of a model, as `attn_implementation` may be."""
    for key in value if isinstance(value, dict) else ():
        if key and key not in parts:
            raise ValueError(f"`{name}` names {key!r}, which is no part of the model: parts are {sorted(parts)}.")
