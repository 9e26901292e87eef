"""Gated cross-attention for any text decoder of transformers. Importing registers everything with the Auto classes."""

import transformers

from .attention import GatedCrossAttention
from .attention_maps import AttentionMaps, attention_maps
from .block import GatedCrossAttentionBlock
from .collator import XAttnDataCollator
from .configuration_xattn import CrossAttentionConfig, XAttnConfig
from .lora import added_modules, lora_targets
from .modeling_xattn import XAttnForConditionalGeneration, XAttnModel
from .processing_xattn import XAttnProcessor
from .registration import register_classes, register_names
from .retrofit import freeze_base, retrofit
from .version import __version__


register_classes()
register_names(transformers)

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
