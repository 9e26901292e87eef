"""Decoders whose code is not transformers' own."""

import pytest
import torch
from conftest import randomize, token_ids, vision_config
from custom_decoder import CustomDecoderConfig, CustomDecoderForCausalLM
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForImageTextToText

from hf_xattn import retrofit


@pytest.fixture
def registered():
    """The decoder in transformers' Auto classes, as a user's session puts it there."""
    AutoConfig.register("custom_decoder", CustomDecoderConfig, exist_ok=True)
    AutoModelForCausalLM.register(CustomDecoderConfig, CustomDecoderForCausalLM, exist_ok=True)


def make_custom():
    """Weights that no initialisation gives."""
    torch.manual_seed(0)
    text = CustomDecoderForCausalLM(CustomDecoderConfig()).eval()
    for parameter in text.parameters():
        parameter.data.add_(torch.randn_like(parameter) * 0.1 + 1)
    return text


def same_state(first, second):
    first, second = first.state_dict(), second.state_dict()
    assert first.keys() == second.keys()
    assert [name for name in first if not torch.equal(first[name], second[name])] == []


@torch.no_grad()
@pytest.mark.parametrize("base", [True, False])
def test_loaded_weights_stay(registered, tmp_path, base):
    """A decoder's own initialisation, which writes in place, run over its loaded weights."""
    text = make_custom()
    text.save_pretrained(tmp_path / "text")
    model = randomize(retrofit(tmp_path / "text", AutoModel.from_config(vision_config()), every=2))
    expected = make_custom()(token_ids()).logits
    assert torch.equal(model(token_ids()).logits, expected)
    model.save_pretrained(tmp_path / "model")
    auto_class = AutoModel if base else AutoModelForImageTextToText
    loaded, info = auto_class.from_pretrained(tmp_path / "model", output_loading_info=True)
    assert not info["missing_keys"]
    same_state(loaded, model.model if base else model)
