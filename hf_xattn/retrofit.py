"""Turns a text-only checkpoint, and optionally a vision checkpoint, into a model that can see images."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.utils import logging

from .architectures import architecture
from .block_places import every_nth_layer
from .config_checks import check_parts
from .configuration_xattn import (
    CrossAttentionConfig,
    PerceiverConfig,
    XAttnConfig,
    complete_cross_attention_config,
)
from .insertion import check_kind
from .keywords import refuse_unknown
from .modeling_xattn import XAttnForConditionalGeneration
from .paths import check_source
from .quantized_weights import check_trainable
from .sizes import TILED_VISION_TYPES, text_num_hidden_layers, vision_hidden_size
from .text_half import composite_class, is_composite, text_half, text_half_config
from .tower import check_tower_class, check_tower_config


logger = logging.get_logger(__name__)

# Keywords of `from_pretrained` that locate a checkpoint. The configuration needs them too.
CONFIG_KEYWORDS = (
    "cache_dir",
    "code_revision",
    "force_download",
    "local_files_only",
    "proxies",
    "revision",
    "subfolder",
    "token",
    "trust_remote_code",
)
# All keywords that go to `from_pretrained`. `config`, `state_dict`, `gguf_file` and `output_loading_info` are not allowed: `retrofit` reads
# the checkpoint unchanged, and returns only a model.
LOAD_KEYWORDS = frozenset(CONFIG_KEYWORDS) | frozenset(
    """adapter_kwargs adapter_name allow_all_kernels attn_implementation device_map device_mesh disable_mmap distributed_config dtype
experts_implementation fusion_config generation_config ignore_mismatched_sizes kernel_config key_mapping low_cpu_mem_usage max_memory
offload_buffers offload_folder quantization_config torch_dtype tp_plan tp_size tqdm_class use_kernels use_safetensors variant
weights_only""".split()
)


def retrofit(
    text: str | Path | PreTrainedModel,
    vision: str | Path | PreTrainedModel | None = None,
    *,
    cross_attention_layers: list[int] | None = None,
    every: int = 4,
    cross_attention: CrossAttentionConfig | dict[str, Any] | None = None,
    image_token_id: int | None = None,
    image_visibility: str = "all",
    additional_vocab_size: int = 0,
    additional_vocab_in_head: bool = False,
    connector_type: str = "mlp",
    connector_hidden_act: str = "gelu",
    connector_bias: bool = True,
    vision_feature_select_strategy: str = "full",
    perceiver_config: PerceiverConfig | dict[str, Any] | None = None,
    **load_kwargs,
) -> XAttnForConditionalGeneration:
    """Puts gated cross-attention blocks into a text-only causal language model.

    The decoder's weights keep their values and their names, and a fresh model gives the base's logits bit for bit. A loaded
    model is not copied: it contains the blocks afterwards, and still works for text-only calls.

    Args:
        text (`str`, `Path` or `PreTrainedModel`): a Hub id, a local folder, or a loaded causal language model. From a larger
            model (a vision-language model with a `text_config`) only the text half is used.
        vision (`str`, `Path` or `PreTrainedModel`, *optional*): likewise, a vision model whose output has
            `last_hidden_state`. Without a vision model, the new model takes `cross_attention_states`.
        cross_attention_layers (`list[int]`, *optional*): indices, from 0, of the decoder layers that get a block in front.
        every (`int`, defaults to 4): without `cross_attention_layers`, layers `every - 1`, `2 * every - 1`, ...
        cross_attention ([`CrossAttentionConfig`] or `dict`, *optional*): configuration of the blocks. Sizes that a `dict`
            leaves out follow the decoder's.
        image_token_id, image_visibility, additional_vocab_size, additional_vocab_in_head, connector_type, connector_hidden_act,
            connector_bias, vision_feature_select_strategy, perceiver_config: fields of [`XAttnConfig`].
        load_kwargs: keyword arguments for `from_pretrained` of the checkpoints: `dtype`, `revision`, `trust_remote_code`, ...
            Only allowed if there is a checkpoint to load. `attn_implementation` may be a `dict` with one entry for each part:
            `{"text_config": ..., "vision_config": ..., "cross_attention_config": ...}`. A `quantization_config` is for the text
            model: blocks, connector and vision tower stay in high precision, on the device of the text model.

    Raises:
        TypeError: for an unknown keyword, or if `text` or `vision` is neither a model nor a checkpoint.
        ValueError: for a checkpoint without safetensors, a model that is not a decoder or already has blocks, a wrong layer, or
            contradictory options. If the configuration is enough to find the error, it is raised before weights are loaded.
    """
    _check_load_kwargs(retrofit, load_kwargs, text, vision)
    attn_implementation = load_kwargs.get("attn_implementation")
    if isinstance(attn_implementation, dict):
        check_parts("attn_implementation", attn_implementation, XAttnConfig.sub_configs)
        del load_kwargs["attn_implementation"]
    if isinstance(text, PreTrainedModel):
        if "quantization_config" in load_kwargs:
            raise ValueError(
                "`quantization_config` quantizes the text model, but `text` is loaded already. Pass `quantization_config` to its "
                "`from_pretrained`, or pass its folder to `retrofit`."
            )
        text = text_half(text)
    text_config = _text_config(text, load_kwargs)
    if cross_attention_layers is None:
        cross_attention_layers = every_nth_layer(every, text_num_hidden_layers(text_config))
    vision_config = None if vision is None else _vision_config(vision, load_kwargs)
    if not isinstance(cross_attention, CrossAttentionConfig):
        if cross_attention is not None and not isinstance(cross_attention, dict):
            raise ValueError(
                "`cross_attention` must be a CrossAttentionConfig or a dict of its fields, got "
                f"{type(cross_attention).__name__}."
            )
        if vision_config is not None and connector_type in ("identity", "perceiver"):
            cross_attention = {"context_size": vision_hidden_size(vision_config), **(cross_attention or {})}
        cross_attention = complete_cross_attention_config(cross_attention, text_config)
    if not cross_attention.starts_at_identity:
        logger.warning(
            "`cross_attention` starts with a non-zero gate and non-zero projections, so the logits of the fresh model differ from its base."
        )
    options: dict[str, Any] = {
        "cross_attention_config": cross_attention,
        "cross_attention_layers": cross_attention_layers,
        "image_token_id": image_token_id,
        "image_visibility": image_visibility,
        "additional_vocab_size": additional_vocab_size,
        "additional_vocab_in_head": additional_vocab_in_head,
        "connector_type": connector_type,
        "connector_hidden_act": connector_hidden_act,
        "connector_bias": connector_bias,
        "vision_feature_select_strategy": vision_feature_select_strategy,
        "perceiver_config": perceiver_config,
    }
    XAttnConfig(
        text_config=text_config, vision_config=vision_config, **options
    )  # makes all checks before weights are read

    if not isinstance(text, PreTrainedModel):
        text = load_text(text, **load_kwargs)
    tower: Any = vision
    if vision is not None and not isinstance(vision, PreTrainedModel):
        tower_kwargs = {name: value for name, value in load_kwargs.items() if name != "quantization_config"}
        tower = load_vision(vision, **{"dtype": text.dtype, **tower_kwargs})
        if "quantization_config" in load_kwargs and "device_map" not in load_kwargs:
            tower = tower.to(text.device)  # a quantizer may have put the text model on the accelerator
    config = XAttnConfig(
        text_config=text.config, vision_config=None if tower is None else tower.config, **options, dtype=text.dtype
    )
    model = XAttnForConditionalGeneration(config, text_model=text, vision_tower=tower)
    if isinstance(attn_implementation, dict):
        model.set_attn_implementation(attn_implementation)
    model.train(text.training)
    return model


def load_text(text: str | Path, **load_kwargs) -> PreTrainedModel:
    """Loads a causal language model, or the text half of a larger model. Arguments and errors are those of [`retrofit`]."""
    _check_load_kwargs(load_text, load_kwargs, text)
    _text_config(text, load_kwargs)
    source = AutoConfig.from_pretrained(text, **_config_kwargs(load_kwargs))
    loader = composite_class(source) if is_composite(source) else AutoModelForCausalLM
    return text_half(_load(loader, text, load_kwargs))


def load_vision(vision: str | Path, **load_kwargs) -> PreTrainedModel:
    """Loads the vision tower of a checkpoint. Arguments and errors are those of [`retrofit`]."""
    _check_load_kwargs(load_vision, load_kwargs, vision)
    return _load(AutoModel, vision, load_kwargs, config=_vision_config(vision, load_kwargs))


def _text_config(text: str | Path | PreTrainedModel, load_kwargs: dict[str, Any]) -> PreTrainedConfig:
    if isinstance(text, PreTrainedModel):
        check_kind(text)  # before a tower is loaded; the new model checks the layers
        return text.config
    if not isinstance(text, (str, Path)):
        raise TypeError(f"Expected `text` to be a Hub id, a folder or a PreTrainedModel, got {type(text).__name__}.")
    check_source("text", text)
    config = AutoConfig.from_pretrained(text, **_config_kwargs(load_kwargs))
    if config.model_type == "xattn":
        raise ValueError(f"`text` ({text}) already has cross-attention blocks. Retrofit its text-only base instead.")
    if config.is_encoder_decoder:
        raise ValueError(
            f"`text` ({text}) is an encoder-decoder model ({config.model_type}), which already has cross-attention. Use a "
            "decoder-only checkpoint."
        )
    if is_composite(config):
        composite_class(config)
        config = text_half_config(config)
    if (reason := architecture(config.model_type).refused) is not None:
        raise ValueError(f"`text` ({text}) is a {config.model_type!r} model, which cannot take blocks: {reason}.")
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and not load_kwargs.get("trust_remote_code"):
        raise ValueError(f"`text` ({text}) is a {config.model_type!r} model, not a causal language model.")
    _check_safetensors("text", text, load_kwargs.get("subfolder") or "")
    return config


def _vision_config(vision: str | Path | PreTrainedModel, load_kwargs: dict[str, Any]) -> PreTrainedConfig:
    if isinstance(vision, PreTrainedModel):
        config = vision.config
        if getattr(config, "vision_config", None) is not None:
            raise ValueError(
                f"Expected `vision` to be a vision model, got a {type(vision).__name__}, which contains more than a vision model. "
                "Pass its vision part, or its folder."
            )
        if config.model_type not in TILED_VISION_TYPES:
            check_tower_class("vision", type(vision))
        return config
    if not isinstance(vision, (str, Path)):
        raise TypeError(
            f"Expected `vision` to be a Hub id, a folder or a PreTrainedModel, got {type(vision).__name__}."
        )
    check_source("vision", vision)
    config = AutoConfig.from_pretrained(vision, **_config_kwargs(load_kwargs))
    config = getattr(config, "vision_config", None) or config
    if hasattr(config, "vision_use_head"):
        config.vision_use_head = False  # the pooled output is not used, so this head would never get a gradient
    check_tower_config("vision", config)
    _check_safetensors("vision", vision, load_kwargs.get("subfolder") or "")
    return config


def _check_load_kwargs(caller: Callable[..., Any], load_kwargs: dict[str, Any], *sources: Any) -> None:
    """Raises an error for a keyword that `from_pretrained` does not take, or that no checkpoint would use."""
    refuse_unknown(caller, load_kwargs, LOAD_KEYWORDS)
    if load_kwargs and all(source is None or isinstance(source, PreTrainedModel) for source in sources):
        raise ValueError(
            f"`{next(iter(load_kwargs))}` is an argument for loading a checkpoint, but the models are already loaded. Pass it to "
            "their `from_pretrained`."
        )
    if load_kwargs.get("use_safetensors") is False:
        raise ValueError(
            "`use_safetensors=False` would read pickled weights, which can run code. Only safetensors are supported."
        )


def _config_kwargs(load_kwargs: dict[str, Any]) -> dict[str, Any]:
    return {name: load_kwargs[name] for name in CONFIG_KEYWORDS if name in load_kwargs}


def _check_safetensors(name: str, source: str | Path, subfolder: str = "") -> None:
    """Raises a `ValueError` if a local folder holds no safetensors. Pickled weights are never read."""
    folder = Path(source) / subfolder
    if folder.is_dir() and not any(folder.glob("*.safetensors")):
        others = sorted(path.name for path in folder.glob("*.bin"))
        hint = (
            f" It holds {others}. If you trust these files, load the model with transformers and save it again."
            if others
            else ""
        )
        raise ValueError(f"`{name}` ({source}) holds no *.safetensors file.{hint}")


def _load(auto_class, source: str | Path, load_kwargs: dict[str, Any], **kwargs) -> PreTrainedModel:
    return auto_class.from_pretrained(source, **{"use_safetensors": True, **load_kwargs, **kwargs})


def freeze_base(model: XAttnForConditionalGeneration, vision: bool = True) -> XAttnForConditionalGeneration:
    """Freezes all weights except those of the blocks and the connector.

    Args:
        model ([`XAttnForConditionalGeneration`]): changed in place.
        vision (`bool`, defaults to `True`): also freeze the vision tower.

    The base may be quantized: then too the blocks and the connector train, in high precision.

    Raises:
        TypeError: for a model without blocks.
        ValueError: for quantized weights in what shall train. The model is not changed then.
    """
    if not isinstance(model, XAttnForConditionalGeneration):
        raise TypeError(
            f"Expected `model` to be an XAttnForConditionalGeneration, got {type(model).__name__}. `retrofit` makes such a model."
        )
    remedy = "Load the base with `quantization_config`: blocks and connector then stay in high precision."
    for block in model.blocks:
        check_trainable(f"block {block.layer_idx}", block, remedy)
    if model.model.connector is not None:
        check_trainable("the connector", model.model.connector, remedy)
    if model.model.vision_tower is not None and not vision:
        remedy = "Load the tower without `quantization_config`, or leave it frozen: `freeze_base(model, vision=True)`."
        check_trainable("the vision tower (`vision=False`)", model.model.vision_tower, remedy)
    model.requires_grad_(False)
    for block in model.blocks:
        block.requires_grad_(True)
    if model.model.connector is not None:
        model.model.connector.requires_grad_(True)
    if model.model.vision_tower is not None:
        model.model.vision_tower.requires_grad_(not vision)
    return model


__all__ = ["freeze_base", "retrofit"]
