"""The processor of the folder that the engine serves, as `generate` would use it."""

from __future__ import annotations

from typing import Any

from ..processing_xattn import XAttnProcessor
from .mllama import is_mllama, load_processor


def processor_of(model_config: Any) -> XAttnProcessor:
    """Loads the processor. `model_config`: the engine's."""
    options = {"revision": model_config.tokenizer_revision, "trust_remote_code": model_config.trust_remote_code}
    if is_mllama(model_config.hf_config):
        return load_processor(model_config.tokenizer, **options)
    return XAttnProcessor.from_pretrained(model_config.tokenizer, **options)
