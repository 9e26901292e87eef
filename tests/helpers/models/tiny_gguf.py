"""Writes a tiny Llama as a GGUF file: weights in blocks of 8 bit, a byte-level tokenizer, a chat template."""

from pathlib import Path

import gguf
import numpy as np
import torch
from gguf.quants import quantize
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel
from transformers.convert_slow_tokenizer import bytes_to_unicode


SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TOKENS = [*SPECIAL, *sorted(bytes_to_unicode().values()), "he", "ll", "hell", "hello"]
MERGES = ["h e", "l l", "he ll", "hell o"]
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# The names that llama.cpp gives to the weights of a layer.
LAYER = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def tiny_llama(seed: int = 0, layers: int = 4) -> PreTrainedModel:
    """The model whose weights go into the file."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(TOKENS),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    return AutoModelForCausalLM.from_config(config).eval()


def write_gguf(
    path: Path,
    *,
    seed: int = 0,
    layers: int = 4,
    architecture: str = "llama",
    chat_template: str | None = CHAT_TEMPLATE,
    tokenizer: bool = True,
    merges: list[str] | None = MERGES,
    pad_token_id: int | None = 0,
    leave_out: str | None = None,
    more: dict[str, np.ndarray] | None = None,
    rope_scaling: gguf.RopeScalingType | None = None,
) -> Path:
    """Writes [`tiny_llama`] to `path`, without the weights whose names contain `leave_out`, and with tensors `more`."""
    model = tiny_llama(seed, layers)
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("Tiny Llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    if rope_scaling is not None:
        writer.add_rope_scaling_type(rope_scaling)
    if tokenizer:
        kinds = [gguf.TokenType.CONTROL] * len(SPECIAL) + [gguf.TokenType.NORMAL] * (len(TOKENS) - len(SPECIAL))
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list(TOKENS)
        writer.add_token_types(kinds)
        if merges is not None:
            writer.add_token_merges(merges)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        if pad_token_id is not None:
            writer.add_pad_token_id(pad_token_id)
        if chat_template is not None:
            writer.add_chat_template(chat_template)
    _add(writer, "token_embd.weight", model.model.embed_tokens.weight)
    _add(writer, "output_norm.weight", model.model.norm.weight)
    for index, layer in enumerate(model.model.layers):
        for name, theirs in LAYER.items():
            weight = layer.get_parameter(f"{name}.weight")
            heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(theirs)
            if heads is not None:  # llama.cpp rotates neighbours, transformers rotates halves
                weight = weight.view(heads, 2, -1, config.hidden_size).transpose(1, 2).reshape(weight.shape)
            ours = f"blk.{index}.{theirs}.weight"
            if leave_out is None or leave_out not in ours:
                _add(writer, ours, weight)
    for name, values in (more or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, name: str, weight: torch.Tensor) -> None:
    values = weight.detach().float().numpy().copy()
    if values.ndim == 1:
        writer.add_tensor(name, values)
        return
    kind = gguf.GGMLQuantizationType.Q8_0
    writer.add_tensor(name, np.ascontiguousarray(quantize(values, kind)), raw_dtype=kind)
