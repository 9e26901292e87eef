"""The text half of a vision-language model, retrofitted from the model or from its checkpoint."""

import pytest
import torch
from tiny_architectures import tiny_config
from tiny_models import randomize
from transformers import (
    CLIPVisionConfig,
    Gemma3Config,
    Llama4Config,
    LlavaConfig,
    Mistral3Config,
    PaliGemmaConfig,
    Qwen2VLConfig,
    Qwen3_5Config,
    SmolVLMConfig,
)

from hf_xattn import retrofit
from hf_xattn.decoders.text_half import composite_class, text_half


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
IDS = torch.randint(4, 80, (2, 7), generator=torch.Generator().manual_seed(1))


def make(name):
    torch.manual_seed(0)
    config = COMPOSITES[name]()
    return composite_class(config)(config).eval()


@torch.no_grad()
@pytest.mark.parametrize("name", COMPOSITES)
def test_text_half(name, tmp_path):
    """A text half with other weights, another mask or another head than in the larger model."""
    whole = make(name)
    expected = whole(input_ids=IDS).logits
    whole.save_pretrained(tmp_path)
    for source in (tmp_path, whole):
        model = retrofit(source, every=2).eval()
        assert model.config.text_config.model_type == whole.config.text_config.model_type
        assert model.model.vision_tower is None
        assert torch.allclose(model(IDS).logits, expected, atol=1e-6)
        states = torch.randn(2, 5, model.config.cross_attention_config.context_size)
        assert torch.equal(model(IDS, cross_attention_states=states).logits, model(IDS).logits)
        assert not torch.allclose(randomize(model)(IDS, cross_attention_states=states).logits, expected, atol=1e-3)


def test_taken_over_not_copied():
    """A copy of a decoder of many gigabytes."""
    whole = make("llava")
    text = text_half(whole)
    assert text.model is whole.model.language_model and text.lm_head is whole.lm_head
    assert text_half(text) is text


def test_unknown_text_half_is_refused():
    """A decoder without a causal language model of its own, found out after its weights were read."""
    text = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 96,
    }
    config = Qwen2VLConfig(
        text_config=text, vision_config={"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 2}
    )
    with torch.device("meta"):
        whole = composite_class(config)(config)
    with pytest.raises(ValueError, match="'qwen2_vl' model is a 'qwen2_vl_text' decoder.*no causal language model"):
        retrofit(whole)
