"""Every decoder architecture of transformers, small enough to build and run in a fraction of a second."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig


# Sizes of a small model, under the names that configurations use. A configuration takes those that it has.
TINY: dict[str, Any] = {
    "vocab_size": 96,
    "unpadded_vocab_size": 96,
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

# Fields of a small configuration that differ from `TINY`; None takes a field's default.
DIFFERENT: dict[str, dict[str, Any]] = {
    "axk1": LATENT,
    "axk2": {"num_key_value_heads": 4, "head_dim": 8},
    "bailing_hybrid": HYBRID | {"num_key_value_heads": 4},
    "bamba": {"attn_layer_indices": [1, 3]},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v2": LATENT,
    "deepseek_v3": LATENT,
    "deepseek_v32": {"num_key_value_heads": 4, "head_dim": 8, "index_n_heads": 2, "index_head_dim": 16},
    "dots3_note_text": {
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
    "falcon_h1": {"mamba_d_ssm": 64},
    "gemma4_text": {
        "vocab_size_per_layer_input": 96,
        "hidden_size_per_layer_input": 8,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        "num_kv_shared_layers": 0,
        "global_head_dim": 8,
    },
    "gemma4_unified_text": {
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        "global_head_dim": 8,
    },
    "glm4_moe_lite": {"num_key_value_heads": 4, "head_dim": 8},
    "glm_moe_dsa": {"num_key_value_heads": 4, "head_dim": 8, "index_n_heads": 2, "index_head_dim": 16},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention", "mamba", "attention"], "shared_intermediate_size": 32},
    "jamba": {"attn_layer_offset": 1, "attn_layer_period": 2},
    "kimi_linear": HYBRID
    | {"num_key_value_heads": 4, "linear_num_heads": 4, "linear_head_dim": 8, "q_lora_rank": None},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv", "full_attention"]},
    "longcat_flash": {"num_key_value_heads": 4, "head_dim": 8, "zero_expert_num": 2, "ffn_hidden_size": 64},
    "mamba2": {"n_groups": 1, "head_dim": 16},
    "minicpm3": LATENT,
    "mistral4": LATENT,
    "mllama_text_model": {"cross_attention_layers": []},
    "sarvam_mla": LATENT,
    "moshi": {"sliding_window": 64},
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
    "youtu": LATENT,
    "zamba": {
        "layers_block_type": ["mamba", "mamba", "hybrid", "mamba", "hybrid", "mamba"],
        "num_hidden_layers": 6,
        "num_key_value_heads": 4,
        "n_mamba_heads": 2,
    },
    "zamba2": {
        "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
        "n_mamba_heads": 4,
        "num_key_value_heads": 4,
    },
    "zaya": {"num_experts_per_tok": 1},
}

# Their experts multiply the tokens of all rows together, so what a row holds may change the rounding of another.
EXPERTS = frozenset(
    """afmoe aria_text axk1 axk2 bailing_hybrid beam cohere2_moe dbrx deepseek_v2 deepseek_v3 deepseek_v32 dots1
dots3_note_text ernie4_5_moe exaone_moe flex_olmo flint glm4_moe glm4_moe_lite glm_moe_dsa gpt_oss
granitemoe granitemoe_swa granitemoehybrid granitemoeshared hunyuan_v1_moe hy_v3 inkling2_text inkling_text jamba
jetmoe kimi_linear kolibri1 laguna lara_mini lfm2_moe llama4_text longcat_flash mellum mimo_v2_flash minimax_m2
minimax_m3_vl_text mixtral nemotron_h olmoe phimoe qwen2_moe qwen3_5_moe_text qwen3_moe qwen3_next
sarvam_mla sarvam_moe solar_open zaya""".split()
)


def tiny_config(model_type: str) -> PreTrainedConfig:
    """A configuration of a small model."""
    config_class = CONFIG_MAPPING[model_type]
    if dataclasses.is_dataclass(config_class):
        known = {entry.name for entry in dataclasses.fields(config_class)}
    else:
        known = set(inspect.signature(config_class.__init__).parameters)
    aliases = getattr(config_class, "attribute_map", {})
    fields = {name: value for name, value in TINY.items() if name in known and name not in aliases}
    fields.update(DIFFERENT.get(model_type, {}))
    return config_class(**{name: value for name, value in fields.items() if value is not None})
