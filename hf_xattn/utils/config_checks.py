"""Checks of configurations: of what a file says before anything is built from it, of single fields, and of all fields
again after `from_pretrained` overrides some.

transformers keeps any key: one that resembles a field's name is refused here, as probably misspelt. What would lead to
code or to another folder is refused, too. `checkpoints/folders.py` compares sizes with the weights.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
from typing import TYPE_CHECKING, Any, ClassVar

from huggingface_hub.dataclasses import as_validated_field
from transformers import GenerationConfig, PreTrainedConfig
from transformers.utils import logging

from .architectures import TILED_VISION_TYPES, WITHOUT_CLASS_TOKEN, layers_width
from .checkpoint_files import short
from .keywords import suggestion
from .parts import names_come_later
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
MOST_LABELS = 2**20  # transformers makes a name of each: 10^9 of them would take 200 GB
KERNELS = re.compile(r"^_?(attn|experts)_implementation(_internal)?$")
DTYPES = ("dtype", "torch_dtype")


class CheckedConfig(NamesItsStub, DeclaresParts, PreTrainedConfig):
    """A configuration that checks its fields."""

    if TYPE_CHECKING:
        # mypy allows every attribute on a class with these methods, which `PreTrainedConfig` has. Here it reports
        # misspelt ones.
        __getattribute__: ClassVar[Any]
        __setattr__: ClassVar[Any]
    # What a file without a field means, where that is not the default: the field is younger than the file.
    values_of_old_files: ClassVar[dict[str, Any]] = {}

    def _check_fields(self) -> None:
        """Raises a `ValueError` that names the field, the expected value and the actual value."""

    def validate_output_attentions(self) -> None:
        """Blocks return their weights with any attention implementation, so transformers' check does not apply."""

    def save_pretrained(self, save_directory: str | os.PathLike[str], *args, **kwargs) -> None:
        """`PreTrainedConfig.save_pretrained`, with the stub that `auto_map` names."""
        own = references(self.model_type)
        if own and not os.path.isfile(save_directory):
            # Of a checkpoint on the Hub, `auto_map` names the repository: the saved folder has a stub of its own.
            self.auto_map = {**(getattr(self, "auto_map", None) or {}), **own}
            write_stub(save_directory)
        super().save_pretrained(save_directory, *args, **kwargs)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs) -> Any:
        """Like `PreTrainedConfig.from_dict`, which sets some fields after the checks: so the checks run once more.

        Keeps unknown attributes of a file, whatever their names, and warns.

        Raises a `ValueError` for fields that no model has, before anything is built from them ([`check_fields`]).
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
    """The fields that a configuration adds to those of transformers, and their defaults."""
    common = _fields_of(PreTrainedConfig)
    return {field.name: field.default for field in dataclasses.fields(config_class) if field.name not in common}


def _resembles(config_class: type[PreTrainedConfig], name: str) -> str:
    """` Did you mean ...?` for an unknown name that resembles a field's name; empty for any other name."""
    if _is_known(config_class, name):
        return ""
    return suggestion(name, _fields_of(config_class) - _fields_of(PreTrainedConfig), cutoff=0.8)


def _warn_of_unknown(config_class: type[PreTrainedConfig], name: str) -> None:
    told = f"{config_class.__name__} has no field `{name}`. The attribute is kept, but hf_xattn does not read it."
    logger.warning_once(told)


def check_names(config_class: type[PreTrainedConfig], kwargs: dict[str, Any]) -> None:
    """Raises a `TypeError` for a keyword that resembles a field's name; warns of any other unknown keyword."""
    for name in kwargs:
        if meant := _resembles(config_class, name):
            raise TypeError(f"{config_class.__name__} has no field `{name}`.{meant}")
        if not _is_known(config_class, name):
            _warn_of_unknown(config_class, name)


def config_of_fields(argument: str, config_class: type[CheckedConfig], fields: dict[str, Any]) -> Any:
    """A configuration from a `dict`, made by `to_dict` (it has `model_type`) or written by a user.

    Raises a `ValueError` if a user wrote keys that are not fields.
    """
    if "model_type" in fields:
        return config_class.from_dict(fields)
    known = _fields_of(config_class)
    if unknown := [name for name in fields if name not in known and not name.startswith("_")]:
        own = sorted(known - _fields_of(PreTrainedConfig))
        raise ValueError(f"`{argument}` has unknown fields {unknown}.{suggestion(unknown[0], own)} Known are {own}.")
    return config_class(**fields)


@as_validated_field
def positive(value: float | None) -> None:
    """A field with a positive number, or None where its type allows it."""
    if value is not None and not 0 < value < math.inf:
        raise ValueError(f"Expected a positive number, got {value}.")


@as_validated_field
def not_negative(value: float) -> None:
    if not 0 <= value < math.inf:
        raise ValueError(f"Expected a number of at least 0, got {value}.")


@as_validated_field
def finite(value: float) -> None:
    if not math.isfinite(value):
        raise ValueError(f"Expected a finite number, got {value}.")


@as_validated_field
def share(value: float) -> None:
    if not 0 <= value < 1:
        raise ValueError(f"Expected a number from 0 to below 1, got {value}.")


def check_buckets(num_buckets: int, max_distance: int) -> None:
    """Raises a `ValueError` for sizes that T5's buckets cannot have."""
    if num_buckets < 4 or num_buckets % 2 or max_distance <= num_buckets // 4:
        raise ValueError(
            "`position_bias_num_buckets` must be an even number of at least 4 (half for each direction), and "
            f"`position_bias_max_distance` larger than a quarter of it, got {num_buckets} and {max_distance}."
        )


def check_features(config: Any) -> None:
    """Raises a `ValueError` for features of a vision tower that cannot be read: of layers, or without a class token."""
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
            f"{vision_config.model_type}. Leave it out: then the last hidden state is read."
        )
    count = getattr(vision_config, "num_hidden_layers", None)
    if isinstance(count, int) and not all(-count - 1 <= each <= count for each in given):
        raise ValueError(
            f"`vision_feature_layer` must be from {-count - 1} to {count}, because the vision tower has {count} layers "
            f"and its embeddings are 0, got {layers!r}."
        )


def _check_drops_class_token(strategy: str, vision_config: Any) -> None:
    """Raises a `ValueError` if the strategy "default" would do nothing. Warns if it drops a patch of the picture."""
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
            f'picture with {kind}: this tower has no class token. Pass "full" to read all patches.'
        )


def check_token_id(field: str, value: Any, vocab_size: int | None) -> None:
    """An id of the text vocabulary, or None."""
    if value is None:
        return
    if value < 0 or (vocab_size is not None and value >= vocab_size):
        raise ValueError(f"`{field}` must be an id of the text vocabulary of {vocab_size} entries, got {value}.")


def check_parts(name: str, value: Any, parts: dict[str, Any]) -> None:
    """Refuses the keys of a `dict`, such as `attn_implementation`, that are no parts of a model."""
    for key in value if isinstance(value, dict) else ():
        if key and key not in parts:
            raise ValueError(f"`{name}` names {key!r}, which is not a part of the model: parts are {sorted(parts)}.")


def every_nth_layer(every: int, num_layers: int) -> list[int]:
    """Returns the layers `every - 1`, `2 * every - 1`, ... If the decoder has fewer layers, returns the last layer."""
    if every < 1:
        raise ValueError(f"Expected `every` of at least 1, got {every}.")
    step = min(every, num_layers)
    return list(range(step - 1, num_layers, step))


def check_layers(layers: Any, num_layers: int) -> list[int]:
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


def check_fields(fields: Any, where: str, config_class: type[PreTrainedConfig] = PreTrainedConfig) -> None:
    """Checks the fields of a configuration, and of those inside it, which transformers would follow.

    Args:
        where (`str`): begins each message: the file, and the part.

    Raises:
        ValueError: for a name that leads to code or to another folder, a key that would replace a method of
            `config_class`, and labels that take all memory. The message names the field.
    """
    for name, value in fields.items():
        if not isinstance(name, str) or name.startswith("__") or callable(getattr(config_class, name, None)):
            raise ValueError(f"{where}: expected the names of settings, got {short(name)}.")
        if KERNELS.match(name):
            _check_kernel(name, value, where)
        elif name == "transformers_weights":
            _check_weights_name(value, where)
        elif name == "num_labels" and isinstance(value, int) and value > MOST_LABELS:
            raise ValueError(f"{where}: expected `num_labels` of at most {MOST_LABELS}, got {short(value)}.")
        elif name.endswith("_config") and name != "quantization_config" and isinstance(value, dict):
            check_fields(value, f"{where}, `{name}`")


def _check_kernel(name: str, value: Any, where: str) -> None:
    """A file names kernels of transformers. One with a slash is code on the Hub, which a user must ask for."""
    for each in value.values() if isinstance(value, dict) else (value,):
        if each is not None and (not isinstance(each, str) or not re.fullmatch(r"[\w|.-]+", each)):
            raise ValueError(
                f"{where}: expected `{name}` to be a kernel of transformers, such as 'sdpa', got {short(value)}. Pass "
                "code from elsewhere to `from_pretrained`, if you trust it."
            )


def _check_weights_name(value: Any, where: str) -> None:
    """transformers loads the file of this name in place of `model.safetensors`."""
    if value is not None and (
        not isinstance(value, str) or not re.fullmatch(r"[\w][\w.-]*\.safetensors(\.index\.json)?", value)
    ):
        raise ValueError(f"{where}: expected `transformers_weights` to name a safetensors file, got {short(value)}.")


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
            continue
        count = len(value) if isinstance(value, list) else value if isinstance(value, int) else 0
        if re.fullmatch(r"num_(hidden_)?layers|n_layers?|depth|cross_attention_layers", name) and count > num_tensors:
            raise ValueError(f"{where}: `{name}` is of {short(count)}, but the checkpoint holds {num_tensors} weights.")
