"""Describes a model to the engine, refuses options of the engine, and repairs one fault of vLLM 0.32."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm.config.compilation import CUDAGraphMode
from vllm.model_executor.models.config import MODELS_CONFIG_MAP, VerifyAndUpdateConfig
from vllm.renderers.registry import RENDERER_REGISTRY
from vllm.tokenizers.registry import TokenizerRegistry
from vllm.transformers_utils.config import _CONFIG_FORMAT_TO_CONFIG_PARSER, HFConfigParser
from vllm.transformers_utils.model_arch_config_convertor import (
    MODEL_ARCH_CONFIG_CONVERTORS,
    ModelArchConfigConvertorBase,
)

from ..configuration_xattn import XAttnConfig
from .mllama import ARCHITECTURE as MLLAMA
from .mllama import as_xattn
from .served import check_served


if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

# The engine's `tokenizer_mode` for these models. It selects the class that renders chats.
CHATS = "hf_xattn"


class ConfigParser(HFConfigParser):
    """Reads `config.json`. Turns a configuration of Llama 3.2 Vision into one of this package, and changes no other."""

    def parse(self, *args: Any, **kwargs: Any) -> Any:
        parsed: Any = super().parse(*args, **kwargs)
        config: Any = parsed[-1] if isinstance(parsed, tuple) else None
        return (*parsed[:-1], as_xattn(config)) if getattr(config, "model_type", None) == "mllama" else parsed


class XAttnConvertor(ModelArchConfigConvertorBase):
    """Reads the sizes of a model for vLLM.

    This class is the first to see the configuration that vLLM has loaded, so it also sets the fields that vLLM needs.
    It sets them on this one object. Configurations that are loaded for transformers do not get them.
    """

    def __init__(self, hf_config: Any, hf_text_config: Any, revision: str | None = None):
        if isinstance(hf_config, XAttnConfig) and not hf_config.is_encoder_decoder:
            check_served(hf_config)
            # vLLM 0.32 has another model runner, with which nothing was compared. `_refused_options` refuses it.
            os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")
            # This makes vLLM keep the keys and values of the images in a separate cache.
            hf_config.is_encoder_decoder = True
            # vLLM reads this field of the outer configuration, but the text model's own configuration decides.
            tied = bool(getattr(hf_config.text_config, "tie_word_embeddings", False))
            hf_config.update({"tie_word_embeddings": tied})
            # Added tokens, such as markers, follow the vocabulary of the text model, and a prompt may hold them.
            hf_text_config.vocab_size += hf_config.additional_vocab_size
        super().__init__(hf_config, hf_text_config, revision)


class XAttnEngineConfig(VerifyAndUpdateConfig):
    """Checks the options of the engine."""

    @staticmethod
    def verify_and_update_model_config(model_config: ModelConfig) -> None:
        if model_config.tokenizer_mode not in ("auto", "hf", CHATS):
            raise ValueError(
                f"Expected `tokenizer_mode='auto'`, the tokenizer of the folder, got {model_config.tokenizer_mode!r}."
            )
        model_config.tokenizer_mode = CHATS

    @staticmethod
    def verify_and_update_config(vllm_config: VllmConfig) -> None:
        for option, reason in _refused_options(vllm_config):
            raise ValueError(f"hf_xattn does not serve models on vLLM with {option}: {reason}.")
        # A CUDA graph would fix which images the tokens see. Nothing was tried against this, because it needs a GPU.
        vllm_config.compilation_config.cudagraph_mode = CUDAGraphMode.NONE
        # A prompt is read in one step together with its images, so the images must fit into one step.
        vllm_config.model_config.hf_config.tokens_of_a_step = vllm_config.scheduler_config.max_num_batched_tokens


def _refused_options(vllm_config: Any) -> list[tuple[str, str]]:
    """Returns the given options of the engine that are not served, each with the reason."""
    parallel, model, cache = vllm_config.parallel_config, vllm_config.model_config, vllm_config.cache_config
    pipeline, context = parallel.pipeline_parallel_size, parallel.decode_context_parallel_size
    rounded = cache.cache_dtype not in ("auto", "float32", "bfloat16", "float16")
    unlike = "was not compared"
    found = [
        (pipeline > 1, f"`pipeline_parallel_size={pipeline}`", "only the first stage would get the images"),
        (context > 1, f"`decode_context_parallel_size={context}`", "keys and values of images are not split"),
        (parallel.enable_dbo, "`enable_dbo`", "a step is not split"),
        (vllm_config.speculative_config is not None, "`speculative_config`", f"drafting {unlike}"),
        (model.quantization is not None, f"`quantization={model.quantization!r}`", f"quantization {unlike}"),
        (rounded, f"`kv_cache_dtype={cache.cache_dtype!r}`", f"a rounded cache {unlike}"),
        (vllm_config.use_v2_model_runner, "`VLLM_USE_V2_MODEL_RUNNER`", f"it {unlike}. Set VLLM_USE_V2_MODEL_RUNNER=0"),
    ]
    return [(option, reason) for given, option, reason in found if given]


def repair_order() -> None:
    """Makes the model runner encode images in the order of its batch.

    In vLLM 0.32, the model gets the images of a step in the order in which the scheduler has chosen the requests, but
    their places in the cache are in the order of the batch. The two orders differ if a preempted request starts again
    in the same step as a new request. Each request would then get the images of the other one.
    """
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    original = GPUModelRunner._batch_mm_inputs_from_scheduler
    if hasattr(original, "repaired_by_hf_xattn"):
        return

    @functools.wraps(original)
    def in_order_of_batch(self: Any, scheduler_output: Any) -> Any:
        if self.model_config.is_encoder_decoder:
            scheduled, places = scheduler_output.scheduled_encoder_inputs, self.input_batch.req_id_to_index
            in_order = sorted(scheduled, key=places.__getitem__)
            scheduler_output.scheduled_encoder_inputs = {request: scheduled[request] for request in in_order}
        return original(self, scheduler_output)

    in_order_of_batch.repaired_by_hf_xattn = True  # type: ignore[attr-defined]
    GPUModelRunner._batch_mm_inputs_from_scheduler = in_order_of_batch


def engine_registrations(architectures: set[str]) -> list[Callable[[], object]]:
    """Returns functions that register the classes of this file with vLLM when they are called.

    vLLM selects most of these classes by the class of a configuration or by the name of an architecture, so they do not
    affect other models. The exception is [`ConfigParser`], which reads the configurations of all models.
    """
    found: list[Callable[[], object]] = [
        lambda: TokenizerRegistry.register(CHATS, "vllm.tokenizers.hf", "CachedHfTokenizer"),
        lambda: RENDERER_REGISTRY.register(CHATS, "hf_xattn.vllm_plugin.chat", "XAttnRenderer"),
        lambda: MODEL_ARCH_CONFIG_CONVERTORS.update({XAttnConfig.model_type: XAttnConvertor}),
        lambda: MODELS_CONFIG_MAP.update(dict.fromkeys(architectures, XAttnEngineConfig)),
    ]
    if MLLAMA in architectures:
        found.append(lambda: _CONFIG_FORMAT_TO_CONFIG_PARSER.update({"hf": ConfigParser}))
    return found
