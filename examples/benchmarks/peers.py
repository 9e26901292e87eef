"""What the benchmarks compare with: transformers' own cross-attention, and the plain ways to write one."""

from __future__ import annotations

import torch
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    IdeficsConfig,
    IdeficsForVisionText2Text,
    LlamaConfig,
    MllamaForCausalLM,
    PreTrainedModel,
    SiglipVisionConfig,
)
from transformers.models.idefics.modeling_idefics import IdeficsAttention
from transformers.models.mllama.configuration_mllama import MllamaTextConfig
from transformers.models.mllama.modeling_mllama import MllamaTextCrossAttention

from hf_xattn import retrofit


VOCABULARY = 32000


def repeated_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """K/V repeated for each query head, as KempnerForge and most implementations do: `(B, T, H, D)` to `(B, T, H *
    D)`.
    """
    group = query.shape[2] // key.shape[1]
    key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
    output = nn.functional.scaled_dot_product_attention(query.transpose(1, 2), key, value)
    return output.transpose(1, 2).flatten(2)


def repeated_on_gqa(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """PyTorch's own grouped-query attention, K/V rows repeated for beams."""
    output = nn.functional.scaled_dot_product_attention(query.transpose(1, 2), key, value, enable_gqa=True)
    return output.transpose(1, 2).flatten(2)


def mllama_config(
    hidden: int, layers: int, cross_layers: list[int], heads: int, kv_heads: int, inner: int
) -> MllamaTextConfig:
    config = MllamaTextConfig(
        hidden_size=hidden,
        num_hidden_layers=layers,
        cross_attention_layers=cross_layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=inner,
        vocab_size=VOCABULARY,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    config._attn_implementation = "sdpa"
    return config


def mllama_attention(hidden: int, heads: int, kv_heads: int) -> MllamaTextCrossAttention:
    return MllamaTextCrossAttention(mllama_config(hidden, 1, [0], heads, kv_heads, 1), layer_idx=0)


def idefics_attention(hidden: int, heads: int) -> IdeficsAttention:
    config = IdeficsConfig(hidden_size=hidden, num_attention_heads=heads, vision_config={"embed_dim": hidden})
    config._attn_implementation = "sdpa"
    attention = IdeficsAttention(hidden, heads, is_cross_attention=True, config=config, layer_idx=0)
    attention.is_causal = False
    return attention


@torch.no_grad()
def idefics_model() -> IdeficsForVisionText2Text:
    """Idefics with 8 layers and 2 gated ones, whose gates are open."""
    torch.manual_seed(0)
    config = IdeficsConfig(
        hidden_size=512,
        num_hidden_layers=8,
        num_attention_heads=8,
        intermediate_size=1024,
        cross_layer_interval=4,
        additional_vocab_size=2,
        vocab_size=VOCABULARY,
        vision_config={"embed_dim": 512, "num_hidden_layers": 1, "num_attention_heads": 8},
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = IdeficsForVisionText2Text(config)
    for name, parameter in model.named_parameters():
        if "alpha" in name:
            nn.init.constant_(parameter, 0.5)
    return model


class MllamaWithFeatures(MllamaForCausalLM):
    """Mllama's text model on image features. As its conditional generation does with pixels, they go in at the first
    step only, and their K/V stay in the cache.

    Without a mask its cross-attention is causal, which hides most of the image from most of the text (SDPA's default of
    transformers, made for self-attention). Its processor always makes a mask; here, attention is told to be full.
    """

    def __init__(self, config):
        super().__init__(config)
        for module in self.modules():
            if isinstance(module, MllamaTextCrossAttention):
                module.is_causal = False

    def prepare_inputs_for_generation(self, *args, is_first_iteration: bool = False, **kwargs):
        inputs = super().prepare_inputs_for_generation(*args, is_first_iteration=is_first_iteration, **kwargs)
        if not is_first_iteration:
            inputs.pop("cross_attention_states", None)
        return inputs


def small_tower(image_size: int = 560) -> PreTrainedModel:
    """A SigLIP that makes 1600 tokens of an image of 560 x 560, 400 of one of 280 x 280."""
    config = SiglipVisionConfig(
        hidden_size=192,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=6,
        image_size=image_size,
        patch_size=14,
    )
    return AutoModel.from_config(config)


def our_model(
    hidden: int,
    layers: int,
    blocks: list[int] | None,
    heads: int,
    kv_heads: int,
    inner: int,
    vision: PreTrainedModel | None = None,
) -> PreTrainedModel:
    """A Llama with blocks in front of some layers; without blocks, the plain Llama."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=inner,
        vocab_size=VOCABULARY,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    text = AutoModelForCausalLM.from_config(config)
    if blocks is None:
        return text
    return retrofit(text, vision, cross_attention_layers=blocks, cross_attention={"qk_norm": True})
