"""Gated cross-attention for any text decoder of transformers. Importing registers everything with the Auto classes."""

import sys

import transformers
from transformers.models.auto import modeling_auto

from .attention import GatedCrossAttention
from .attention_maps import AttentionMaps, attention_maps
from .block import GatedCrossAttentionBlock
from .collator import XAttnDataCollator
from .configuration_xattn import CrossAttentionConfig, XAttnConfig
from .lora import added_modules, lora_targets
from .modeling_xattn import XAttnForConditionalGeneration, XAttnModel
from .processing_xattn import XAttnProcessor
from .retrofit import freeze_base, retrofit
from .version import __version__


def _register() -> None:
    transformers.AutoConfig.register(XAttnConfig.model_type, XAttnConfig)
    transformers.AutoConfig.register(CrossAttentionConfig.model_type, CrossAttentionConfig)
    transformers.AutoModel.register(XAttnConfig, XAttnModel)
    transformers.AutoModel.register(CrossAttentionConfig, GatedCrossAttentionBlock)
    for name in ("AutoModelForCausalLM", "AutoModelForImageTextToText", "AutoModelForMultimodalLM"):
        if (auto_class := getattr(transformers, name, None)) is not None:
            auto_class.register(XAttnConfig, XAttnForConditionalGeneration)
    transformers.AutoProcessor.register(XAttnConfig, XAttnProcessor)
    # Trainer's label smoothing, pipelines and `transformers serve` look names up here, not in the Auto classes.
    for name in ("CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM"):
        names = getattr(modeling_auto, f"MODEL_FOR_{name}_MAPPING_NAMES", {})
        names[XAttnConfig.model_type] = XAttnForConditionalGeneration.__name__
    # TRL's trainers look the class of a folder up as an attribute of transformers, which imports itself a second time.
    for module in (transformers, sys.modules["transformers"]):
        setattr(module, XAttnForConditionalGeneration.__name__, XAttnForConditionalGeneration)


_register()

__all__ = [
    "AttentionMaps",
    "CrossAttentionConfig",
    "GatedCrossAttention",
    "GatedCrossAttentionBlock",
    "XAttnConfig",
    "XAttnDataCollator",
    "XAttnForConditionalGeneration",
    "XAttnModel",
    "XAttnProcessor",
    "__version__",
    "added_modules",
    "attention_maps",
    "freeze_base",
    "lora_targets",
    "retrofit",
]
