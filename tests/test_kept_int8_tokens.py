"""`keep_image_tokens` on images in int8: the same choice as without, and no number rounded twice."""

import pytest
import torch
from int8_rounding import both
from kept_tokens import kept_of, lengths
from marked_models import fresh_cache
from tiny_models import make_model, pixels, token_ids

from hf_xattn import check_images


LAYERS = [0, 1, 3]
OPTIONS = {"max_new_tokens": 4, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}


@torch.no_grad()
@pytest.mark.parametrize("quiet", [False, True])
@pytest.mark.parametrize("stored", [False, True], ids=["encoded", "store"])
def test_equals_rounding_by_hand(quiet, stored):
    """Tokens chosen by other keys than the text reads; scales left behind when tokens are dropped; a cache that grows again."""
    sizes = {"cross_attention_layers": LAYERS, "cross_attention_config": {"quiet_softmax": quiet}}
    model, reference = both(make_model, **sizes)
    ids, images = token_ids(), pixels(2, 2)
    expected = reference.generate(ids, pixel_values=images, keep_image_tokens=0.25, **OPTIONS)
    if stored:
        model.enable_image_store(2**24, dtype="int8")
        found = model.generate(ids, pixel_values=images, keep_image_tokens=0.25, **OPTIONS)
        again = model.generate(ids, pixel_values=images, keep_image_tokens=0.25, **OPTIONS)
        assert torch.equal(found.sequences, again.sequences) and model.image_store.hits == 4
    else:
        whole = model.encode_images(pixel_values=images, cache_dtype="int8")
        found = model.generate(ids, past_key_values=whole, keep_image_tokens=0.25, **OPTIONS)
        assert lengths(whole) == [32 + quiet] * 3
    cache = found.past_key_values
    assert lengths(cache) == [32 + quiet, 8 + quiet, 8 + quiet]
    assert torch.equal(kept_of(cache, 32), kept_of(expected.past_key_values, 32))
    for layer in cache.cross_attention_cache.layers:
        assert layer.keys.dtype == torch.int8 and layer.key_scales.shape == (*layer.keys.shape[:3], 1)
    for one, other in zip(found.logits, expected.logits):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    assert torch.equal(found.sequences, expected.sequences)
    plain = reference.generate(ids, pixel_values=images, **OPTIONS)
    assert not torch.allclose(plain.logits[0], expected.logits[0], rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_a_store_that_is_left_aside():
    """A cache in the model's dtype, where checked images go to the first forward; a dtype that waits in a cache after a failure."""
    model, reference = both(make_model, cross_attention_layers=LAYERS)
    model.enable_image_store(2**24, dtype="int8")
    ids, images, cache = token_ids(), pixels(2, 2), fresh_cache()
    options = {**OPTIONS, "keep_image_tokens": 0.25, "past_key_values": cache}
    expected = reference.generate(ids, pixel_values=images, **{**options, "past_key_values": None})
    with check_images(model):
        handle = model.blocks[-1].register_forward_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model.generate(ids, pixel_values=images, **options)
        handle.remove()
        model(ids, pixel_values=images, past_key_values=cache)
        assert cache.cross_attention_cache.cache_dtype is None
        cache.reset()
        found = model.generate(ids, pixel_values=images, **options)
        assert cache.cross_attention_cache.cache_dtype == "int8" and lengths(cache) == [32, 8, 8]
        for one, other in zip(found.logits, expected.logits, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
        own = model.generate(ids, pixel_values=images, **{**options, "past_key_values": None}).past_key_values
        assert own.cross_attention_cache.cache_dtype == "int8"
        own.reset()
        assert own.cross_attention_cache.cache_dtype is None
