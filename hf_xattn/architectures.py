"""What is known of each decoder architecture of transformers, as data.

Most architectures need no entry: where the layers are and how keyword arguments reach them is read off the model (see
`decoder.py`). An entry says why an architecture is not served, or how to build it small enough to test. The test suite
builds each one, checks the promises of this package on it, and fails where this table and the outcome differ.
"""

from __future__ import annotations

import dataclasses
import inspect
from dataclasses import dataclass, field
from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES


HALF = "decoder half of an encoder-decoder model, with cross-attention of its own"
NO_CACHE = "keeps what it has read in `{}`, not in a cache of transformers"
STREAMS = "its layers pass several residual streams, not one"
MODAL = "takes images or sound itself, in its own way"
COMPOSITE = "a larger model, of which the text half is served as {}"


@dataclass(frozen=True)
class Architecture:
    """One `model_type` of transformers' causal language models.

    Attributes:
        refused (`str`, *optional*): why blocks cannot go in; None where they can.
        via (`"keyword"` or `"call"`): how images reach the layers: as a keyword argument that the decoder hands on, or
            fetched in the layer's `__call__` (see `channel.py`).
        layer_count (`str`): field of the configuration that counts the layers of the stack.
        tiny (`dict`): fields of a small configuration that differ from `TINY`; None takes a field's default.
        experts (`bool`): its experts multiply the tokens of all rows together, so what a row holds may change the rounding
            of another.
    """

    refused: str | None = None
    via: str = "keyword"
    layer_count: str = "num_hidden_layers"
    tiny: dict[str, Any] = field(default_factory=dict)
    experts: bool = False


# Sizes of a small model, under the names that configurations use. A configuration takes those that it has.
TINY: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "embedding_size": 32,
    "d_model": 32,
    "n_embd": 32,
    "word_embed_proj_dim": 32,
    "num_hidden_layers": 4,
    "num_layers": 4,
    "n_layer": 4,
    "n_layers": 4,
    "num_attention_heads": 4,
    "num_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rotary_dim": 4,
    "intermediate_size": 64,
    "n_inner": 64,
    "ffn_dim": 64,
    "max_position_embeddings": 128,
    "n_positions": 128,
    "sliding_window": 6,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "is_decoder": True,
    # Mixtures of experts.
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "expert_ffn_hidden_size": 16,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "num_nextn_predict_layers": 0,
    # Multi-head latent attention.
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    # State-space and linear-attention layers.
    "state_size": 8,
    "time_step_rank": 4,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_dt_rank": 4,
    "mamba_chunk_size": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}

LATENT = {"head_dim": None, "num_key_value_heads": 4}  # multi-head latent attention has no K/V heads to share
HYBRID = {"layer_types": ["linear_attention", "full_attention"] * 2}

ARCHITECTURES: dict[str, Architecture] = {
    # Served, but for something that has to be known.
    "afmoe": Architecture(experts=True),
    "aria_text": Architecture(experts=True),
    "axk1": Architecture(tiny=LATENT, experts=True),
    "axk2": Architecture(tiny={"num_key_value_heads": 4, "head_dim": 8}, experts=True),
    "bailing_hybrid": Architecture(tiny=HYBRID | {"num_key_value_heads": 4}, experts=True),
    "bamba": Architecture(tiny={"attn_layer_indices": [1, 3]}),
    "beam": Architecture(experts=True),
    "bloom": Architecture(via="call"),
    "codegen": Architecture(via="call"),
    "cohere2_moe": Architecture(experts=True),
    "cohere_compass_text": Architecture(
        tiny={
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                "full_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        }
    ),
    "dbrx": Architecture(
        tiny={
            "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
            "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2},
        },
        experts=True,
    ),
    "deepseek_v2": Architecture(tiny=LATENT, experts=True),
    "deepseek_v3": Architecture(tiny=LATENT, experts=True),
    "deepseek_v32": Architecture(
        tiny={"num_key_value_heads": 4, "head_dim": 8, "index_n_heads": 2, "index_head_dim": 16}, experts=True
    ),
    "doge": Architecture(experts=True),
    "dots1": Architecture(experts=True),
    "dots3_note_text": Architecture(
        tiny={
            "num_key_value_heads": 4,
            "head_dim": 8,
            "index_n_heads": 2,
            "index_head_dim": 16,
            "shared_experts_intermediate_size": 16,
            "swa_num_attention_heads": 4,
            "swa_num_key_value_heads": 4,
            "swa_q_lora_rank": 16,
            "swa_kv_lora_rank": 16,
            "swa_head_dim": 16,
            "swa_qk_nope_head_dim": 8,
            "swa_v_head_dim": 8,
        },
        experts=True,
    ),
    "ernie4_5_moe": Architecture(experts=True),
    "exaone_moe": Architecture(experts=True),
    "falcon": Architecture(via="call"),
    "falcon_h1": Architecture(tiny={"mamba_d_ssm": 64}),
    "falcon_mamba": Architecture(via="call"),
    "flex_olmo": Architecture(experts=True),
    "flint": Architecture(experts=True),
    "gemma4_text": Architecture(
        tiny={
            "vocab_size_per_layer_input": 96,
            "hidden_size_per_layer_input": 8,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
            "num_kv_shared_layers": 0,
            "global_head_dim": 8,
        },
        experts=True,
    ),
    "gemma4_unified_text": Architecture(
        tiny={
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
            "global_head_dim": 8,
        }
    ),
    "glm4_moe": Architecture(experts=True),
    "glm4_moe_lite": Architecture(tiny={"num_key_value_heads": 4, "head_dim": 8}, experts=True),
    "glm_moe_dsa": Architecture(
        tiny={"num_key_value_heads": 4, "head_dim": 8, "index_n_heads": 2, "index_head_dim": 16}, experts=True
    ),
    "gpt_neo": Architecture(via="call", tiny={"attention_types": [[["global", "local"], 2]]}),
    "gpt_neox_japanese": Architecture(via="call"),
    "gpt_oss": Architecture(experts=True),
    "gptj": Architecture(via="call"),
    "granitemoe": Architecture(experts=True),
    "granitemoe_swa": Architecture(experts=True),
    "granitemoehybrid": Architecture(
        tiny={"layer_types": ["mamba", "attention", "mamba", "attention"], "shared_intermediate_size": 32}, experts=True
    ),
    "granitemoeshared": Architecture(experts=True),
    "hunyuan_v1_moe": Architecture(experts=True),
    "hy_v3": Architecture(experts=True),
    "inkling2_text": Architecture(experts=True),
    "inkling_text": Architecture(experts=True),
    "jamba": Architecture(tiny={"attn_layer_offset": 1, "attn_layer_period": 2}, experts=True),
    "jetmoe": Architecture(experts=True),
    "kimi_linear": Architecture(
        tiny=HYBRID | {"num_key_value_heads": 4, "linear_num_heads": 4, "linear_head_dim": 8, "q_lora_rank": None},
        experts=True,
    ),
    "kolibri1": Architecture(experts=True),
    "laguna": Architecture(experts=True),
    "lfm2": Architecture(tiny={"layer_types": ["conv", "full_attention", "conv", "full_attention"]}),
    "lfm2_moe": Architecture(tiny={"layer_types": ["conv", "full_attention", "conv", "full_attention"]}, experts=True),
    "llama4_text": Architecture(experts=True),
    "longcat_flash": Architecture(
        layer_count="num_layers",
        tiny={"num_key_value_heads": 4, "head_dim": 8, "zero_expert_num": 2, "ffn_hidden_size": 64},
        experts=True,
    ),
    "mamba": Architecture(via="call"),
    "mamba2": Architecture(via="call", tiny={"n_groups": 1, "head_dim": 16}),
    "megatron-bert": Architecture(via="call"),
    "mellum": Architecture(experts=True),
    "mimo_v2_flash": Architecture(experts=True),
    "minicpm3": Architecture(tiny=LATENT),
    "minimax_m2": Architecture(experts=True),
    "minimax_m3_vl_text": Architecture(experts=True),
    "mixtral": Architecture(experts=True),
    "moshi": Architecture(tiny={"sliding_window": 64}),
    "mpt": Architecture(via="call"),
    "nemotron_h": Architecture(experts=True),
    "olmoe": Architecture(experts=True),
    "phimoe": Architecture(experts=True),
    "qwen2_moe": Architecture(experts=True),
    "qwen3_5_moe_text": Architecture(experts=True),
    "qwen3_moe": Architecture(experts=True),
    "qwen3_next": Architecture(experts=True),
    "rembert": Architecture(via="call"),
    "solar_open": Architecture(experts=True),
    "xmod": Architecture(tiny={"languages": ["en_XX"], "default_language": "en_XX"}),
    "youtu": Architecture(tiny=LATENT),
    "zamba": Architecture(
        tiny={
            "layers_block_type": ["mamba", "mamba", "hybrid", "mamba", "hybrid", "mamba"],
            "num_hidden_layers": 6,
            "num_key_value_heads": 4,
            "n_mamba_heads": 2,
        }
    ),
    "zamba2": Architecture(
        tiny={"layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"], "n_mamba_heads": 4, "num_key_value_heads": 4}
    ),
    "zaya": Architecture(tiny={"num_experts_per_tok": 1}, experts=True),
    # Not served.
    "bart": Architecture(HALF),
    "bigbird_pegasus": Architecture(HALF),
    "blenderbot": Architecture(HALF),
    "blenderbot-small": Architecture(HALF),
    "blt": Architecture("reads bytes through three stacks of layers"),
    "cpmant": Architecture("puts prompt tokens of its own in front of the text"),
    "deepseek_v4": Architecture(STREAMS),
    "dots3_note": Architecture(COMPOSITE.format("dots3_note_text")),
    "emu3": Architecture(MODAL),
    "fuyu": Architecture(COMPOSITE.format("persimmon")),
    "gemma3": Architecture(COMPOSITE.format("gemma3_text")),
    "gemma3n": Architecture(STREAMS),
    "gemma3n_text": Architecture(STREAMS),
    "gemma4": Architecture(COMPOSITE.format("gemma4_text")),
    "gemma4_assistant": Architecture("drafts for a larger model, whose cache it reads"),
    "gemma4_unified": Architecture(COMPOSITE.format("gemma4_unified_text")),
    "gemma4_unified_assistant": Architecture("drafts for a larger model, whose cache it reads"),
    "git": Architecture(MODAL),
    "got_ocr2": Architecture(COMPOSITE.format("qwen2")),
    "hrm_text": Architecture("runs two stacks of layers in turns, several times a token"),
    "hy_v4": Architecture(STREAMS),
    "llama4": Architecture(COMPOSITE.format("llama4_text")),
    "marian": Architecture(HALF),
    "mbart": Architecture(HALF),
    "minimax": Architecture(NO_CACHE.format("MiniMaxCache")),
    "mllama": Architecture("has cross-attention to images of its own: `hf-xattn import` brings it over"),
    "moss_transcribe_diarize": Architecture(COMPOSITE.format("qwen3")),
    "musicgen": Architecture(MODAL),
    "musicgen_melody": Architecture(MODAL),
    "mvp": Architecture(HALF),
    "openai-gpt": Architecture("reads its whole text again at every step: it has no cache"),
    "pegasus": Architecture(HALF),
    "phi4_multimodal": Architecture(MODAL),
    "plbart": Architecture(HALF),
    "prophetnet": Architecture(HALF),
    "qwen3_5": Architecture(COMPOSITE.format("qwen3_5_text")),
    "qwen3_5_moe": Architecture(COMPOSITE.format("qwen3_5_moe_text")),
    "qwen4_exp": Architecture(STREAMS),
    "qwen4_exp_text": Architecture(STREAMS),
    "reformer": Architecture(NO_CACHE.format("past_buckets_states")),
    "rwkv": Architecture(NO_CACHE.format("state")),
    "trocr": Architecture(HALF),
    "whisper": Architecture(HALF),
    "xlm": Architecture("has no layer objects, but lists of their parts"),
    "xlnet": Architecture(NO_CACHE.format("mems")),
    "xlstm": Architecture(NO_CACHE.format("cache_params, of a class of its own")),
}


def architecture(model_type: str) -> Architecture:
    """What is known of a `model_type`; an unknown one is treated like any other."""
    return ARCHITECTURES.get(model_type, Architecture())


def causal_model_types() -> list[str]:
    """Every `model_type` for which transformers registers a causal language model."""
    return sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - {"xattn"})


def tiny_config(model_type: str) -> PreTrainedConfig:
    """A configuration small enough to build and run in a fraction of a second."""
    config_class = CONFIG_MAPPING[model_type]
    if dataclasses.is_dataclass(config_class):
        known = {entry.name for entry in dataclasses.fields(config_class)}
    else:
        known = set(inspect.signature(config_class.__init__).parameters)
    aliases = getattr(config_class, "attribute_map", {})
    fields = {name: value for name, value in TINY.items() if name in known and name not in aliases}
    fields.update(architecture(model_type).tiny)
    return config_class(**{name: value for name, value in fields.items() if value is not None})


def markdown_table() -> str:
    """The table of `hf-xattn inspect --architectures`, and of the README."""
    served = [name for name in causal_model_types() if architecture(name).refused is None]
    keyword = [name for name in served if architecture(name).via == "keyword"]
    call = [name for name in served if architecture(name).via == "call"]
    lines = [
        f"| {len(served)} of {len(causal_model_types())} model types | |",
        "|---|---|",
        f"| served, images as a keyword argument ({len(keyword)}) | {', '.join(f'`{name}`' for name in keyword)} |",
        f"| served, images fetched by the layer ({len(call)}) | {', '.join(f'`{name}`' for name in call)} |",
    ]
    reasons: dict[str, list[str]] = {}
    for name in causal_model_types():
        reason = architecture(name).refused
        if reason is not None:
            reasons.setdefault(reason, []).append(name)
    for reason, names in sorted(reasons.items()):
        lines.append(f"| not served: {reason} | {', '.join(f'`{name}`' for name in names)} |")
    return "\n".join(lines)
