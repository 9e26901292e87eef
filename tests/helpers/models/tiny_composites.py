"""Tiny vision-language models of transformers, whose text half is taken."""

import torch
from transformers import (
    CLIPVisionConfig,
    Gemma3Config,
    Llama4Config,
    LlavaConfig,
    Mistral3Config,
    PaliGemmaConfig,
    Qwen3_5Config,
    SmolVLMConfig,
)

from helpers.models.tiny_architectures import tiny_config
from hf_xattn.checkpoints.bases import composite_class


SMALL = {
    "hidden_size": 24,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
}

QWEN_VISION = {"depth": 2, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": 32}

LLAMA4_VISION = SMALL | {
    "hidden_size": 32,
    "image_size": 28,
    "patch_size": 14,
    "vision_output_dim": 32,
    "projector_input_dim": 32,
    "projector_output_dim": 32,
}

COMPOSITES = {
    "llava": lambda: LlavaConfig(text_config=tiny_config("llama"), vision_config=CLIPVisionConfig(**SMALL)),
    "gemma3": lambda: Gemma3Config(text_config=tiny_config("gemma3_text"), vision_config=SMALL, mm_tokens_per_image=4),
    "paligemma": lambda: PaliGemmaConfig(
        text_config=tiny_config("gemma"), vision_config=SMALL | {"model_type": "siglip_vision_model"}, projection_dim=32
    ),
    "qwen3_5": lambda: Qwen3_5Config(text_config=tiny_config("qwen3_5_text").to_dict(), vision_config=QWEN_VISION),
    "llama4": lambda: Llama4Config(text_config=tiny_config("llama4_text").to_dict(), vision_config=LLAMA4_VISION),
    "mistral3": lambda: Mistral3Config(
        text_config=tiny_config("mistral"), vision_config=SMALL | {"model_type": "pixtral", "head_dim": 12}
    ),
    "smolvlm": lambda: SmolVLMConfig(text_config=tiny_config("llama"), vision_config=SMALL),
}


def make_composite(name):
    torch.manual_seed(0)
    config = COMPOSITES[name]()
    return composite_class(config)(config).eval()
