"""The entry point: vLLM calls [`register`] in each of its processes before it loads a model."""

from __future__ import annotations


ARCHITECTURE = "XAttnForConditionalGeneration"


def register() -> None:
    """Tells vLLM of the model class, and of what its configuration means to the engine."""
    from vllm.model_executor.models import ModelRegistry

    import hf_xattn  # noqa: F401  # registers the configuration and the processor with transformers

    from .engine import register_engine

    ModelRegistry.register_model(ARCHITECTURE, "hf_xattn.vllm_plugin.model:XAttnForVLLM")
    register_engine(ARCHITECTURE)
