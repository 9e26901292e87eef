"""Turns a text-only checkpoint, and optionally a vision checkpoint, into a model that can see images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from .checkpoints.bases import (
    check_load_kwargs,
    load_text,
    load_vision,
    note_base,
    text_config_of,
    text_half,
    vision_config_of,
)
from .checkpoints.gguf_files import split_gguf
from .checkpoints.own_parts import refuse_adapter_layers
from .checkpoints.quantization import return_quantizer
from .checkpoints.removal import (
    INSERTION,
    Insertion,
    added_names,
    leave_out_added,
    recorded,
    take_out,
)
from .configuration_xattn import CrossAttentionConfig, PerceiverConfig, XAttnConfig
from .decoders.derived import original_class
from .modeling_xattn import XAttnForConditionalGeneration, XAttnModel
from .parts.grid_code import is_square
from .parts.measured_towers import Measured, measured, measured_features
from .utils.architectures import text_num_hidden_layers
from .utils.architectures import vision_hidden_size as width_of
from .utils.config_checks import check_parts, every_nth_layer


logger = logging.get_logger(__name__)

OF_GATE = {"gate", "gate_options", "gate_granularity", "gate_init"}


def retrofit(
    text: str | Path | PreTrainedModel,
    vision: str | Path | PreTrainedModel | None = None,
    *,
    cross_attention_layers: list[int] | None = None,
    layers: list[int] | None = None,
    every: int = 4,
    cross_attention: CrossAttentionConfig | dict[str, Any] | None = None,
    image_token_id: int | None = None,
    image_visibility: str = "all",
    additional_vocab_size: int = 0,
    additional_vocab_in_head: bool = False,
    connector_type: str | None = None,
    connector_options: dict[str, Any] | None = None,
    connector_hidden_act: str = "gelu",
    connector_bias: bool = True,
    vision_feature_select_strategy: str = "full",
    vision_feature_layer: int | list[int] | None = None,
    vision_hidden_size: int | None = None,
    perceiver_config: PerceiverConfig | dict[str, Any] | None = None,
    **load_kwargs,
) -> XAttnForConditionalGeneration:
    """Puts gated cross-attention blocks into a text model, and connects them to a vision tower.

    The weights of the text model keep their values and their names, and a fresh model gives the logits of the text
    model bit for bit.

    If `text` is a loaded model, it is not copied, but gets the blocks itself. It still works for text-only calls, and
    its own `save_pretrained` saves what it saved before. [`remove_blocks`] takes the blocks out again.

    Args:
        text (`str`, `Path` or `PreTrainedModel`): The text model: a Hub id, a local folder, a path that ends in
            `.gguf`, or a loaded causal language model. From a vision-language model (with a `text_config`) only the
            text half is used.
        vision (`str`, `Path` or `PreTrainedModel`, *optional*): The vision tower: a Hub id, a local folder or a loaded
            vision model, whose output has `last_hidden_state`. Without a vision tower, the new model takes
            `cross_attention_states` in place of pixels.
        cross_attention_layers (`list[int]`, *optional*): Indices, from 0, of the decoder layers that get a block in
            front. If an index is repeated, the layer gets several blocks, one after the other.
        layers (`list[int]`, *optional*): A shorter name of `cross_attention_layers`.
        every (`int`, defaults to 4): If `cross_attention_layers` is left out, the layers `every - 1`, `2 * every - 1`,
            ... get a block.
        cross_attention ([`CrossAttentionConfig`] or `dict`, *optional*): Configuration of the blocks. The sizes that a
            `dict` leaves out are those of the text model. If a `dict` sets no field of the gate, the gate is `"token"`:
            text that has nothing to do with the image can then ignore it.
        connector_type (`str`, *optional*): See [`XAttnConfig`]. By default it is `"mlp_2d"` if the tower turns a square
            image into a square grid of tokens, and `"mlp"` otherwise. Pass `"mlp"` if your image processor makes
            images that are not square.
        image_token_id, image_visibility, additional_vocab_size, additional_vocab_in_head, connector_options,
            connector_hidden_act, connector_bias, vision_feature_select_strategy, vision_feature_layer,
            vision_hidden_size, perceiver_config: See [`XAttnConfig`].
        load_kwargs: Keyword arguments for `from_pretrained` of both checkpoints, such as `dtype`, `revision` and
            `trust_remote_code`. `gguf_file` is the name of a GGUF file in the folder or repository `text`; its weights
            are unpacked, to float32 unless you pass another `dtype`. `attn_implementation` may be a `dict` with an
            entry for each part: `{"text_config": ..., "vision_config": ..., "cross_attention_config": ...}`.
            `quantization_config` quantizes the text model only. The new parts stay in high precision, on the device of
            the text model.

    Returns:
        [`XAttnForConditionalGeneration`]: the new model. It is in evaluation mode, unless a loaded `text` is in
            training mode.

    Raises:
        ImportError: for a GGUF file without the package `gguf`.
        TypeError: for an unknown keyword, or if `text` or `vision` is neither a model nor a checkpoint.
        ValueError: for a checkpoint without safetensors, a GGUF file that cannot be read, a model that is not a decoder
            or already has blocks, a wrong layer, or contradictory options. If the configuration is enough to find the
            error, it is raised before weights are loaded.

    Example:

    ```python
    >>> import hf_xattn

    >>> model = hf_xattn.retrofit(
    ...     "HuggingFaceTB/SmolLM2-135M-Instruct", "google/siglip-base-patch16-224", every=4, dtype="float32"
    ... )
    >>> model.config.cross_attention_layers[:2]  # the decoder layers, counted from 0, that got a block in front
    [3, 7]
    >>> model.save_pretrained("fresh")
    ```
    """
    check_load_kwargs(retrofit, load_kwargs, text, vision)
    cross_attention_layers = _one_of(cross_attention_layers, layers)
    of_vision = {name: value for name, value in load_kwargs.items() if name != "gguf_file"}
    text, load_kwargs = split_gguf("text", text, load_kwargs)
    text_source = text
    attn_implementation = load_kwargs.get("attn_implementation")
    if isinstance(attn_implementation, dict):
        check_parts("attn_implementation", attn_implementation, XAttnConfig.sub_configs)
        del load_kwargs["attn_implementation"], of_vision["attn_implementation"]
    if isinstance(text, PreTrainedModel):
        text = _half_of(text, load_kwargs)
    text_config = text_config_of(text, load_kwargs)
    if cross_attention_layers is None:
        cross_attention_layers = every_nth_layer(every, text_num_hidden_layers(text_config))
    vision_config = None if vision is None else vision_config_of(vision, of_vision)
    found = None if vision_config is None else _measured(vision, vision_config)
    if vision_config is not None and vision_hidden_size is None:
        vision_hidden_size = _unsaid_width(vision_config, found)
    if connector_type is None:
        is_grid = perceiver_config is None and _is_grid(found, vision_feature_select_strategy)
        connector_type = "mlp_2d" if is_grid else "mlp"
    width = None
    if vision_config is not None and connector_type in ("identity", "perceiver"):
        joined = len(vision_feature_layer) if isinstance(vision_feature_layer, (list, tuple)) else 1
        width = joined * (vision_hidden_size or width_of(vision_config))
    cross_attention = _with_defaults(cross_attention, width)
    options: dict[str, Any] = {
        "cross_attention_config": cross_attention,
        "cross_attention_layers": cross_attention_layers,
        "image_token_id": image_token_id,
        "image_visibility": image_visibility,
        "additional_vocab_size": additional_vocab_size,
        "additional_vocab_in_head": additional_vocab_in_head,
        "connector_type": connector_type,
        "connector_options": connector_options,
        "connector_hidden_act": connector_hidden_act,
        "connector_bias": connector_bias,
        "vision_feature_select_strategy": vision_feature_select_strategy,
        "vision_feature_layer": vision_feature_layer,
        "vision_hidden_size": vision_hidden_size,
        "perceiver_config": perceiver_config,
    }
    # Building the configuration makes all checks, before weights are read.
    checked = XAttnConfig(text_config=text_config, vision_config=vision_config, **options)
    options["cross_attention_config"] = checked.cross_attention_config
    _warn_of_start(checked.cross_attention_config)
    if not isinstance(text, PreTrainedModel):
        text = load_text(text, **load_kwargs)
    tower: Any = vision
    if vision is not None and not isinstance(vision, PreTrainedModel):
        tower = _load_tower(vision, text, of_vision)
        if found is None and vision_hidden_size is None:
            options["vision_hidden_size"] = _unsaid_width(tower.config, measured(tower))
    with recorded(text):
        note_base(text.config, text_source, load_kwargs)
        if vision is not None:
            note_base(tower.config, vision, of_vision)
        vision_config = None if tower is None else tower.config
        config = XAttnConfig(text_config=text.config, vision_config=vision_config, **options, dtype=text.dtype)
        model = XAttnForConditionalGeneration(config, text_model=text, vision_tower=tower)
    if isinstance(text_source, PreTrainedModel):
        leave_out_added(text_source)
    if isinstance(attn_implementation, dict):
        model.set_attn_implementation(attn_implementation)
    return model.train(text.training)


def _one_of(cross_attention_layers: list[int] | None, layers: list[int] | None) -> list[int] | None:
    if layers is None:
        return cross_attention_layers
    if cross_attention_layers is not None:
        raise ValueError("Expected `cross_attention_layers` or `layers`, which mean the same, got both.")
    return layers


def remove_blocks(model: PreTrainedModel) -> PreTrainedModel:
    """Takes the blocks out of a text model, which is then the same as before [`retrofit`].

    Added tokens are taken out, too. If weights of the text model were trained, frozen, cast or moved since, they stay
    so; otherwise its logits are the same bit for bit. The model around the text model cannot be called or saved any
    more.

    Args:
        model ([`XAttnForConditionalGeneration`], [`XAttnModel`] or `PreTrainedModel`): A model with blocks, or the text
            model that contains them. It is changed in place.

    Returns:
        `PreTrainedModel`: the text model.

    Raises:
        ValueError: for a model without blocks, or whose blocks were removed already; for layers that hold adapters
            (PEFT) or hooks of accelerate, or that FSDP has split. In these cases the model is not changed.

    Example:

    ```python
    >>> from transformers import AutoModelForCausalLM

    >>> import hf_xattn

    >>> text_model = AutoModelForCausalLM.from_pretrained("HuggingFaceTB/SmolLM2-135M-Instruct")
    >>> model = hf_xattn.retrofit(text_model, "google/siglip-base-patch16-224")
    >>> hf_xattn.remove_blocks(model) is text_model
    True
    ```
    """
    body: Any = model.base_model
    is_outer = isinstance(body, XAttnModel)
    if is_outer:
        body._check_inserted()
    text_model: Any = body.text_model if is_outer else model
    insertion: Insertion | None = vars(text_model).get(INSERTION)
    if insertion is None:
        raise ValueError(
            "Expected `model` to be a model with blocks, such as `retrofit` returns, or the text model inside it "
            f"(`model.base_model.text_model`), got a {type(model).__name__}."
        )
    remedy = "Merge the adapter first (`merge_and_unload()`), or delete it."
    refuse_adapter_layers(text_model, "`remove_blocks` cannot take blocks out of", remedy)
    for name, part in text_model.named_modules():
        if added_names(part) and ("_hf_hook" in vars(part) or original_class(part) is None):
            why = "has a hook of accelerate" if "_hf_hook" in vars(part) else f"is a {type(part).__name__}"
            raise ValueError(
                f"Expected `model` to be neither dispatched with a device map nor split by FSDP, but its part {name} "
                f"{why}. Save the model, and load it without."
            )
    if is_outer and not insertion.was_given:
        text_model.generation_config = getattr(model, "generation_config", text_model.generation_config)
        return_quantizer(body, text_model)
    take_out(text_model, insertion)
    del vars(text_model)[INSERTION]
    return text_model.train(model.training)


def _warn_of_start(config: CrossAttentionConfig) -> None:
    if not config.starts_at_identity:
        logger.warning(
            "`cross_attention` starts with a non-zero gate and non-zero projections, so the logits of the fresh model "
            "differ from its base."
        )


def _unsaid_width(vision_config: PreTrainedConfig, found: Measured | None) -> int | None:
    """The width of a tower's features if its configuration lacks it or has another value, and None otherwise."""
    try:
        said = width_of(vision_config)
    except ValueError:
        said = None
    return None if found is None or found.width == said else found.width


def _measured(vision: Any, vision_config: PreTrainedConfig) -> Measured | None:
    """Returns what is known of the features of a tower. A tower that is loaded is measured."""
    found = measured_features(vision_config)
    return measured(vision) if found is None and isinstance(vision, PreTrainedModel) else found


def _is_grid(found: Measured | None, strategy: str) -> bool:
    """Whether a tower turns an image into a square grid of tokens. `strategy` may drop the first one of them."""
    return found is not None and found.tokens is not None and is_square(found.tokens - (strategy == "default"))


def _with_defaults(cross_attention: Any, context_size: int | None) -> Any:
    """Adds defaults to the fields of blocks that a caller gave as a `dict`. A configuration stays as it is."""
    given = {} if cross_attention is None else cross_attention
    if not isinstance(given, dict):
        return given
    sizes = {} if context_size is None else {"context_size": context_size}
    gate = {} if given.keys() & OF_GATE else {"gate": "token"}
    return {**sizes, **gate, **given}


def _half_of(text: PreTrainedModel, load_kwargs: dict[str, Any]) -> PreTrainedModel:
    if "quantization_config" in load_kwargs:
        raise ValueError(
            "`quantization_config` quantizes the text model, but `text` is loaded already. Pass "
            "`quantization_config` to its `from_pretrained`, or pass its folder to `retrofit`."
        )
    return text_half(text)


def _load_tower(vision: str | Path, text: PreTrainedModel, load_kwargs: dict[str, Any]) -> PreTrainedModel:
    own = {name: value for name, value in load_kwargs.items() if name != "quantization_config"}
    own |= {name: text.dtype for name in ("dtype", "torch_dtype") if own.get(name) == "auto"}  # as the text model
    tower: Any = load_vision(vision, **{"dtype": text.dtype, **own})
    if "quantization_config" in load_kwargs and "device_map" not in load_kwargs:
        tower = tower.to(text.device)  # a quantizer may have moved the text model to the accelerator
    return tower


__all__ = ["remove_blocks", "retrofit"]
