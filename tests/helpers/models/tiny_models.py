"""Tiny models that the tests share. No network, no downloads: everything is built from a configuration."""

import os
import tempfile


if "HF_DATASETS_CACHE" not in os.environ:
    TABLES = tempfile.TemporaryDirectory()  # what `datasets` converts, until the tests end
    os.environ["HF_DATASETS_CACHE"] = TABLES.name
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    OPTConfig,
    Phi3Config,
    PreTrainedModel,
    Qwen3Config,
    SiglipVisionConfig,
)

from hf_xattn import XAttnConfig, XAttnForConditionalGeneration
from hf_xattn.utils import transformers_api


# Threads cost more than they give on models of this size, and several test runs share the machine.
torch.set_num_threads(1)

VOCAB_SIZE = 96
SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "vocab_size": VOCAB_SIZE,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "max_position_embeddings": 128,
}
_NO_GQA = {name: value for name, value in SIZES.items() if name != "num_key_value_heads"}

TEXT_CONFIGS = {
    "llama": lambda: LlamaConfig(**SIZES),
    "llama_tied": lambda: LlamaConfig(**SIZES, tie_word_embeddings=True),
    "qwen3": lambda: Qwen3Config(**SIZES, head_dim=8),
    "mistral": lambda: MistralConfig(**SIZES, sliding_window=6),
    "gemma3": lambda: Gemma3TextConfig(
        **SIZES, head_dim=8, sliding_window=6, layer_types=["sliding_attention", "full_attention"] * 2
    ),
    "gpt2": lambda: GPT2Config(
        n_embd=32, n_layer=4, n_head=4, vocab_size=VOCAB_SIZE, n_positions=128, bos_token_id=1, eos_token_id=None
    ),
    "opt": lambda: OPTConfig(
        hidden_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        ffn_dim=64,
        vocab_size=VOCAB_SIZE,
        word_embed_proj_dim=32,
        max_position_embeddings=128,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=None,
    ),
    "gpt_neox": lambda: GPTNeoXConfig(**_NO_GQA),
    "phi3": lambda: Phi3Config(**SIZES),
    "olmo2": lambda: Olmo2Config(**SIZES),
    "mixtral": lambda: MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2),
}


def needs_part(part: str) -> pytest.MarkDecorator:
    """Marks a test that the installed transformers lacks a part for, one that `transformers_api` names."""
    return pytest.mark.skipif(not transformers_api.has(part), reason=transformers_api.needs(part, f"`{part}`"))


def make_text(name: str = "llama", dtype: torch.dtype = torch.float32, seed: int = 0) -> PreTrainedModel:
    """A tiny causal language model with random weights."""
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(TEXT_CONFIGS[name](), dtype=dtype).eval()


def vision_config() -> SiglipVisionConfig:
    """A tower that makes 16 tokens of a 32 x 32 image."""
    return SiglipVisionConfig(
        hidden_size=24,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=32,
        patch_size=8,
        vision_use_head=False,
    )


def randomize(model: torch.nn.Module, seed: int = 1, scale: float = 0.3) -> torch.nn.Module:
    """Random weights in everything that was added, so that images matter."""
    generator = torch.Generator().manual_seed(seed)
    for block in model.blocks:
        for name, parameter in block.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator) * scale
            parameter.data = (noise + ("norm" in name)).to(parameter.dtype)
    return model


@torch.no_grad()
def strengthen(text: torch.nn.Module) -> torch.nn.Module:
    """Larger weights in a text model: with first ones, a state that is lost hardly changes the logits."""
    generator = torch.Generator().manual_seed(6)
    for parameter in text.parameters():
        if parameter.dim() > 1:
            parameter.normal_(0, 0.2, generator=generator)
    return text


def make_model(
    name: str = "llama", *, vision: bool = True, dtype: torch.dtype = torch.float32, random: bool = True, **config
) -> XAttnForConditionalGeneration:
    """A tiny retrofitted model with blocks in front of layers 1 and 3."""
    text = make_text(name, dtype)
    config.setdefault("cross_attention_layers", [1, 3])
    torch.manual_seed(2)
    config = XAttnConfig(text_config=text.config, vision_config=vision_config() if vision else None, **config)
    model = XAttnForConditionalGeneration(config, text_model=text).eval()
    return randomize(model) if random else model


def kernels_of(model: XAttnForConditionalGeneration) -> dict[str, str]:
    """Attention kernels of the parts of a model, as their configurations name them."""
    config = model.config
    names = {name: getattr(config, name) for name in ("text_config", "vision_config", "cross_attention_config")}
    kernels = {name: part._attn_implementation for name, part in names.items() if part is not None}
    return {**kernels, "": config._attn_implementation, "block": model.blocks[0].attn.config._attn_implementation}


def token_ids(batch: int = 2, length: int = 7, seed: int = 3) -> torch.Tensor:
    """Ids without special tokens."""
    return torch.randint(4, VOCAB_SIZE, (batch, length), generator=torch.Generator().manual_seed(seed))


def pixels(batch: int = 2, num_images: int = 1, seed: int = 4) -> torch.Tensor:
    """Random images, `(batch, num_images, 3, 32, 32)`."""
    return torch.randn(batch, num_images, 3, 32, 32, generator=torch.Generator().manual_seed(seed))


PERCEIVER = {"num_latents": 3, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 8}
