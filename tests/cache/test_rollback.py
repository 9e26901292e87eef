"""A call that fails leaves its cache as it was, or the next use of the cache says that it cannot."""

import pytest
import torch
from transformers.cache_utils import DynamicCache, DynamicIndexedLayer, EncoderDecoderCache, QuantizedLayer, StaticCache

from helpers.models.marked_models import MARKER, close, fresh_cache, marked, marked_model, state_space
from helpers.models.tiny_models import pixels, token_ids


GREEDY = {"max_new_tokens": 6, "do_sample": False}


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
WINDOW = 6  # of mistral and gemma3
PARTS = (slice(0, 4), slice(4, 8), slice(8, 14))
REFUSED = r"An earlier call with `cache` failed.*reset\(\)"


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
            return model(ids[:, part], cache=cache, **given).logits

        fails = given or place not in ("first_k_proj", "last_v_proj")  # nothing is projected without new images
        if fails:
            fails_once(PLACES[place](model), call)
        if cache.__dict__.get("broken"):
            full = name != "llama" and kind != "lazy" and part.stop > WINDOW
            assert part.start and (kind == "static" or full), "there is something that a crop cannot restore"
            with pytest.raises(ValueError, match=REFUSED):
                call()
            return
        projects = place in ("first_k_proj", "last_v_proj")  # in front of the text
        assert not (fails and part.start and kind == "static" and not projects)
        assert close(call(), expected[:, part])


@torch.no_grad()
@pytest.mark.parametrize("name", ["mamba", "bamba"])
def test_states_cannot_be_restored(name):
    """States that are overwritten in place, used again after a call that failed half-way."""
    model, ids, images = state_space(name), token_ids(2, 8), pixels()
    cache = EncoderDecoderCache(DynamicCache(config=model.config.text_config), DynamicCache())
    expected = model(ids, pixel_values=images, use_cache=False).logits

    def failing(**kwargs):
        fails_once(model.blocks[-1].mlp, lambda: model(**kwargs, cache=cache))

    failing(input_ids=ids[:, :5], pixel_values=images)
    if name == "mamba":  # its layers do not tell that they held no text
        with pytest.raises(ValueError, match=REFUSED):
            model(ids[:, :5], pixel_values=images, cache=cache)
        cache.reset()
    first = model(ids[:, :5], pixel_values=images, cache=cache).logits
    assert close(first, expected[:, :5])
    failing(input_ids=ids[:, 5:6])  # Mamba reads no more after its state
    with pytest.raises(ValueError, match=REFUSED):
        model(ids[:, 5:], cache=cache)
    cache.reset()
    assert close(model(ids, pixel_values=images, cache=cache).logits, expected)


class Rounding(QuantizedLayer):
    """Its `crop` cuts what is not rounded yet, and no more."""

    def _quantize(self, tensor, axis):
        return tensor

    def _dequantize(self, tensor):
        return tensor


@torch.no_grad()
@pytest.mark.parametrize("kind", [Rounding, DynamicIndexedLayer])
def test_layers_whose_crop_leaves_something(kind):
    """Rounded keys of a failed call, or indexer keys that were written and keys that were not."""
    model, ids, images = marked("latest", "llama"), token_ids(2, 8), pixels()
    ids[:, 1] = MARKER
    expected = model(ids, pixel_values=images, use_cache=False).logits
    cache = fresh_cache()
    cache.self_attention_cache.layer_class_to_replicate = kind

    def call(part):
        return model(ids[:, part], cache=cache, **({} if part.start else {"pixel_values": images})).logits

    for part in (slice(0, 4), slice(4, 8)):
        fails_once(model.blocks[-1].mlp, lambda part=part: call(part))
        if part.start:
            with pytest.raises(ValueError, match=REFUSED):
                call(part)
        else:
            assert close(call(part), expected[:, part])


@torch.no_grad()
@pytest.mark.parametrize("part", [slice(0, 4), slice(4, 8)], ids=["first", "second"])
def test_an_update_that_stops_between_keys_and_values(part):
    """Values of earlier text that are cut, because the keys are longer: out of memory while values are joined."""
    model, ids, images = marked("latest", "llama"), token_ids(2, 8), pixels()
    ids[:, 1] = MARKER
    expected = model(ids, pixel_values=images, use_cache=False).logits
    cache = fresh_cache()
    if part.start:
        model(ids[:, :4], pixel_values=images, cache=cache)
    text = cache.self_attention_cache
    update = text.update

    def stop(key, value, layer_idx, *args, **kwargs):
        found = update(key, value, layer_idx, *args, **kwargs)
        if layer_idx == 1:
            text.layers[1].values = text.layers[1].values[..., : -key.shape[-2], :]
            raise Interrupted
        return found

    text.update = stop
    with pytest.raises(Interrupted):
        model(ids[:, part], cache=cache, pixel_values=images)
    del text.update
    if part.start:
        with pytest.raises(ValueError, match=REFUSED):
            model(ids[:, part], cache=cache)
    else:
        given = {"cache": cache, "pixel_values": images[:1]}
        assert close(model(ids[:1], **given).logits, expected[:1]), "another batch than that of the failed call"


@torch.no_grad()
def test_static_cache_after_a_failed_prefill():
    """A picture that is answered with the one of a call that failed before it had read anything."""
    model, _ = marked_model()
    cache = EncoderDecoderCache(StaticCache(config=model.config.text_config, max_cache_len=32), DynamicCache())

    def fail(*args):
        raise RuntimeError("out of memory")

    handle = model.model.text_model.register_forward_pre_hook(fail)
    ids = token_ids(1)
    ids[0, 1:], ids[0, 0] = 7, MARKER
    with pytest.raises(RuntimeError, match="out of memory"):
        model.generate(ids, pixel_values=pixels(1, 1), cache=cache, **GREEDY)
    handle.remove()
    with pytest.raises(ValueError, match="holds images of text that was removed"):
        model.generate(ids, pixel_values=pixels(1, 1, seed=8), cache=cache, **GREEDY)
