"""Loads the bases of a model: the checkpoints of its text model and its vision tower.

A model remembers the names of its bases, so that it can be saved without their weights (see `adapters.py`).

The text model may also come out of a vision-language model, which holds an ordinary decoder (`text_config`) beside its
own modules for images. A retrofit takes the decoder and the head, its text half, and drops the other modules. The text
half shares its weights with the larger model.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
)

from ..decoders.insertion import check_kind
from ..parts.towers import check_comes_back, check_tower_class, check_tower_config
from ..utils.architectures import architecture
from ..utils.checkpoint_files import incomplete
from ..utils.config_checks import is_quantized
from ..utils.keywords import CONFIG_KEYWORDS, LOAD_KEYWORDS, given, refuse_unknown
from ..utils.towers import own_class
from ..utils.transformers_api import resolve_revision
from .folders import check_config_file, check_folder, check_size
from .gguf_files import gguf_config, gguf_file_of, gguf_path, is_gguf_path, load_gguf, split_gguf
from .quantization import share_quantizer


WHERE = ("revision", "subfolder", "gguf_file")  # keyword arguments that say where in a repository or folder a base is


def load_text(text: str | Path, **load_kwargs) -> PreTrainedModel:
    """Loads a text model, or the text half of a larger model. Arguments and errors are those of [`retrofit`]."""
    check_load_kwargs(load_text, load_kwargs, text)
    text, load_kwargs = split_gguf("text", text, load_kwargs)
    config = text_config_of(text, load_kwargs, reads_weights=False)
    if "gguf_file" in load_kwargs:
        return text_half(load_gguf(text, config, load_kwargs))
    source = AutoConfig.from_pretrained(text, **given(CONFIG_KEYWORDS, load_kwargs))
    loader = composite_class(source) if is_composite(source) else AutoModelForCausalLM
    whole, lost = _load("text", loader, text, load_kwargs)
    half = text_half(whole)
    used = {id(tensor) for tensor in (*half.parameters(), *half.buffers())}
    _check_whole("text", text, whole, [name for name in lost if id(whole.get_parameter_or_buffer(name)) in used])
    return half


def load_vision(vision: str | Path, **load_kwargs) -> PreTrainedModel:
    """Loads the vision tower of a checkpoint. Arguments and errors are those of [`retrofit`]."""
    check_load_kwargs(load_vision, load_kwargs, vision)
    if load_kwargs.get("gguf_file") is not None:
        raise ValueError("`gguf_file` is for text models, not for vision towers. Leave it out.")
    config = vision_config_of(vision, load_kwargs, reads_weights=False)
    tower_class: Any = own_class(config) or AutoModel
    tower, lost = _load("vision", tower_class, vision, load_kwargs, config)
    # Checkpoints of a classifier have no weights for the pooler. Its output is not used, so it gets zeros, which are
    # the same at each load.
    pooler = [name for name in lost if "pooler" in name.split(".")]
    _check_whole("vision", vision, tower, [name for name in lost if name not in pooler])
    with torch.no_grad():
        for name in pooler:
            tower.get_parameter_or_buffer(name).zero_()
    return tower


@dataclass(frozen=True)
class BaseSource:
    """Where the checkpoint of a base is. `revision`, `subfolder` and `gguf_file` are those of `from_pretrained`."""

    name: str  # a Hub id, or the absolute path of a folder
    revision: str | None = None
    subfolder: str | None = None
    gguf_file: str | None = None

    @classmethod
    def named(cls, name: str, *where: str | None) -> BaseSource:
        """Returns a base by its name. The path of a folder becomes absolute."""
        return cls(os.path.abspath(name) if os.path.isdir(name) else name, *where)

    @classmethod
    def of_record(cls, record: dict[str, Any]) -> BaseSource:
        """Reads the entries of [`record`] in a manifest."""
        return cls(record["name_or_path"], record["revision"], record["subfolder"], record.get("gguf_file"))

    def record(self) -> dict[str, Any]:
        """Returns the entries of this base in a manifest."""
        where = {"name_or_path": self.name, "revision": self.revision, "subfolder": self.subfolder}
        return where if self.gguf_file is None else {**where, "gguf_file": self.gguf_file}

    def note_in(self, config: PreTrainedConfig) -> None:
        """Writes the base into the configuration of its part, where [`base_of`] finds it."""
        config.name_or_path = self.name
        for name in WHERE:
            vars(config).pop(f"base_{name}", None)
            if getattr(self, name) is not None:
                setattr(config, f"base_{name}", getattr(self, name))

    def load(self, load: Callable[..., PreTrainedModel], **load_kwargs: Any) -> PreTrainedModel:
        """Loads the base with [`load_text`] or [`load_vision`]."""
        return load(self.name, **given(WHERE, vars(self)), **load_kwargs)

    @property
    def folder(self) -> str:
        """The folder of its files, if the base is on this machine."""
        return os.path.join(self.name, self.subfolder or "")

    def __str__(self) -> str:
        return self.name if self.gguf_file is None else os.path.join(self.name, self.subfolder or "", self.gguf_file)

    def check_there(self, what: str, argument: str) -> None:
        """Raises a `ValueError` for a folder or a file of this machine that no longer exists. A Hub id has at most one
        slash. `what` begins the message.
        """
        kind, exists = ("folder", os.path.isdir) if self.gguf_file is None else ("file", os.path.isfile)
        is_path = os.path.isabs(self.name) or self.name.count("/") > 1
        if is_path and not exists(str(self)):
            raise ValueError(
                f"{what} {self}, where there is no {kind} now. Pass `{argument}=`, the Hub id or folder of that base."
            )

    def resolved(self, **hub: Any) -> BaseSource:
        """Returns the same base with the commit that its revision means now. A folder keeps its revision."""
        revision = resolve_revision(self.name, self.revision, **hub)
        return replace(self, revision=None if revision is None else getattr(revision, "resolved", str(revision)))


def note_base(config: PreTrainedConfig, source: str | Path | PreTrainedModel, load_kwargs: dict[str, Any]) -> None:
    """Notes in the configuration of a part where it came from.

    Args:
        source: the name of the checkpoint, or the loaded model that the part is, or is taken from.
        load_kwargs (`dict`): keyword arguments of `from_pretrained`.
    """
    if isinstance(source, PreTrainedModel):
        name = source.config.name_or_path
        where = [getattr(config, f"base_{key}", None) for key in WHERE[:2]] + [gguf_file_of(source)]
    else:
        name, where = str(source), [load_kwargs.get(key) or None for key in WHERE]
    if name:
        BaseSource.named(name, *where).note_in(config)


def base_of(config: PreTrainedConfig) -> BaseSource | None:
    """Returns the checkpoint that the configuration of a part names. None if it names none."""
    name = config.name_or_path
    return BaseSource.named(name, *(getattr(config, f"base_{key}", None) for key in WHERE)) if name else None


def named_base(argument: str, named: str | os.PathLike[str] | None) -> BaseSource | None:
    """Returns the base that the caller names as `text_base` or `vision_base`. None if there is no name."""
    if named is None:
        return None
    name = os.fspath(named)
    if argument == "text_base" and is_gguf_path(name):
        folder, where = split_gguf(argument, name, {})
        return BaseSource(folder, **where)
    return BaseSource.named(name)


def text_config_of(
    text: str | Path | PreTrainedModel, load_kwargs: dict[str, Any], reads_weights: bool = True
) -> PreTrainedConfig:
    """Returns the configuration of the text model in a checkpoint or a loaded model. Errors are those of `retrofit`.

    Args:
        reads_weights (`bool`, defaults to `True`): also check the weights, which the caller will read next.
    """
    if isinstance(text, PreTrainedModel):
        check_kind(text)  # so early, because a tower may be loaded next; the layers are checked in the new model
        return text.config
    if "gguf_file" in load_kwargs:
        config = gguf_config(gguf_path(text, load_kwargs))
    else:
        config = _read_config(text, load_kwargs)
    if config.model_type == "xattn":
        raise ValueError(f"`text` ({text}) already has cross-attention blocks. Retrofit its text-only base instead.")
    if config.is_encoder_decoder:
        raise ValueError(
            f"`text` ({text}) is an encoder-decoder model ({config.model_type}), which already has cross-attention. "
            "Use a decoder-only checkpoint."
        )
    if is_composite(config):
        composite_class(config)
        config = text_half_config(config)
    if (reason := architecture(config.model_type).refused) is not None:
        raise ValueError(f"`text` ({text}) is a {config.model_type!r} model, which cannot take blocks: {reason}.")
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and not load_kwargs.get("trust_remote_code"):
        raise ValueError(f"`text` ({text}) is a {config.model_type!r} model, not a causal language model.")
    if reads_weights and "gguf_file" not in load_kwargs:
        check_folder(text, load_kwargs)
    return config


def vision_config_of(
    vision: str | Path | PreTrainedModel, load_kwargs: dict[str, Any], reads_weights: bool = True
) -> PreTrainedConfig:
    """Returns the configuration of the vision tower in a checkpoint or a loaded model, as [`text_config_of`] does for
    the text model.
    """
    if isinstance(vision, PreTrainedModel):
        config = vision.config
        if getattr(config, "vision_config", None) is not None:
            raise ValueError(
                f"Expected `vision` to be a vision model, got a {type(vision).__name__}, which is more than a vision "
                "model. Pass its vision part, or the folder of its checkpoint."
            )
        check_tower_class("vision", type(vision))
        check_comes_back("vision", vision)
        return config
    config = _read_config(vision, load_kwargs)
    config = getattr(config, "vision_config", None) or config
    if hasattr(config, "vision_use_head"):
        config.vision_use_head = False  # the pooled output is not used, so this head would never get a gradient
    check_tower_config("vision", config)
    if reads_weights:
        check_folder(vision, load_kwargs)
    return config


def check_load_kwargs(caller: Callable[..., Any], load_kwargs: dict[str, Any], *sources: Any) -> None:
    """Checks keyword arguments of `from_pretrained`.

    Raises:
        TypeError: for a keyword that `from_pretrained` does not take.
        ValueError: if there are keywords, but all `sources` are loaded models.
    """
    refuse_unknown(caller, load_kwargs, LOAD_KEYWORDS)
    if load_kwargs and all(source is None or isinstance(source, PreTrainedModel) for source in sources):
        raise ValueError(
            f"`{next(iter(load_kwargs))}` is an argument for loading a checkpoint, but the models are already loaded. "
            "Pass it to their `from_pretrained`."
        )


def _read_config(source: str | Path, load_kwargs: dict[str, Any]) -> PreTrainedConfig:
    check_config_file(source, load_kwargs)
    return AutoConfig.from_pretrained(source, **given(CONFIG_KEYWORDS, load_kwargs))


def _load(
    name: str, auto_class: Any, source: str | Path, load_kwargs: dict[str, Any], config: Any = None
) -> tuple[PreTrainedModel, set[str]]:
    """Loads a base, after a check that its configuration fits its weights.

    Returns:
        the model, and the names of the weights that its checkpoint lacks.
    """
    checked = check_folder(source, load_kwargs)
    if checked is not None and checked.headers and not load_kwargs.get("trust_remote_code"):
        known = config or AutoConfig.from_pretrained(source, **given(CONFIG_KEYWORDS, load_kwargs))
        quantized = is_quantized(checked.fields) or load_kwargs.get("quantization_config") is not None
        check_size(auto_class, known, checked.headers, quantized, f"`{name}` ({source})")
    options = {} if config is None else {"config": config}
    options |= {"output_loading_info": True, "use_safetensors": True}
    model, found = auto_class.from_pretrained(source, **load_kwargs | options)
    return model, found["missing_keys"]


def _check_whole(name: str, source: str | Path, model: PreTrainedModel, lost: list[str]) -> None:
    """Raises a `ValueError` for a base that lacks weights. For a quantized base, the quantizer has checked that."""
    if lost and getattr(model, "hf_quantizer", None) is None:
        raise ValueError(
            f"{incomplete(f'`{name}` ({source})', lost, ())} If random values will do for them, load the model with "
            "transformers, and pass the model in place of its name."
        )


def is_composite(config: PreTrainedConfig) -> bool:
    """Whether a configuration is that of a larger model, with a decoder among other parts."""
    if config.model_type == "xattn" or config.is_encoder_decoder:
        return False
    return config.get_text_config(decoder=True) is not config


def text_half_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """Returns the configuration of the decoder in a larger model. Raises a `ValueError` if transformers has no causal
    language model for the decoder.
    """
    text_config = config.get_text_config(decoder=True)
    if type(text_config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(
            f"The text half of a {config.model_type!r} model is a {text_config.model_type!r} decoder, and transformers "
            "has no causal language model of that type."
        )
    return text_config


def composite_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """Returns the class that loads a checkpoint of a larger model with its head. Raises a `ValueError` if transformers
    registers no such class.
    """
    mapping: Any
    for mapping in (MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, MODEL_FOR_MULTIMODAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING):
        if type(config) in mapping:
            return mapping[type(config)]
    raise ValueError(
        f"Expected `text` to be a language model, got a {config.model_type!r} checkpoint, for which transformers has "
        "no class that generates text. A vision model goes into `vision`."
    )


def text_half(model: PreTrainedModel) -> PreTrainedModel:
    """Makes a text model of the decoder and the head of a larger model. Returns a text model as it is.

    Raises:
        ValueError: if the larger model has no head, or no decoder of the class that its `text_config` names.
    """
    if not is_composite(model.config):
        return model
    text_config = text_half_config(model.config)
    text_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(text_config)]
    parts = (module for module in model.modules() if isinstance(module, PreTrainedModel))
    whole = next((module for module in parts if type(module) is text_class), None)
    if whole is not None:
        share_quantizer(model, whole)
        return whole.train(model.training)
    with torch.device("meta"):
        text = text_class._from_config(text_config)
    body: Any = next((module for module in model.modules() if type(module) is type(text.base_model)), None)
    head = model.get_output_embeddings()
    if body is None or head is None:
        missing = type(text.base_model).__name__ if body is None else "head"
        raise ValueError(
            f"{type(model).__name__} (model_type {model.config.model_type!r}) holds no {missing}, so its text half "
            "cannot be used. Load the checkpoint of a text-only decoder instead."
        )
    setattr(text, text.base_model_prefix, body)
    text.set_output_embeddings(head)
    text.config = body.config
    # The larger model decides by its own configuration whether the head is tied.
    tied = getattr(head, "weight", None) is getattr(body.get_input_embeddings(), "weight", head)
    if bool(getattr(text.config, "tie_word_embeddings", tied)) != tied:
        text.config.tie_word_embeddings = tied
        text.all_tied_weights_keys = text.get_expanded_tied_weights_keys(all_submodels=True)
    if left := [name for name, parameter in text.named_parameters() if parameter.is_meta]:
        raise ValueError(f"{type(model).__name__} holds no weights for {left} of {type(text).__name__}.")
    if getattr(model, "generation_config", None) is not None:
        text.generation_config = model.generation_config
    share_quantizer(model, text)
    return text.train(model.training)
