"""The entry point: vLLM calls [`register`] in each of its processes before it loads a model."""

from __future__ import annotations


ARCHITECTURES = ("XAttnForConditionalGeneration", "MllamaForConditionalGeneration")


def register() -> None:
    """Tells vLLM of the model class, and of what its configuration means to the engine.

    An architecture that this vLLM has itself stays vLLM's.
    """
    from vllm.model_executor.models import ModelRegistry

    import hf_xattn  # noqa: F401  # registers the configuration and the processor with transformers

    from .engine import register_engine

    own, known = "hf_xattn.vllm_plugin.model:XAttnForVLLM", ModelRegistry.models
    taken = {name for name in ARCHITECTURES if name not in known}
    for name in taken:
        ModelRegistry.register_model(name, own)
    register_engine(taken)
