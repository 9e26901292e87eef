"""What this package uses of vLLM beyond the documented interface of models, and in which versions it was seen.

vLLM promises no stable names to plug-ins. A test compares this table with the installed vLLM.
"""

from __future__ import annotations

from pathlib import Path


# First and last version that the tests ran with.
OLDEST, NEWEST = "0.32.0", "0.32.0"

# Module, and the names that are used of it.
NAMES = {
    "vllm.config.compilation": "CUDAGraphMode",
    "vllm.distributed.parallel_state": "get_tensor_model_parallel_world_size",
    "vllm.forward_context": "get_forward_context",
    "vllm.inputs.engine": "mm_enc_dec_input mm_input",
    "vllm.model_executor.layers.attention": "CrossAttention",
    "vllm.model_executor.layers.linear": "ColumnParallelLinear RowParallelLinear",
    "vllm.model_executor.model_loader.weight_utils": "default_weight_loader",
    "vllm.model_executor.models": "ModelRegistry",
    "vllm.model_executor.models.config": "MODELS_CONFIG_MAP VerifyAndUpdateConfig",
    "vllm.model_executor.models.interfaces": "SupportsMultiModal",
    "vllm.model_executor.models.utils": "init_vllm_registered_model",
    "vllm.multimodal": "MULTIMODAL_REGISTRY",
    "vllm.multimodal.inputs": "MultiModalFieldConfig MultiModalKwargsItems PlaceholderRange",
    "vllm.multimodal.parse": "ImageProcessorItems",
    "vllm.multimodal.processing": "BaseDummyInputsBuilder BaseProcessingInfo EncDecMultiModalProcessor",
    "vllm.renderers.chat_utils": "parse_chat_messages parse_chat_messages_async",
    "vllm.renderers.hf": "HfRenderer",
    "vllm.renderers.registry": "RENDERER_REGISTRY",
    "vllm.tokenizers.registry": "TokenizerRegistry",
    "vllm.transformers_utils.config": "HFConfigParser _CONFIG_FORMAT_TO_CONFIG_PARSER",
    "vllm.transformers_utils.model_arch_config_convertor": (
        "MODEL_ARCH_CONFIG_CONVERTORS ModelArchConfigConvertorBase"
    ),
    "vllm.utils.async_utils": "make_async",
    "vllm.utils.torch_utils": "direct_register_custom_op",
    "vllm.v1.worker.gpu_model_runner": "GPUModelRunner",
}
# Private ones: methods of classes above, or of their bases, where they are defined.
PRIVATE = {
    "_tokenize_singleton_prompt": "vllm.renderers.base.BaseRenderer",
    "_tokenize_singleton_prompt_async": "vllm.renderers.base.BaseRenderer",
    "_batch_mm_inputs_from_scheduler": "vllm.v1.worker.gpu_model_runner.GPUModelRunner",
    "_get_dummy_images": "vllm.multimodal.processing.dummy_inputs.BaseDummyInputsBuilder",
}


def missing_names() -> list[str]:
    """The names of both tables that the installed vLLM lacks, each with its module. Imports nothing but `vllm`."""
    wanted = [(module, name) for module, names in NAMES.items() for name in names.split()]
    wanted += [(owner.rpartition(".")[0], name) for name, owner in PRIVATE.items()]
    return [f"`{name}` of `{module}`" for module, name in wanted if name not in source(module)]


def source(module: str) -> str:
    """The source code of a module of vLLM, or nothing if there is none."""
    import vllm

    path = Path(vllm.__path__[0]).joinpath(*module.split(".")[1:])
    files = [file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()]
    return files[0].read_text(encoding="utf-8") if files else ""
