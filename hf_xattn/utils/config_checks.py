"""Checks configurations: the content of a file before a model is built from it, each field when it is set, and all
fields again after `from_pretrained` has overridden some.

transformers keeps any key of a configuration. Here a key that resembles the name of a field is refused, because it is
probably misspelt. A value that would lead to code or to another folder is refused, too. `checkpoints/folders.py`
compares the sizes with the weights.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from huggingface_hub.dataclasses import as_validated_field
from transformers import GenerationConfig, PreTrainedConfig
from transformers.utils import logging

from .architectures import TILED_VISION_TYPES, WITHOUT_CLASS_TOKEN, layers_width
from .checkpoint_files import short
from .keywords import suggestion
from .parts import names_come_later
from .stub import NamesItsStub, references, write_stub
from .transformers_api import DeclaresParts


if TYPE_CHECKING:
    from typing_extensions import Self

logger = logging.get_logger(__name__)

Made = TypeVar("Made", bound="CheckedConfig")

# Keywords that `PreTrainedConfig` accepts in addition to its fields.
GENERIC = frozenset(
    """
    attn_implementation auto_map experts_implementation model_type name_or_path num_labels output_attentions
    per_layer_config quantization_config tie_word_embeddings torch_dtype use_cache
    """.split()
)
MOST_LABELS = 2**20  # transformers makes a name for each label: 10^9 labels would take 200 GB
KERNELS = re.compile(r"^_?(attn|experts)_implementation(_internal)?$")
DTYPES = ("dtype", "torch_dtype")


class CheckedConfig(NamesItsStub, DeclaresParts, PreTrainedConfig):
    """A configuration that checks its fields."""

    if TYPE_CHECKING:
        # `PreTrainedConfig` has these methods, and mypy allows every attribute on a class with them. Without them, mypy
        # reports misspelt attributes.
        __getattribute__: ClassVar[Any]
        __setattr__: ClassVar[Any]
    # The values of fields that a file of an earlier version does not have, if they are not the defaults.
    values_of_old_files: ClassVar[dict[str, Any]] = {}

    def _check_fields(self) -> None:
        """Raises a `ValueError` for a wrong value. The message names the field, what was expected, and what came."""

    def validate_output_attentions(self) -> None:
        """Checks nothing: blocks return their attention weights with any attention implementation."""

    def save_pretrained(self, save_directory: str | os.PathLike[str], *args, **kwargs) -> None:
        """Saves as `PreTrainedConfig.save_pretrained` does, together with the stub that `auto_map` names."""
        own = references(self.model_type)
        if own and not os.path.isfile(save_directory):
            # For a checkpoint on the Hub, `auto_map` names the repository. The saved folder has a stub of its own.
            self.auto_map = {**(getattr(self, "auto_map", None) or {}), **own}
            write_stub(save_directory)
        super().save_pretrained(save_directory, *args, **kwargs)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs) -> Self:
        """Builds a configuration as `PreTrainedConfig.from_dict` does.

        That method sets some fields after the checks, so the checks run once more. Unknown attributes of a file are
        kept, with a warning.

        Raises:
            ValueError: for values that no model has, before anything is built from them (see [`check_fields`]).
        """
        check_fields(config_dict, cls.__name__, config_class=cls)
        config_dict = {**cls.values_of_old_files, **config_dict}
        later = {name: value for name, value in config_dict.items() if _resembles(cls, name)}
        fields = {name: value for name, value in config_dict.items() if name not in later}
        with names_come_later(bool(config_dict.get("auto_map"))):
            made = super().from_dict(fields, **kwargs)
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


def own_fields(config_class: type[PreTrainedConfig]) -> dict[str, Any]:
    """Returns the fields that a configuration adds to those of transformers, with their defaults."""
    common = _fields_of(PreTrainedConfig)
    return {field.name: field.default for field in dataclasses.fields(config_class) if field.name not in common}


def _resembles(config_class: type[PreTrainedConfig], name: str) -> str:
    """Returns ` Did you mean ...?` for an unknown name that resembles the name of a field, else an empty text."""
    if _is_known(config_class, name):
        return ""
    return suggestion(name, _fields_of(config_class) - _fields_of(PreTrainedConfig), cutoff=0.8)


def _warn_of_unknown(config_class: type[PreTrainedConfig], name: str) -> None:
    told = f"{config_class.__name__} has no field `{name}`. The attribute is kept, but hf_xattn does not read it."
    logger.warning_once(told)


def check_names(config_class: type[PreTrainedConfig], kwargs: dict[str, Any]) -> None:
    """Raises a `TypeError` for a keyword that resembles the name of a field. Warns of any other unknown keyword."""
    for name in kwargs:
        if meant := _resembles(config_class, name):
            raise TypeError(f"{config_class.__name__} has no field `{name}`.{meant}")
        if not _is_known(config_class, name):
            _warn_of_unknown(config_class, name)


def config_of_fields(argument: str, config_class: type[Made], fields: dict[str, Any]) -> Made:
    """Returns a configuration from a `dict`, which `to_dict` has made (then it has `model_type`) or a user has written.

    Raises:
        ValueError: if a user has written keys that are no fields.
    """
    if "model_type" in fields:
        return config_class.from_dict(fields)
    known = _fields_of(config_class)
    if unknown := [name for name in fields if name not in known and not name.startswith("_")]:
        own = sorted(known - _fields_of(PreTrainedConfig))
        raise ValueError(f"`{argument}` has unknown fields {unknown}.{suggestion(unknown[0], own)} Known are {own}.")
    return config_class(**fields)


def _number(expected: str, is_right: Callable[[float], bool]) -> Any:
    """Returns a field with a number. None passes, because the type of the field decides about it."""

    def check(value: float | None) -> None:
        if value is not None and not is_right(value):
            raise ValueError(f"Expected {expected}, got {value}.")

    return as_validated_field(check)


positive = _number("a positive number", lambda value: 0 < value < math.inf)
not_negative = _number("a number of at least 0", lambda value: 0 <= value < math.inf)
finite = _number("a finite number", math.isfinite)
share = _number("a number from 0 to below 1", lambda value: 0 <= value < 1)


def check_buckets(num_buckets: int, max_distance: int) -> None:
    """Raises a `ValueError` for sizes that T5's buckets cannot have."""
    if num_buckets < 4 or num_buckets % 2 or max_distance <= num_buckets // 4:
        raise ValueError(
            "`position_bias_num_buckets` must be an even number of at least 4 (half for each direction), and "
            f"`position_bias_max_distance` larger than a quarter of it, got {num_buckets} and {max_distance}."
        )


def check_features(config: PreTrainedConfig) -> None:
    """Raises a `ValueError` if the fields ask for features that the vision tower does not have: those of layers, or
    those without a class token.
    """
    layers, vision_config = config.vision_feature_layer, config.vision_config
    _check_drops_class_token(config.vision_feature_select_strategy, vision_config)
    if layers is None:
        return
    given = layers if isinstance(layers, (list, tuple)) else [layers]
    if not given:
        raise ValueError(f"Expected `vision_feature_layer` to name at least one layer, got {layers!r}.")
    if vision_config is None:
        raise ValueError(f"`vision_feature_layer={layers!r}` needs a `vision_config`, got None.")
    if layers_width(vision_config) is None:
        raise ValueError(
            f"`vision_feature_layer` is for towers whose layers all have one width, got {layers!r} with a "
            f"{vision_config.model_type}. Leave it out, and the last hidden state is read."
        )
    count = getattr(vision_config, "num_hidden_layers", None)
    if isinstance(count, int) and not all(-count - 1 <= each <= count for each in given):
        raise ValueError(
            f"`vision_feature_layer` must be from {-count - 1} to {count}, because the vision tower has {count} layers "
            f"and 0 stands for its embeddings, got {layers!r}."
        )


def _check_drops_class_token(strategy: str, vision_config: Any) -> None:
    """Raises a `ValueError` if the strategy "default" would do nothing. Warns if it would drop a patch of the image."""
    if strategy == "full":
        return
    kind = None if vision_config is None else vision_config.model_type
    if kind is None or kind in TILED_VISION_TYPES:
        raise ValueError(
            f'Expected `vision_feature_select_strategy="full"` with {"no vision tower" if kind is None else kind}, '
            f"whose tokens are all read, got {strategy!r}."
        )
    if kind in WITHOUT_CLASS_TOKEN:
        logger.warning_once(
            f"`vision_feature_select_strategy={strategy!r}` drops the first token of an image, which is a patch of the "
            f'image with {kind}: this tower has no class token. Pass "full" to read all patches.'
        )


def check_token_id(field: str, value: int | None, vocab_size: int | None) -> None:
    """Raises a `ValueError` for a value that is neither an id of the text vocabulary nor None."""
    if value is None:
        return
    if value < 0 or (vocab_size is not None and value >= vocab_size):
        raise ValueError(f"`{field}` must be an id of the text vocabulary of {vocab_size} entries, got {value}.")


def check_parts(name: str, value: object, parts: dict[str, Any]) -> None:
    """Raises a `ValueError` if a `dict`, such as `attn_implementation`, has a key that is no part of the model."""
    for key in value if isinstance(value, dict) else ():
        if key and key not in parts:
            raise ValueError(f"`{name}` names {key!r}, which is not a part of the model: parts are {sorted(parts)}.")


def every_nth_layer(every: int, num_layers: int) -> list[int]:
    """Returns the layers `every - 1`, `2 * every - 1`, ... For a decoder with fewer layers, it returns the last one."""
    if every < 1:
        raise ValueError(f"Expected `every` of at least 1, got {every}.")
    step = min(every, num_layers)
    return list(range(step - 1, num_layers, step))


def check_layers(layers: Iterable[int], num_layers: int) -> list[int]:
    """Checks layer indices and returns them sorted. A repeated index stands for several blocks at one layer."""
    layers = list(layers)
    if not layers:
        raise ValueError("`cross_attention_layers` is empty: name at least one decoder layer.")
    outside = [index for index in layers if not 0 <= index <= num_layers]
    if outside:
        raise ValueError(
            f"`cross_attention_layers`: the decoder has {num_layers} layers, so expected indices from 0 to "
            f"{num_layers - 1} ({num_layers} is a block after the last layer), got {short(outside)}."
        )
    return sorted(layers)


def check_fields(
    fields: Mapping[str, Any], where: str, config_class: type[PreTrainedConfig] = PreTrainedConfig
) -> None:
    """Checks the content of a configuration file, and of the configurations inside it, before transformers reads it.

    Args:
        where (`str`): the file and the part, with which each message begins.

    Raises:
        ValueError: for a name that leads to code or to another folder, for a key that would replace a method of
            `config_class`, and for labels that would take all memory. The message names the field.
    """
    for name, value in fields.items():
        if not isinstance(name, str) or name.startswith("__") or callable(getattr(config_class, name, None)):
            raise ValueError(f"{where}: expected the names of settings, got {short(name)}.")
        if KERNELS.match(name):
            _check_kernel(name, value, where)
        elif name == "transformers_weights" and value is not None:  # loaded in place of `model.safetensors`
            if not isinstance(value, str) or not re.fullmatch(r"[\w][\w.-]*\.safetensors(\.index\.json)?", value):
                raise ValueError(f"{where}: expected `{name}` to name a safetensors file, got {short(value)}.")
        elif name == "num_labels" and isinstance(value, int) and value > MOST_LABELS:
            raise ValueError(f"{where}: expected `num_labels` of at most {MOST_LABELS}, got {short(value)}.")
        elif name.endswith("_config") and name != "quantization_config" and isinstance(value, dict):
            check_fields(value, f"{where}, `{name}`")


def _check_kernel(name: str, value: Any, where: str) -> None:
    """Raises a `ValueError` for a kernel that is no part of transformers. A name with a slash is code on the Hub, which
    only the user may ask for.
    """
    for each in value.values() if isinstance(value, dict) else (value,):
        if each is not None and (not isinstance(each, str) or not re.fullmatch(r"[\w|.-]+", each)):
            raise ValueError(
                f"{where}: expected `{name}` to be a kernel of transformers, such as 'sdpa', got {short(value)}. Pass "
                "code from elsewhere to `from_pretrained`, if you trust it."
            )


def is_quantized(fields: dict[str, Any]) -> bool:
    """Whether the content of a configuration file names a quantization. The weights are then packed integers."""
    return any(
        part.get("quantization_config") is not None for part in (fields, *fields.values()) if isinstance(part, dict)
    )


def check_layer_count(fields: object, num_tensors: int, where: str) -> None:
    """Raises a `ValueError` for a configuration with more layers than its checkpoint has weights."""
    if not isinstance(fields, dict):
        return
    for name, value in fields.items():
        if isinstance(value, dict):
            check_layer_count(value, num_tensors, f"{where}, `{name}`")
            continue
        count = len(value) if isinstance(value, list) else value if isinstance(value, int) else 0
        if re.fullmatch(r"num_(hidden_)?layers|n_layers?|depth|cross_attention_layers", name) and count > num_tensors:
            raise ValueError(f"{where}: `{name}` is of {short(count)}, but the checkpoint holds {num_tensors} weights.")
