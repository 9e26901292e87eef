"""Gated cross-attention for any text decoder of transformers. Importing registers everything with the Auto classes."""

from typing import TYPE_CHECKING, Any

import transformers

from .attention import GatedCrossAttention
from .attention_maps import AttentionMaps, attention_maps
from .block import GatedCrossAttentionBlock
from .collator import XAttnDataCollator
from .complete_checkpoints import last_complete_checkpoint
from .configuration_xattn import CrossAttentionConfig, XAttnConfig
from .float32_training import train_in_float32
from .freezing import freeze, freeze_base, training_table
from .image_checks import check_images
from .lora import added_modules, lora_targets
from .modeling_xattn import XAttnForConditionalGeneration, XAttnModel
from .parameter_groups import parameter_groups
from .processing_xattn import XAttnProcessor
from .registration import register_classes, register_names
from .removal import remove_blocks
from .retrofit import retrofit
from .sharding import sharding_units
from .transformers_api import warn_of_version
from .version import __version__
from .vision_features import VisionFeatures


if TYPE_CHECKING:
    from .freeze_schedule import FreezeSchedule

warn_of_version()
register_classes()
register_names(transformers)


def __getattr__(name: str) -> Any:
    """Loads transformers' training code only for those who use it."""
    if name == "FreezeSchedule":
        from .freeze_schedule import FreezeSchedule

        return FreezeSchedule
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "AttentionMaps",
    "CrossAttentionConfig",
    "FreezeSchedule",
    "GatedCrossAttention",
    "GatedCrossAttentionBlock",
    "VisionFeatures",
    "XAttnConfig",
    "XAttnDataCollator",
    "XAttnForConditionalGeneration",
    "XAttnModel",
    "XAttnProcessor",
    "__version__",
    "added_modules",
    "attention_maps",
    "check_images",
    "freeze",
    "freeze_base",
    "last_complete_checkpoint",
    "lora_targets",
    "parameter_groups",
    "remove_blocks",
    "retrofit",
    "sharding_units",
    "train_in_float32",
    "training_table",
]
