"""State-space decoders, whose caches do not know how much text there was; positions of text and images."""

import pytest
import torch
from conftest import make_model, pixels, token_ids
from conversation_helpers import close, generate, state_space
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

from hf_xattn.image_cache import combine_images, select_images


@pytest.mark.parametrize("name", ["mamba", "falcon_mamba", "mamba2"])
def test_state_space_decoders_with_a_callers_cache(name):
    """A cache whose layers do not know how much text there was."""
    model, ids, images = state_space(name), token_ids(2, 6), pixels()
    expected = generate(model, ids, pixel_values=images, use_cache=False)
    cache = EncoderDecoderCache(DynamicCache(config=model.config.text_config), DynamicCache())
    first = generate(model, ids, pixel_values=images, past_key_values=cache, return_dict_in_generate=True)
    assert torch.equal(first.sequences, expected)
    chat = torch.cat([first.sequences, token_ids(2, 3, seed=8)], dim=1)
    text = {"attention_mask": torch.ones_like(chat)}  # or transformers takes generated padding tokens for padding
    second = generate(model, chat, past_key_values=cache, **text)
    assert torch.equal(second, generate(model, chat, pixel_values=images, use_cache=False, **text))


@torch.no_grad()
@pytest.mark.parametrize("name", ["mamba", "llama"])
def test_position_bias_with_a_cache(name):
    """Positions that start anew in a later piece of text, or a decoder whose cache has no length to ask for."""
    block = {"position_bias": True}
    ids, images = token_ids(2, 9), pixels(2, 2)
    model = (
        state_space(name, cross_attention_config=block) if name == "mamba" else make_model(cross_attention_config=block)
    )
    expected = model(ids, pixel_values=images, use_cache=False).logits
    cache = EncoderDecoderCache(DynamicCache(config=model.config.text_config), DynamicCache())
    parts = [model(ids[:, :4], pixel_values=images, past_key_values=cache).logits]
    # transformers' Mamba itself reads more than one token after its states inexactly.
    rest = ids[:, 4:].split(1 if name == "mamba" else 3, dim=1)
    parts += [model(part, past_key_values=cache).logits for part in rest]
    assert close(torch.cat(parts, dim=1), expected)
    assert torch.equal(
        generate(model, ids, pixel_values=images), generate(model, ids, pixel_values=images, use_cache=False)
    )


@torch.no_grad()
def test_position_bias_does_not_count_padding():
    """A row whose real images stand behind padding images, at other positions than alone."""
    model, ids, images = make_model(cross_attention_config={"position_bias": True}), token_ids(2, 5), pixels(2, 3)
    mask = torch.tensor([[False, True, True], [True, False, True]])
    logits = model(ids, pixel_values=images, image_mask=mask).logits
    for row in range(2):
        alone = model(ids[row : row + 1], pixel_values=images[row : row + 1, mask[row]]).logits
        assert close(logits[row : row + 1], alone)


@torch.no_grad()
def test_selected_and_combined_images_beside_a_state_space_decoder():
    """Encoded images whose text half has no layers for states."""
    model, ids, images = state_space("mamba"), token_ids(2, 5), pixels(2)
    expected = model(ids, pixel_values=images, use_cache=False).logits
    encoded = model.encode_images(pixel_values=images)
    for cache in (
        select_images(encoded, [0, 1]),
        combine_images([select_images(encoded, [0]), select_images(encoded, [1])]),
    ):
        assert close(model(ids, past_key_values=cache).logits, expected)
