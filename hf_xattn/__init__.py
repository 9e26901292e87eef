"""Gated cross-attention for any text decoder of transformers. Importing registers everything with the Auto classes."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

import transformers

from .cache.image_cache import ImageCache, select_images
from .configuration_xattn import CrossAttentionConfig, PerceiverConfig, XAttnConfig
from .data.loading import Shuffled, load_rows
from .layers.attention import GatedCrossAttention
from .layers.block import GatedCrossAttentionBlock
from .maps.attention_maps import AttentionMaps, attention_maps
from .modeling_xattn import XAttnForConditionalGeneration, XAttnModel
from .processing.image_limits import LIMITS as IMAGE_LIMITS
from .processing_xattn import XAttnProcessor
from .registration import register_classes, register_names
from .retrofit import remove_blocks, retrofit
from .storage.image_files import combine_images, load_image_cache, save_image_cache
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
from .utils.architectures import architecture
from .utils.parts import register_connector, register_gate, register_position
from .utils.transformers_api import warn_of_version
from .version import __version__


register_classes()
register_names(transformers)
warn_of_version()

# Names whose modules are imported when they are first asked for, because not every program needs them: the importers,
# evaluation, the commands, and what loads transformers' training code.
_LATER = {
    "PictureUseCallback": "training.picture_use",
    "convert_checkpoint": "importers",
    "evaluate": "evaluation.evaluation",
    "export_checkpoint": "importers",
    "import_checkpoint": "importers",
    "main": "commands.main",
    "picture_use": "training.picture_use",
    "questions_of": "evaluation.questions",
    "run_checks": "checks",
    "write_model_card": "checkpoints.model_card",
}

if TYPE_CHECKING:
    from .checkpoints.model_card import write_model_card
    from .checks import run_checks
    from .commands.main import main
    from .evaluation.evaluation import evaluate
    from .evaluation.questions import questions_of
    from .importers import convert_checkpoint, export_checkpoint, import_checkpoint
    from .training.picture_use import PictureUseCallback, picture_use


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return getattr(import_module(f".{_LATER[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


__all__ = [
    "AttentionMaps",
    "CrossAttentionConfig",
    "GatedCrossAttention",
    "GatedCrossAttentionBlock",
    "IMAGE_LIMITS",
    "ImageCache",
    "PerceiverConfig",
    "PictureUseCallback",
    "Shuffled",
    "VisionFeatures",
    "XAttnConfig",
    "XAttnDataCollator",
    "XAttnForConditionalGeneration",
    "XAttnModel",
    "XAttnProcessor",
    "__version__",
    "added_modules",
    "align_connector",
    "architecture",
    "attention_maps",
    "combine_images",
    "convert_checkpoint",
    "evaluate",
    "export_checkpoint",
    "freeze",
    "freeze_base",
    "import_checkpoint",
    "last_complete_checkpoint",
    "load_image_cache",
    "load_rows",
    "lora_targets",
    "main",
    "parameter_groups",
    "picture_use",
    "questions_of",
    "register_connector",
    "register_gate",
    "register_position",
    "remove_blocks",
    "retrofit",
    "run_checks",
    "save_image_cache",
    "select_images",
    "sharding_units",
    "train_in_float32",
    "training_table",
    "write_model_card",
]
