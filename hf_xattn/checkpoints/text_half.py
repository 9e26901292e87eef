"""Takes the text decoder out of a larger model, as a causal language model.

A vision-language model holds an ordinary decoder (`text_config`) beside its own modules for images. A retrofit uses the
decoder and the head and drops the other modules. The weights are shared with the larger model, not copied.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
)

from .quantization import share_quantizer


def is_composite(config: PreTrainedConfig) -> bool:
    """Whether a configuration describes a decoder among other parts."""
    if config.model_type == "xattn" or config.is_encoder_decoder:
        return False
    return config.get_text_config(decoder=True) is not config


def text_half_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """The configuration of the decoder in a larger model.

    Raises a `ValueError` if transformers has no causal language model for it.
    """
    text_config = config.get_text_config(decoder=True)
    if type(text_config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(
            f"The text half of a {config.model_type!r} model is a {text_config.model_type!r} decoder, and transformers "
            "has no causal language model of that type."
        )
    return text_config


def composite_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """The class that loads a checkpoint of a larger model, with its head.

    Raises a `ValueError` if transformers registers no such class.
    """
    for mapping in (MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, MODEL_FOR_MULTIMODAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING):
        if type(config) in mapping:
            found: Any = mapping[type(config)]
            return found
    raise ValueError(
        f"Expected `text` to be a language model, got a {config.model_type!r} checkpoint, for which transformers has "
        "no class that generates text. A vision model goes into `vision`."
    )


def text_half(model: PreTrainedModel) -> PreTrainedModel:
    """Makes a causal language model of a larger model's decoder and head. Returns a causal language model unchanged.

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
    left = [name for name, parameter in text.named_parameters() if parameter.is_meta]
    if left:
        raise ValueError(f"{type(model).__name__} holds no weights for {left} of {type(text).__name__}.")
    if getattr(model, "generation_config", None) is not None:
        text.generation_config = model.generation_config
    share_quantizer(model, text)
    return text.train(model.training)
