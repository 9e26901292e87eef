"""What the engine is told of a model, what it is asked to leave out, and one repair of it."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

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


# The engine's `tokenizer_mode`: it decides who renders chats.
CHATS = "hf_xattn"


class ConfigParser(HFConfigParser):
    """Reads `config.json`. Llama 3.2 Vision becomes a model of this package; what else is read stays as it is."""

    def parse(self, *args: Any, **kwargs: Any) -> Any:
        parsed: Any = super().parse(*args, **kwargs)
        config: Any = parsed[-1] if isinstance(parsed, tuple) else None
        return (*parsed[:-1], as_xattn(config)) if getattr(config, "model_type", None) == "mllama" else parsed


class XAttnConvertor(ModelArchConfigConvertorBase):
    """Reads the sizes of a model. It is the first to see the configuration that vLLM has loaded, and marks it.

    The marks are on that one object: configurations that are loaded for transformers do not have them.
    """

    def __init__(self, hf_config: Any, hf_text_config: Any, revision: str | None = None):
        if isinstance(hf_config, XAttnConfig) and not hf_config.is_encoder_decoder:
            check_served(hf_config)
            # The other runner of vLLM 0.32 was not compared. A user's own choice is refused below.
            os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")
            # vLLM then keeps keys and values of the images in a cache of their own.
            hf_config.is_encoder_decoder = True
            # vLLM asks the outer configuration. A text model of transformers ties its head as its own says.
            tied = bool(getattr(hf_config.text_config, "tie_word_embeddings", False))
            hf_config.update({"tie_word_embeddings": tied})
            # Markers behind the vocabulary are ids that a prompt may have.
            hf_text_config.vocab_size += hf_config.additional_vocab_size
        super().__init__(hf_config, hf_text_config, revision)


class XAttnEngineConfig(VerifyAndUpdateConfig):
    """Checks the options of the engine."""

    @staticmethod
    def verify_and_update_model_config(model_config: Any) -> None:
        if model_config.tokenizer_mode not in ("auto", "hf", CHATS):
            raise ValueError(
                f"Expected `tokenizer_mode='auto'`, the tokenizer of the folder, got {model_config.tokenizer_mode!r}."
            )
        model_config.tokenizer_mode = CHATS

    @staticmethod
    def verify_and_update_config(vllm_config: Any) -> None:
        for option, reason in _refused_options(vllm_config):
            raise ValueError(f"hf_xattn does not serve models on vLLM with {option}: {reason}.")
        # A recorded graph would have to hold what tokens see. Not compared: it needs a GPU.
        vllm_config.compilation_config.cudagraph_mode = CUDAGraphMode.NONE
        # A prompt is read at once with its images, so they must fit into one step.
        vllm_config.model_config.hf_config.tokens_of_a_step = vllm_config.scheduler_config.max_num_batched_tokens


def _refused_options(vllm_config: Any) -> list[tuple[str, str]]:
    """Options of the engine that are not served, and why."""
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

    The images of a step come to the model in the order in which the scheduler chose the requests, but their places in
    the cache are in the order of the batch. The two differ if a preempted request starts again in the same step as a
    new one: each would get the other's images.
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
    """Registers what is told by the class of a configuration or the name of an architecture, when they are called.

    The last one is the only one that other models meet: their configurations pass through [`ConfigParser`].
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
