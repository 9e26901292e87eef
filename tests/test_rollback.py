"""A call that fails leaves its cache as it was."""

import pytest
import torch
from marked_models import MARKER, close, fresh_cache, marked, state_space
from tiny_models import pixels, token_ids
from transformers.cache_utils import DynamicCache, EncoderDecoderCache, StaticCache


class Interrupted(KeyboardInterrupt):
    pass


PLACES = {
    "first_k_proj": lambda model: model.blocks[0].attn.k_proj,
    "last_v_proj": lambda model: model.blocks[-1].attn.v_proj,
    "last_o_proj": lambda model: model.blocks[-1].attn.o_proj,
    "last_mlp": lambda model: model.blocks[-1].mlp,
    "last_layer": lambda model: model.get_decoder().layers[-1],
    "head": lambda model: model.get_output_embeddings(),
}
PARTS = (slice(0, 4), slice(4, 8), slice(8, 14))  # the windows of mistral and gemma3 are full after six tokens


def caches(model, images):
    config = model.config.text_config
    return {
        "dynamic": lambda: EncoderDecoderCache(DynamicCache(config=config), DynamicCache()),
        "lazy": fresh_cache,
        "static": lambda: EncoderDecoderCache(StaticCache(config=config, max_cache_len=40), DynamicCache()),
        "encoded": lambda: model.encode_images(pixel_values=images),
    }


def fails_once(module, call):
    """Calls with a hook that interrupts behind `module`."""

    def interrupt(*_):
        raise Interrupted

    handle = module.register_forward_hook(interrupt)
    with pytest.raises(Interrupted):
        call()
    handle.remove()


@torch.no_grad()
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", ["llama", "gemma3", "mistral"])
@pytest.mark.parametrize("kind", ["dynamic", "lazy", "static", "encoded"])
def test_a_call_that_fails_leaves_the_cache_as_it_was(place, name, kind):
    """A retry after an exception that reads half-filled keys and values, or text twice."""
    model, ids, images = marked("latest", name), token_ids(2, 14), pixels(2, 2)
    ids[:, 1] = ids[:, 10] = MARKER
    expected = model(ids, pixel_values=images, use_cache=False).logits
    cache = caches(model, images)[kind]()
    for part, new in zip(PARTS, (images[:, :1], None, images)):
        given = {} if new is None or kind == "encoded" else {"pixel_values": new}

        def call(part=part, given=given):
            return model(ids[:, part], past_key_values=cache, **given).logits

        if given or place not in ("first_k_proj", "last_v_proj"):  # nothing is projected without new images
            fails_once(PLACES[place](model), call)
        if cache.__dict__.get("broken"):
            assert kind == "static" and name != "llama", "only full static windows are overwritten"
            with pytest.raises(ValueError, match="full static windows cannot be restored"):
                call()
            return
        assert close(call(), expected[:, part])


@torch.no_grad()
@pytest.mark.parametrize("name", ["mamba", "bamba"])
def test_a_state_space_decoder_says_that_its_cache_is_broken(name):
    """States that are overwritten in place, used again after a call that failed half-way."""
    model, ids, images = state_space(name), token_ids(2, 8), pixels()
    cache = EncoderDecoderCache(DynamicCache(config=model.config.text_config), DynamicCache())

    def failing(**kwargs):
        fails_once(model.blocks[-1].mlp, lambda: model(**kwargs, past_key_values=cache))

    failing(input_ids=ids[:, :5], pixel_values=images)
    first = model(ids[:, :5], pixel_values=images, past_key_values=cache).logits
    expected = model(ids, pixel_values=images, use_cache=False).logits
    assert close(first, expected[:, :5])
    failing(input_ids=ids[:, 5:6])  # Mamba reads no more after its state
    with pytest.raises(ValueError, match="state-space layers cannot be restored.*reset"):
        model(ids[:, 5:], past_key_values=cache)
    cache.reset()
    assert close(model(ids, pixel_values=images, past_key_values=cache).logits, expected)
