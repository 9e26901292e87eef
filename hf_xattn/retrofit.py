"""A text-only checkpoint, and optionally a vision checkpoint, to a model that sees."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.utils import logging

from .architectures import architecture
from .configuration_xattn import (
    CrossAttentionConfig,
    XAttnConfig,
    complete_cross_attention_config,
    every_nth_layer,
)
from .insertion import check_kind
from .modeling_xattn import XAttnForConditionalGeneration
from .sizes import TILED_VISION_TYPES, text_num_hidden_layers, vision_hidden_size
from .text_half import composite_class, is_composite, text_half, text_half_config
from .tower import check_tower_class, check_tower_config


logger = logging.get_logger(__name__)


def retrofit(
    text: str | Path | PreTrainedModel,
    vision: str | Path | PreTrainedModel | None = None,
    *,
    cross_attention_layers: list[int] | None = None,
    every: int = 4,
    cross_attention: CrossAttentionConfig | dict[str, Any] | None = None,
    image_token_id: int | None = None,
    image_visibility: str = "all",
    connector_type: str = "mlp",
    **load_kwargs,
) -> XAttnForConditionalGeneration:
    """Puts gated cross-attention blocks into a text-only causal language model.

    The decoder's weights stay as they are, under their names, and a fresh model gives the base's logits bit for bit. A
    loaded model is taken over, not copied: it holds the blocks afterwards, and still answers text-only calls.

    Args:
        text (`str`, `Path` or `PreTrainedModel`): a Hub id, a local folder, or a loaded causal language model. Of a larger
            model (a vision-language model with a `text_config`) the text half is taken, and the rest left behind.
        vision (`str`, `Path` or `PreTrainedModel`, *optional*): likewise, a vision model whose output has
            `last_hidden_state`. Without one the model takes `cross_attention_states`.
        cross_attention_layers (`list[int]`, *optional*): decoder layers that get a block in front, counted from 0.
        every (`int`, defaults to 4): without `cross_attention_layers`, layers `every - 1`, `2 * every - 1`, ...
        cross_attention ([`CrossAttentionConfig`] or `dict`, *optional*): the blocks' options; sizes that are not given
            follow the decoder's.
        image_token_id (`int`, *optional*), image_visibility (`str`), connector_type (`str`): see [`XAttnConfig`].
        load_kwargs: for `from_pretrained` of both checkpoints: `dtype`, `revision`, `trust_remote_code`, ...

    Raises:
        ValueError: for a checkpoint without safetensors, a model that is no decoder or has blocks already, a wrong layer,
            or options that contradict one another. All of these before a weight is loaded, where a configuration tells.
    """
    if isinstance(text, PreTrainedModel):
        text = text_half(text)
    text_config = _text_config(text, load_kwargs)
    if cross_attention_layers is None:
        cross_attention_layers = every_nth_layer(every, text_num_hidden_layers(text_config))
    vision_config = None if vision is None else _vision_config(vision, load_kwargs)
    if not isinstance(cross_attention, CrossAttentionConfig):
        if cross_attention is not None and not isinstance(cross_attention, dict):
            raise ValueError(
                f"`cross_attention` must be a CrossAttentionConfig or a dict of its fields, got {type(cross_attention)}."
            )
        if vision_config is not None and connector_type in ("identity", "perceiver"):
            cross_attention = {"context_size": vision_hidden_size(vision_config), **(cross_attention or {})}
        cross_attention = complete_cross_attention_config(cross_attention, text_config)
    if not cross_attention.starts_at_identity:
        logger.warning(
            "`cross_attention` starts with a non-zero gate and non-zero projections: the fresh model differs from its base."
        )
    options: dict[str, Any] = {
        "cross_attention_config": cross_attention,
        "cross_attention_layers": cross_attention_layers,
        "image_token_id": image_token_id,
        "image_visibility": image_visibility,
        "connector_type": connector_type,
    }
    XAttnConfig(text_config=text_config, vision_config=vision_config, **options)  # every check, before a weight is read

    if not isinstance(text, PreTrainedModel):
        text = load_text(text, **load_kwargs)
    if vision is not None and not isinstance(vision, PreTrainedModel):
        vision = load_vision(vision, **{"dtype": text.dtype, **load_kwargs})
    config = XAttnConfig(
        text_config=text.config, vision_config=None if vision is None else vision.config, **options, dtype=text.dtype
    )
    model = XAttnForConditionalGeneration(config, text_model=text, vision_tower=vision)
    model.train(text.training)
    return model


def load_text(text: str | Path, **load_kwargs) -> PreTrainedModel:
    """The causal language model of a checkpoint: itself, or the text half of a larger one. Arguments and errors as of
    [`retrofit`]."""
    _text_config(text, load_kwargs)
    source = AutoConfig.from_pretrained(text, **_config_kwargs(load_kwargs))
    loader = composite_class(source) if is_composite(source) else AutoModelForCausalLM
    return text_half(_load(loader, text, load_kwargs))


def load_vision(vision: str | Path, **load_kwargs) -> PreTrainedModel:
    """The vision tower of a checkpoint. Arguments and errors as of [`retrofit`]."""
    return _load(AutoModel, vision, load_kwargs, config=_vision_config(vision, load_kwargs))


def _text_config(text: str | Path | PreTrainedModel, load_kwargs: dict[str, Any]) -> PreTrainedConfig:
    if isinstance(text, PreTrainedModel):
        check_kind(text)  # before a tower is loaded; the model around it looks at the layers
        return text.config
    if not isinstance(text, (str, Path)):
        raise TypeError(f"`text` must be a Hub id, a folder or a PreTrainedModel, got {type(text).__name__}.")
    config = AutoConfig.from_pretrained(text, **_config_kwargs(load_kwargs))
    if config.model_type == "xattn":
        raise ValueError(f"`text` ({text}) already has cross-attention blocks. Retrofit its text-only base instead.")
    if config.is_encoder_decoder:
        raise ValueError(
            f"`text` ({text}) is an encoder-decoder model ({config.model_type}): it has cross-attention of its own. Use a "
            "decoder-only checkpoint."
        )
    if is_composite(config):
        composite_class(config)
        config = text_half_config(config)
    if (reason := architecture(config.model_type).refused) is not None:
        raise ValueError(f"`text` ({text}) is a {config.model_type!r} model, which cannot take blocks: {reason}.")
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and not load_kwargs.get("trust_remote_code"):
        raise ValueError(f"`text` ({text}) is a {config.model_type!r} model, not a causal language model.")
    _check_safetensors("text", text)
    return config


def _vision_config(vision: str | Path | PreTrainedModel, load_kwargs: dict[str, Any]) -> PreTrainedConfig:
    if isinstance(vision, PreTrainedModel):
        config = vision.config
        if getattr(config, "vision_config", None) is not None:
            raise ValueError(
                f"`vision` is a {type(vision).__name__}, which holds more than a vision model. Pass its vision part, or its "
                "folder."
            )
        if config.model_type not in TILED_VISION_TYPES:
            check_tower_class("vision", type(vision))
        return config
    if not isinstance(vision, (str, Path)):
        raise TypeError(f"`vision` must be a Hub id, a folder or a PreTrainedModel, got {type(vision).__name__}.")
    config = AutoConfig.from_pretrained(vision, **_config_kwargs(load_kwargs))
    config = getattr(config, "vision_config", None) or config
    if hasattr(config, "vision_use_head"):
        config.vision_use_head = False  # its pooled output is not used, so it would never get a gradient
    check_tower_config("vision", config)
    _check_safetensors("vision", vision)
    return config


def _config_kwargs(load_kwargs: dict[str, Any]) -> dict[str, Any]:
    names = ("revision", "trust_remote_code", "token", "cache_dir", "local_files_only")
    return {name: load_kwargs[name] for name in names if name in load_kwargs}


def _check_safetensors(name: str, source: str | Path) -> None:
    """A local folder must hold safetensors: nothing pickled is ever read."""
    folder = Path(source)
    if folder.is_dir() and not any(folder.glob("*.safetensors")):
        others = sorted(path.name for path in folder.glob("*.bin"))
        hint = f" It holds {others}: load them where you trust them, and `save_pretrained` again." if others else ""
        raise ValueError(f"`{name}` ({source}) holds no *.safetensors file.{hint}")


def _load(auto_class, source: str | Path, load_kwargs: dict[str, Any], **kwargs) -> PreTrainedModel:
    return auto_class.from_pretrained(source, **{"use_safetensors": True, **load_kwargs, **kwargs})


def freeze_base(model: XAttnForConditionalGeneration, vision: bool = True) -> XAttnForConditionalGeneration:
    """Leaves only what was added trainable: blocks and connector.

    Args:
        model ([`XAttnForConditionalGeneration`]): changed in place.
        vision (`bool`, defaults to `True`): freeze the vision tower as well.

    Raises:
        TypeError: for a model without blocks.
    """
    if not isinstance(model, XAttnForConditionalGeneration):
        raise TypeError(
            f"Expected `model` to be an XAttnForConditionalGeneration, got {type(model).__name__}: `retrofit` makes one."
        )
    model.requires_grad_(False)
    for block in model.blocks:
        block.requires_grad_(True)
    if model.model.connector is not None:
        model.model.connector.requires_grad_(True)
    if model.model.vision_tower is not None:
        model.model.vision_tower.requires_grad_(not vision)
    return model


__all__ = ["freeze_base", "retrofit"]
