"""Gated cross-attention for any text decoder of transformers. Importing registers everything with the Auto classes."""

from typing import TYPE_CHECKING, Any

import transformers

from .configuration_xattn import CrossAttentionConfig, XAttnConfig
from .data.loading import load_rows
from .layers.attention import GatedCrossAttention
from .layers.block import GatedCrossAttentionBlock
from .maps.attention_maps import AttentionMaps, attention_maps
from .modeling_xattn import XAttnForConditionalGeneration, XAttnModel
from .processing_xattn import XAttnProcessor
from .registration import register_classes, register_names
from .retrofit import remove_blocks, retrofit
from .training.alignment import align_connector
from .training.collator import XAttnDataCollator
from .training.freezing import (
    added_modules,
    freeze,
    freeze_base,
    lora_targets,
    parameter_groups,
    sharding_units,
    train_in_float32,
    training_table,
)
from .training.run_folder import last_complete_checkpoint
from .training.vision_features import VisionFeatures
from .utils.parts import register_connector, register_gate, register_position
from .utils.transformers_api import warn_of_version
from .version import __version__


register_classes()
register_names(transformers)
warn_of_version()

if TYPE_CHECKING:
    from .training.picture_use import PictureUseCallback


def __getattr__(name: str) -> Any:
    if name == "PictureUseCallback":  # loads transformers' training code only for those who use it
        from .training.picture_use import PictureUseCallback

        return PictureUseCallback
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "AttentionMaps",
    "CrossAttentionConfig",
    "GatedCrossAttention",
    "GatedCrossAttentionBlock",
    "PictureUseCallback",
    "VisionFeatures",
    "XAttnConfig",
    "XAttnDataCollator",
    "XAttnForConditionalGeneration",
    "XAttnModel",
    "XAttnProcessor",
    "__version__",
    "added_modules",
    "align_connector",
    "attention_maps",
    "freeze",
    "freeze_base",
    "last_complete_checkpoint",
    "load_rows",
    "lora_targets",
    "parameter_groups",
    "register_connector",
    "register_gate",
    "register_position",
    "remove_blocks",
    "retrofit",
    "sharding_units",
    "train_in_float32",
    "training_table",
]
