"""LayerDrop: decoders that leave out layers at random in training, and blocks with them."""

import copy

import pytest
import torch
from tiny_decoders import CONTEXT_SIZE, make_tiny
from tiny_models import randomize
from transformers import DynamicCache, EncoderDecoderCache

from hf_xattn import XAttnConfig, XAttnForConditionalGeneration, freeze
from hf_xattn.decoders.decoder import find_decoder
from hf_xattn.utils.transformers_api import CACHE


IDS = torch.randint(4, 90, (2, 7), generator=torch.Generator().manual_seed(1))
STATES = torch.randn(2, 5, CONTEXT_SIZE, generator=torch.Generator().manual_seed(2))


def dropping(model_type="opt", layerdrop=0.5):
    text = make_tiny(model_type)
    config = XAttnConfig(
        text_config=text.config,
        cross_attention_layers=[0, 1, 2, 3],
        cross_attention_config={"context_size": CONTEXT_SIZE},
    )
    model = randomize(XAttnForConditionalGeneration(config, text_model=text)).train()
    find_decoder(text)[0].layerdrop = layerdrop
    return model


@pytest.mark.parametrize("model_type", ["opt", "xglm", "biogpt"])
def test_blocks_that_ran_learn(model_type):
    """A training run that dies because a layer was left out, or one whose other blocks learn nothing."""
    model = dropping(model_type)
    numbers_of_learning_blocks = set()
    for seed in range(8):
        torch.manual_seed(seed)
        model.zero_grad()
        outputs = model(IDS, cross_attention_states=STATES, labels=IDS, use_cache=True, output_attentions=True)
        assert outputs.get(CACHE) is None
        outputs.loss.backward()
        learned = [block for block in model.blocks if block.attn.k_proj.weight.grad is not None]
        assert all(block.attn.k_proj.weight.grad.any() for block in learned)
        assert len(outputs.cross_attentions) == len(learned)
        numbers_of_learning_blocks.add(len(learned))
    assert len(numbers_of_learning_blocks) > 1


def test_no_half_filled_cache():
    """Keys and values of some blocks only, in a cache that is used again."""
    model = dropping()
    cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
    encoded = model.encode_images(cross_attention_states=STATES)
    for past, inputs in ((cache, {"cross_attention_states": STATES}), (encoded, {})):
        model(IDS, cache=past, labels=IDS, **inputs).loss.backward()
    assert cache.get_seq_length() == encoded.get_seq_length() == 0
    assert not cache.cross_attention_cache.layers and len(encoded.cross_attention_cache.layers) == 4
    model.eval()
    with torch.no_grad():
        expected = model(IDS, cross_attention_states=STATES).logits
        for past, inputs in ((cache, {"cross_attention_states": STATES}), (encoded, {})):
            assert torch.allclose(model(IDS, cache=past, **inputs).logits, expected, atol=1e-5)
    model.train()
    with pytest.raises(ValueError, match="LayerDrop skips layers.*`cache`.*`layerdrop`"):
        model(IDS, cache=cache)
    fresh = copy.deepcopy(dropping()).encode_images(cross_attention_states=STATES)
    with pytest.raises(ValueError, match="LayerDrop skips layers.*no images can be added"):
        model(IDS, cache=fresh, cross_attention_states=STATES + 1)


def test_all_layers_left_out():
    """A frozen base and a step without any block: "element 0 of tensors does not require grad", and the run dies."""
    model = freeze(
        dropping(layerdrop=1.1), names={"*.layers.0.fc1.*": False}
    )  # a decoder that is frozen whole drops none
    outputs = model(IDS, cross_attention_states=STATES, labels=IDS)
    outputs.loss.backward()
    outputs = model(IDS, cross_attention_states=STATES)
    outputs.logits.sum().backward()
    assert not any(weight.grad is not None and weight.grad.any() for weight in model.parameters())


def test_layers_that_get_nothing_are_told():
    """LayerDrop as an excuse for a decoder that does not hand the images on."""
    model = dropping()
    model.model._interface = model.model._interface._replace(receives_keywords=False)
    find_decoder(model.model.text_model)[0].layerdrop = 0.0
    for training in (True, False):
        model.train(training)
        with pytest.raises(
            RuntimeError, match="OPTForCausalLM did not pass the images to its layers: 0 of 4 blocks ran"
        ):
            model(IDS, cross_attention_states=STATES)
