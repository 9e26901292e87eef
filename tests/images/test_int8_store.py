"""The image store with `dtype="int8"`, and files of caches in int8 that are damaged."""

import copy
import json

import pytest
import torch
from safetensors import safe_open

from helpers.inputs.image_stores import IMAGE_BYTES, MODELS, Counted, asked, assert_same, damaged
from helpers.models.marked_models import MARKER, fresh_cache, marked
from helpers.models.tiny_models import make_model, pixels, token_ids
from helpers.references.int8_rounding import both
from hf_xattn.storage.image_files import load_image_cache, save_image_cache
from hf_xattn.utils.transformers_api import CACHE


INT8_BYTES = IMAGE_BYTES // 4 + IMAGE_BYTES // 8  # a byte each for 8 values, and 4 for their scale


def stored(model, **kwargs):
    model.enable_image_store(dtype="int8", **kwargs)
    return model


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("batch, num_images", [(1, 1), (2, 3)])
def test_the_first_answer_is_the_second(kind, batch, num_images):
    """A first answer from keys and values that are not rounded; a picture that is encoded again; floats
    in the store.
    """
    model, reference = both(**MODELS[kind])
    ids, images = token_ids(batch), pixels(batch, num_images)
    expected = asked(reference, ids, pixel_values=images)
    stored(model)
    with Counted(model) as counts:
        first = asked(model, ids, pixel_values=images)
        assert_same(first, expected, equal=False)
        for _ in range(2):
            assert_same(asked(model, ids, pixel_values=images), first)
        assert counts == {"images": batch * num_images, "projections": 4}
    assert first[CACHE].cross_attention_cache.cache_dtype == "int8"
    if kind == "plain":
        assert model.image_store.nbytes == batch * num_images * INT8_BYTES
    for image in model.image_store._images.values():
        for states in (states for pair in image.keys_values for states in pair):
            assert states.steps.dtype == torch.int8
            assert states.steps.untyped_storage().nbytes() + states.scales.untyped_storage().nbytes() == states.nbytes


def test_rows_are_put_together():
    """Images of one call beside the scales of others; padding that is not zero."""
    model, reference = both(marked, rule="latest")
    a, b, c = pixels(3, 1).unbind(0)
    batch, mask = torch.stack([torch.cat([a, b]), torch.cat([c, a])]), torch.tensor([[True, True], [True, False]])
    ids = torch.tensor([[MARKER, 5, MARKER, 6, 7], [4, MARKER, 5, 6, 9]])
    expected = asked(reference, ids, pixel_values=batch, image_mask=mask)
    stored(model)
    asked(model, ids[1:], pixel_values=batch[1:, :1])
    for _ in range(2):
        assert_same(asked(model, ids, pixel_values=batch, image_mask=mask), expected, equal=False)
    assert (model.image_store.misses, model.image_store.hits) == (3, 4)


@torch.no_grad()
def test_store_and_cache_of_different_dtypes():
    """Steps that are read as values where a cache or a store holds the other kind; an image that is rounded twice."""
    model, reference = both()
    images, ids = pixels(2, 2), token_ids()
    plain = make_model().encode_images(images[:, :1])
    small = make_model().encode_images(images[:, :1], cache_dtype="int8")
    for dtype in (None, "int8"):
        model.enable_image_store(dtype=dtype)
        for cache in (plain, small):
            cache, before = copy.deepcopy(cache), [layer.tensors for layer in cache.cross_attention_cache.layers]
            kind = cache.cache_dtype
            model.encode_images(images[:, 1:], cache=cache)
            assert cache.cache_dtype == kind and cache.cross_attention_cache.get_seq_length() == 32
            for layer, first in zip(cache.cross_attention_cache.layers, before):
                assert all(torch.equal(now[:, :, :16], old) for now, old in zip(layer.tensors, first, strict=True))
            served = reference if "int8" in (dtype, kind) else make_model()
            if kind == dtype:
                assert_same(asked(model, ids, cache=cache), asked(served, ids, pixel_values=images), equal=False)
            last = cache.cross_attention_cache.layers[0].read()[0]
            floats = last.dequantized() if kind else last
            expected = served.encode_images(images[:, 1:]).cross_attention_cache.layers[0].keys
            assert torch.allclose(floats[:, :, 16:], expected, atol=1e-6)
    model.enable_image_store(dtype="int8")
    assert model.encode_images(images).cache_dtype == "int8", "a new cache follows the store"
    model.enable_image_store()
    assert model.encode_images(images).cache_dtype is None
    direct, from_store = (served.encode_images(images, cache_dtype="int8") for served in (make_model(), model))
    for one, other in zip(direct.cross_attention_cache.layers, from_store.cross_attention_cache.layers):
        assert all(torch.allclose(mine, theirs, atol=1e-6) for mine, theirs in zip(one.tensors, other.tensors))


def test_enable_again_and_copies():
    """Images of another dtype that stay; a store that forgets its dtype."""
    model, ids, images = stored(make_model(), max_bytes=3 * INT8_BYTES), token_ids(), pixels()
    asked(model, ids, pixel_values=images)
    store = model.image_store
    assert (store.num_images, store.dtype) == (2, "int8") and "dtype='int8'" in repr(store)
    model.enable_image_store(max_bytes=3 * INT8_BYTES, dtype="int8")
    assert model.image_store is store and store.num_images == 2
    copied = copy.deepcopy(model).image_store
    assert (copied.num_images, copied.dtype, copied.max_bytes) == (0, "int8", store.max_bytes)
    model.enable_image_store(max_bytes=3 * INT8_BYTES)
    assert (store.num_images, store.nbytes, store.dtype) == (0, 0, None)
    asked(model, ids, pixel_values=images)
    assert store.num_images == 1, "3 images in int8 are 1 in float32"
    for wrong, error in (("int4", ValueError), (torch.int8, TypeError)):
        with pytest.raises(error, match='Expected `dtype` to be "int8" or None'):
            model.enable_image_store(dtype=wrong)
        with pytest.raises(error, match='Expected `dtype` to be "int8" or None'):
            make_model().enable_image_store(dtype=wrong)
    assert store.num_images == 1 and store.dtype is None


def test_where_the_store_is_left_aside():
    """Rounding where nothing is stored: gradients that stop, training that is refused."""
    model, ids, images = stored(make_model()), token_ids(), pixels()
    learning = model.encode_images(images)
    assert learning.cache_dtype is None and learning.cross_attention_cache.layers[0].keys.requires_grad
    model.train()
    model(ids, pixel_values=images, labels=ids).loss.backward()
    assert model.blocks[0].attn.k_proj.weight.grad.abs().max() > 0
    assert model.image_store.num_images == 0


def test_own_cache_with_a_store():
    """A caller's empty cache that keeps floats beside a store in int8."""
    model, cache = stored(make_model()), fresh_cache()
    asked(model, token_ids(), pixel_values=pixels(), cache=cache)
    assert cache.cross_attention_cache.cache_dtype == "int8"
    assert cache.cross_attention_cache.nbytes == 2 * INT8_BYTES == model.image_store.nbytes


def without(name):
    return lambda tensors: tensors.pop(name)


def changed(name, change):
    return lambda tensors: tensors.update({name: change(tensors[name])})


@pytest.mark.parametrize(
    "change, facts, message",
    [
        (without("layers.1.key_scales"), {}, "it has no layers.1.key_scales"),
        (changed("layers.0.value_scales", lambda scales: scales[..., 0]), {}, "layers.0.value_scales of shape"),
        (changed("layers.0.key_scales", lambda scales: scales.half()), {}, "layers.0.key_scales.* of F16"),
        (changed("layers.0.key_scales", lambda scales: scales[:1]), {}, "layers.0.key_scales of shape"),
        (changed("layers.0.values", lambda steps: steps.float()), {}, "layers.0.values.* of F32"),
        (lambda _: None, {"cache_dtype": "int4"}, 'expected `cache_dtype` to be "int8", got'),
        (lambda _: None, {"dtype": "int8"}, "expected `dtype` to be a dtype of floats"),
        (lambda _: None, {"dtype": "nn"}, "expected `dtype` to be a dtype of floats"),
        (lambda _: None, {"dtype": 3}, "damaged"),
    ],
)
@torch.no_grad()
def test_damaged_files_of_int8_images_are_refused(tmp_path, change, facts, message):
    """A file whose steps have no scales, or the scales of something else."""
    model, file = make_model(), tmp_path / "images"
    save_image_cache(model.encode_images(pixels(2), cache_dtype="int8"), file, model)
    with pytest.raises(ValueError, match=f"is damaged: .*{message}" if message != "damaged" else message):
        load_image_cache(damaged(file, change, facts_of(file, facts)), model)
    with pytest.raises(ValueError, match="is damaged: .*layers.0.keys.* of I8"):
        load_image_cache(damaged(file, lambda _: None, facts_of(file, {"cache_dtype": None})), model)
    plain = tmp_path / "plain"
    save_image_cache(model.encode_images(pixels(2)), plain, model)
    told = {"images": facts_of(file, {})["images"]}
    with pytest.raises(ValueError, match="is damaged: .*layers.0.keys.* of F32"):
        load_image_cache(damaged(plain, lambda _: None, told), model)


@torch.no_grad()
def test_files_of_earlier_versions(tmp_path):
    """Images in a file of the format 3 or 4 that no version reads any more, or that lose their masks."""
    model, file = make_model(), tmp_path / "images"
    given = {"pixel_values": pixels(2, 2), "image_mask": torch.tensor([[True, True], [True, False]])}
    for number, dtype in ((3, None), (4, "int8")):
        save_image_cache(model.encode_images(**given, cache_dtype=dtype), file, model)
        with safe_open(file, framework="pt") as opened:
            facts = json.loads(opened.metadata()["images"])
        if dtype is None:  # it had neither
            del facts["dtype"], facts["cache_dtype"]
        told = {"format": f"hf_xattn image cache {number}", "images": json.dumps(facts)}
        loaded, expected = load_image_cache(damaged(file, lambda _: None, told), model), load_image_cache(file, model)
        assert loaded.cache_dtype == dtype
        assert torch.equal(model(token_ids(), cache=loaded).logits, model(token_ids(), cache=expected).logits)
        assert torch.equal(*(each.cross_attention_cache.layout.token_mask for each in (loaded, expected)))


def facts_of(file, changes):
    with safe_open(file, "pt") as opened:
        facts = json.loads(opened.metadata()["images"])
    assert facts["cache_dtype"] == "int8" and facts["dtype"] == "float32"
    return {"images": json.dumps(facts | changes)}
