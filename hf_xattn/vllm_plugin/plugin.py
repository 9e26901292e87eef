"""The entry point: vLLM calls [`register`] at each start, in each of its processes, whatever model it will serve.

vLLM catches no error of a plug-in. An exception here would stop an engine that serves a model of another package. Such
an engine must start as if this package were not installed.

vLLM does not promise stable names to plug-ins. A name that this package imports and vLLM lacks is an error of Python.
But a method that this package replaces and vLLM no longer calls would change answers without an error. So these methods
are in a table, and the plug-in refuses a vLLM without them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path


ARCHITECTURES = ("XAttnForConditionalGeneration", "MllamaForConditionalGeneration")
# The oldest and the newest version with which the tests ran.
OLDEST, NEWEST = "0.32.0", "0.32.0"

# Private methods that are replaced or called, each with the class that defines it.
PRIVATE = {
    "_tokenize_singleton_prompt": "vllm.renderers.base.BaseRenderer",
    "_tokenize_singleton_prompt_async": "vllm.renderers.base.BaseRenderer",
    "_batch_mm_inputs_from_scheduler": "vllm.v1.worker.gpu_model_runner.GPUModelRunner",
    "_get_dummy_images": "vllm.multimodal.processing.dummy_inputs.BaseDummyInputsBuilder",
}

logger = logging.getLogger("vllm.hf_xattn")  # A child of vLLM's logger, which prints the process and the time.


def register() -> None:
    """Registers the model class and the classes that read its configuration with vLLM.

    If vLLM itself has one of the architectures, vLLM's class stays. If anything fails, this logs one warning and
    registers nothing. Then only folders of this package fail, with the same reason.
    """
    try:
        for registration in _registrations():
            registration()
    except Exception as error:
        refuse(f"hf_xattn cannot serve its models on this vLLM: {type(error).__name__}: {error}")


def _registrations() -> list[Callable[[], object]]:
    """Does all imports and checks, which may fail. Returns the functions that then change vLLM."""
    from vllm.model_executor.models import ModelRegistry

    import hf_xattn  # noqa: F401  # registers the configuration and the processor with transformers

    from .engine import engine_registrations

    if missing := missing_names():
        raise ImportError(f"it lacks {', '.join(missing)}. hf_xattn was tested with vLLM {OLDEST} to {NEWEST}")
    own, known = "hf_xattn.vllm_plugin.model:XAttnForVLLM", ModelRegistry.models
    taken = {name for name in ARCHITECTURES if name not in known}
    models = [lambda name=name: ModelRegistry.register_model(name, own) for name in taken]
    return [*models, *engine_registrations(taken)]


def refuse(reason: str) -> None:
    """Logs a warning, and makes folders of this package fail with the reason when vLLM reads their configuration."""
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


def missing_names() -> list[str]:
    """Returns the names of `PRIVATE` that the installed vLLM lacks, each with its module. Only imports `vllm`."""
    wanted = [(owner.rpartition(".")[0], name) for name, owner in PRIVATE.items()]
    return [f"`{name}` of `{module}`" for module, name in wanted if name not in source(module)]


def source(module: str) -> str:
    """Returns the source code of a module of vLLM. An empty text if there is no such module."""
    import vllm

    path = Path(vllm.__path__[0]).joinpath(*module.split(".")[1:])
    files = [file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()]
    return files[0].read_text(encoding="utf-8") if files else ""
