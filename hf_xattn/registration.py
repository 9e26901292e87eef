"""Registers the classes of this package with transformers, so that its Auto classes and pipelines find them."""

from __future__ import annotations

import sys
from types import ModuleType

import transformers
from transformers.models.auto import modeling_auto

from .configuration_xattn import CrossAttentionConfig, XAttnConfig
from .layers.block import GatedCrossAttentionBlock
from .modeling_xattn import XAttnForConditionalGeneration, XAttnModel
from .processing.pipelines import register_pipeline
from .processing_xattn import XAttnProcessor


def register_classes() -> None:
    """Registers the classes with the Auto classes.

    Code that came with a checkpoint does not call this, because each such checkpoint brings classes of its own.
    """
    transformers.AutoConfig.register(XAttnConfig.model_type, XAttnConfig)
    transformers.AutoConfig.register(CrossAttentionConfig.model_type, CrossAttentionConfig)
    transformers.AutoModel.register(XAttnConfig, XAttnModel)
    transformers.AutoModel.register(CrossAttentionConfig, GatedCrossAttentionBlock)
    for name in ("AutoModelForCausalLM", "AutoModelForImageTextToText", "AutoModelForMultimodalLM"):
        if (auto_class := getattr(transformers, name, None)) is not None:
            auto_class.register(XAttnConfig, XAttnForConditionalGeneration)
    transformers.AutoProcessor.register(XAttnConfig, XAttnProcessor)


def register_names(module: ModuleType) -> None:
    """Registers the classes where they are looked up by name, and the pipeline.

    Args:
        module: the module transformers as the caller has imported it. transformers replaces itself in `sys.modules`
            while it is imported, so there may be several modules of this name.
    """
    # The label smoothing of `Trainer`, pipelines and `transformers serve` look names up here, not in the Auto classes.
    for name in ("CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM"):
        names = getattr(modeling_auto, f"MODEL_FOR_{name}_MAPPING_NAMES", {})
        names[XAttnConfig.model_type] = XAttnForConditionalGeneration.__name__
    # TRL's trainers look up the class of a folder as an attribute of transformers.
    for each in (module, transformers, sys.modules["transformers"]):
        setattr(each, XAttnForConditionalGeneration.__name__, XAttnForConditionalGeneration)
    register_pipeline()
