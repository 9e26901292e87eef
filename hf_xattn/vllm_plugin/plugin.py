"""The entry point: vLLM calls [`register`] at each start, in each of its processes, whatever model it will serve.

vLLM catches no error of a plug-in, so an exception here would stop an engine that serves somebody else's model. An
engine without this package's models must start as if the package were not installed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable


ARCHITECTURES = ("XAttnForConditionalGeneration", "MllamaForConditionalGeneration")

logger = logging.getLogger("vllm.hf_xattn")  # below vLLM's own, which prints the process and the time


def register() -> None:
    """Tells vLLM of the model class, and of what its configuration means to the engine.

    An architecture that this vLLM has itself stays vLLM's. Whatever fails becomes one warning: then nothing is
    registered, and only a folder of this package fails, with the same reason.
    """
    try:
        for registration in _registrations():
            registration()
    except Exception as error:
        refuse(f"hf_xattn cannot serve its models on this vLLM: {type(error).__name__}: {error}")


def _registrations() -> list[Callable[[], object]]:
    """All imports and look-ups. Returns what is left to do, which changes vLLM."""
    from vllm.model_executor.models import ModelRegistry

    import hf_xattn  # noqa: F401  # registers the configuration and the processor with transformers

    from .engine import engine_registrations
    from .vllm_api import NEWEST, OLDEST, missing_names

    if missing := missing_names():
        raise ImportError(f"it lacks {', '.join(missing)}. hf_xattn was tested with vLLM {OLDEST} to {NEWEST}")
    own, known = "hf_xattn.vllm_plugin.model:XAttnForVLLM", ModelRegistry.models
    taken = {name for name in ARCHITECTURES if name not in known}
    models = [lambda name=name: ModelRegistry.register_model(name, own) for name in taken]
    return [*models, *engine_registrations(taken)]


def refuse(reason: str) -> None:
    """Warns, and makes folders of this package fail with the reason, where vLLM reads their configuration."""
    logger.warning("%s. Other models are not affected.", reason)
    try:
        from transformers import AutoConfig, PreTrainedConfig

        class RefusedConfig(PreTrainedConfig):
            model_type = "xattn"

            @classmethod
            def from_dict(cls, *args, **kwargs):
                raise ValueError(reason)

            from_pretrained = from_dict

        AutoConfig.register(RefusedConfig.model_type, RefusedConfig, exist_ok=True)
    except Exception:
        logger.warning("Folders of hf_xattn will fail with another error.", exc_info=True)
