"""Options of the engine that were not compared with `generate` are refused by name."""

from types import SimpleNamespace

import pytest


pytest.importorskip("vllm.config", reason="vLLM is not installed (see examples/vllm)")

from hf_xattn.vllm_plugin.engine import XAttnEngineConfig


def options(**given):
    """What the engine asks the plug-in to check, with options by the names of their parts."""
    parts = {
        "parallel_config": {"pipeline_parallel_size": 1, "decode_context_parallel_size": 1, "enable_dbo": False},
        "cache_config": {"cache_dtype": "auto"},
        "scheduler_config": {"max_num_batched_tokens": 100},
        "compilation_config": {"cudagraph_mode": None},
        "model_config": {"quantization": None, "hf_config": SimpleNamespace()},
    }
    made = {name: SimpleNamespace(**{**fields, **given.pop(name, {})}) for name, fields in parts.items()}
    return SimpleNamespace(**made, **{"speculative_config": None, "use_v2_model_runner": False, **given})


@pytest.mark.parametrize(
    "given, named",
    [
        ({"parallel_config": {"pipeline_parallel_size": 2}}, "pipeline_parallel_size=2"),
        ({"parallel_config": {"decode_context_parallel_size": 2}}, "decode_context_parallel_size=2"),
        ({"parallel_config": {"enable_dbo": True}}, "enable_dbo"),
        ({"model_config": {"quantization": "fp8", "hf_config": None}}, "quantization='fp8'"),
        ({"cache_config": {"cache_dtype": "fp8"}}, "kv_cache_dtype='fp8'"),
        ({"speculative_config": object()}, "speculative_config"),
        ({"use_v2_model_runner": True}, "VLLM_USE_V2_MODEL_RUNNER=0"),
    ],
)
def test_options_that_were_not_compared_are_refused(given, named):
    """An option that changes answers, silently."""
    with pytest.raises(ValueError, match=named):
        XAttnEngineConfig.verify_and_update_config(options(**given))


def test_allowed_options_turn_graphs_off_and_bound_a_step():
    """The engine records a graph, or does not know how many images fit into a step."""
    given = options()
    XAttnEngineConfig.verify_and_update_config(given)
    assert given.compilation_config.cudagraph_mode.name == "NONE"
    assert given.model_config.hf_config.tokens_of_a_step == 100


def test_other_tokenizers_are_refused():
    """Chats that another renderer writes, in which images have other places."""
    with pytest.raises(ValueError, match="mistral"):
        XAttnEngineConfig.verify_and_update_model_config(SimpleNamespace(tokenizer_mode="mistral"))
