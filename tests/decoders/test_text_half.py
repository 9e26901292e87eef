"""The text half of a vision-language model, retrofitted from the model or from its checkpoint."""

import pytest
import torch
import transformers
from transformers import Qwen2VLConfig

from helpers.models.tiny_composites import COMPOSITES, make_composite
from helpers.models.tiny_models import randomize
from hf_xattn import retrofit
from hf_xattn.checkpoints.bases import composite_class, text_half


IDS = torch.randint(4, 80, (2, 7), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
@pytest.mark.parametrize("name", COMPOSITES)
def test_a_text_half_answers_as_it_does_in_the_larger_model(name, tmp_path):
    """A text half with other weights, another mask or another head than in the larger model."""
    whole = make_composite(name)
    fails = name == "llama4" and transformers.__version__ == "5.24.0"  # the whole one reads `image_outputs` of its half
    expected = (whole.language_model if fails else whole)(input_ids=IDS).logits
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
    whole = make_composite("llava")
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
