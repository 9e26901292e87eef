"""Checks for all configurations: of single fields, of names, and of all fields again after `from_pretrained` overrides
some.

Configurations of transformers take any keyword and keep it as an attribute. These do the same, with two differences. A
name that resembles a field's name is refused: it is probably misspelt, and the field would silently keep its default.
Any other unknown name, for example from a file that a newer version wrote, is kept with a warning.
"""

from __future__ import annotations

import dataclasses
import math
import os
from typing import TYPE_CHECKING, Any, ClassVar

from transformers import GenerationConfig, PreTrainedConfig
from transformers.activations import ACT2FN
from transformers.utils import logging

from .checkpoint_files import short
from .config_sizes import MAX_LAYERS, check_fields
from .keywords import suggestion
from .stub import NamesItsStub, references, write_stub
from .transformers_api import DeclaresParts


logger = logging.get_logger(__name__)

# Keywords that `PreTrainedConfig` accepts in addition to its fields.
GENERIC = frozenset(
    """
    attn_implementation auto_map experts_implementation model_type name_or_path num_labels output_attentions
    per_layer_config quantization_config tie_word_embeddings torch_dtype use_cache
    """.split()
)


class CheckedConfig(NamesItsStub, DeclaresParts, PreTrainedConfig):
    """A configuration that checks its fields."""

    if TYPE_CHECKING:
        # mypy allows every attribute on a class with these methods, which `PreTrainedConfig` has. Here it reports
        # misspelt ones.
        __getattribute__: ClassVar[Any]
        __setattr__: ClassVar[Any]

    def _check_fields(self) -> None:
        """Raises a `ValueError` that names the field, the expected value and the actual value."""

    def save_pretrained(self, save_directory: str | os.PathLike[str], *args, **kwargs) -> None:
        """`PreTrainedConfig.save_pretrained`, with the stub that `auto_map` names."""
        own = references(self.model_type)
        if own and not os.path.isfile(save_directory):
            # Of a checkpoint on the Hub, `auto_map` names the repository: the saved folder has a stub of its own.
            self.auto_map = {**(getattr(self, "auto_map", None) or {}), **own}
            write_stub(save_directory)
        super().save_pretrained(save_directory, *args, **kwargs)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args, **kwargs) -> Any:
        """`PreTrainedConfig.from_pretrained`. Errors name the checkpoint; the configuration keeps only a given name."""
        given = kwargs.get("name_or_path", "")
        kwargs.setdefault("name_or_path", os.fspath(pretrained_model_name_or_path))
        made = super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)
        config = made[0] if isinstance(made, tuple) else made
        config.name_or_path = given
        return made

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs) -> Any:
        """Like `PreTrainedConfig.from_dict`, which sets some fields after the checks: so the checks run once more.

        Keeps unknown attributes of a file, whatever their names, and warns.

        Raises:
            ValueError, TypeError: for fields that no model has, before anything is built from them (see
                `utils/config_sizes.py`), and for fields that transformers or this package refuses.
        """
        name = kwargs.get("name_or_path")
        where = cls.__name__ if not name else f"{cls.__name__} of {name}"
        check_fields(config_dict, where, config_class=cls)
        try:
            return cls._from_checked(config_dict, kwargs)
        except (OSError, ImportError):
            raise
        except TypeError as error:
            raise TypeError(f"{where}: {error}") from error
        except Exception as error:  # whatever the classes of the parts stumble over
            raise ValueError(f"{where}: {error if str(error) else type(error).__name__}") from error

    @classmethod
    def _from_checked(cls, config_dict: dict[str, Any], kwargs: dict[str, Any]) -> Any:
        later = {name: value for name, value in config_dict.items() if _resembles(cls, name)}
        made = super().from_dict({name: value for name, value in config_dict.items() if name not in later}, **kwargs)
        config = made[0] if isinstance(made, tuple) else made
        for name, value in later.items():
            _warn_of_unknown(cls, name)
            setattr(config, name, value)
        for name, spec in cls.sub_configs_defaults.items():
            if isinstance(value := getattr(config, name), dict):
                setattr(config, name, spec.create_subconfig(name, value)[0])
        config._check_fields()
        return made


def _is_known(config_class: type[PreTrainedConfig], name: str) -> bool:
    """Whether a name is a field, or an attribute that every configuration of transformers may have."""
    if name in GENERIC or name.startswith("_") or hasattr(config_class, name):
        return True
    return name in _fields_of(config_class) or name in GenerationConfig._get_default_generation_params()


def _fields_of(config_class: type[PreTrainedConfig]) -> set[str]:
    return {field.name for field in dataclasses.fields(config_class)}


def _resembles(config_class: type[PreTrainedConfig], name: str) -> str:
    """` Did you mean ...?` for an unknown name that resembles a field's name; empty for any other name."""
    if _is_known(config_class, name):
        return ""
    return suggestion(name, _fields_of(config_class) - _fields_of(PreTrainedConfig), cutoff=0.8)


def _warn_of_unknown(config_class: type[PreTrainedConfig], name: str) -> None:
    logger.warning_once(
        f"{config_class.__name__} has no field `{name}`. The attribute is kept, but this version of hf_xattn does not "
        "read it."
    )


def check_names(config_class: type[PreTrainedConfig], kwargs: dict[str, Any]) -> None:
    """Raises a `TypeError` for a keyword that resembles a field's name; warns of any other unknown keyword."""
    for name in kwargs:
        if meant := _resembles(config_class, name):
            raise TypeError(f"{config_class.__name__} has no field `{name}`.{meant}")
        if not _is_known(config_class, name):
            _warn_of_unknown(config_class, name)


def refuse_unknown_fields(argument: str, config_class: type[PreTrainedConfig], fields: dict[str, Any]) -> None:
    """Raises a `ValueError` if a `dict` that a user wrote has keys that are not fields."""
    known = _fields_of(config_class)
    unknown = [name for name in fields if name not in known and not name.startswith("_")]
    if unknown:
        own = sorted(known - _fields_of(PreTrainedConfig))
        raise ValueError(f"`{argument}` has unknown fields {unknown}.{suggestion(unknown[0], own)} Known are {own}.")


def config_of_fields(argument: str, config_class: type[CheckedConfig], fields: dict[str, Any]) -> Any:
    """Returns a configuration from a `dict`, made by `to_dict` (it has `model_type`) or written by a user."""
    if "model_type" in fields:
        return config_class.from_dict(fields)
    refuse_unknown_fields(argument, config_class, fields)
    return config_class(**fields)


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


def check_count(field: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"`{field}` must be an integer of at least 0, got {value!r}.")


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
    """Checks the keys of a `dict` with one entry for each part of a model, such as `attn_implementation`."""
    for key in value if isinstance(value, dict) else ():
        if key and key not in parts:
            raise ValueError(f"`{name}` names {key!r}, which is not a part of the model: parts are {sorted(parts)}.")


def every_nth_layer(every: int, num_layers: int) -> list[int]:
    """Returns the layers `every - 1`, `2 * every - 1`, ... If the decoder has fewer layers, returns the last layer."""
    check_positive_int("every", every)
    step = min(every, num_layers)
    return list(range(step - 1, num_layers, step))


def check_layers(layers: Any, num_layers: int) -> list[int]:
    """Checks layer indices and returns them sorted. A repeated index stands for several blocks at one layer."""
    if not isinstance(layers, (list, tuple, range, set)) or not all(type(index) is int for index in layers):
        raise ValueError(f"`cross_attention_layers` must be a list of integers, got {short(layers)}.")
    layers = list(layers)
    if len(layers) > MAX_LAYERS:
        raise ValueError(f"`cross_attention_layers`: expected at most {MAX_LAYERS} blocks, got {len(layers)} indices.")
    if not layers:
        raise ValueError("`cross_attention_layers` is empty: name at least one decoder layer.")
    outside = [index for index in layers if not 0 <= index <= num_layers]
    if outside:
        raise ValueError(
            f"`cross_attention_layers`: the decoder has {num_layers} layers, so expected indices from 0 to "
            f"{num_layers - 1} ({num_layers} is a block after the last layer), got {short(outside)}."
        )
    return sorted(layers)
