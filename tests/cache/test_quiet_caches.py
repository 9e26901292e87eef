"""Calls with a cache that answered from other text or other weights than they seemed to, without an error."""

import copy

import pytest
import torch
from transformers import DynamicCache, EncoderDecoderCache, StaticCache
from transformers.testing_utils import CaptureLogger
from transformers.utils import logging
from transformers.utils.logging import warning_once

from helpers.models.tiny_models import make_model, make_text, pixels, randomize, strengthen, token_ids, vision_config
from hf_xattn import XAttnConfig, XAttnForConditionalGeneration
from hf_xattn.cache.digests import digest
from hf_xattn.cache.image_cache import select_images
from hf_xattn.storage.image_files import save_image_cache
from hf_xattn.utils.transformers_api import CACHE


GREEDY = {"max_new_tokens": 6, "do_sample": False}


@pytest.fixture(scope="module")
def model():
    text = strengthen(make_text())
    torch.manual_seed(2)
    config = XAttnConfig(text_config=text.config, vision_config=vision_config(), cross_attention_layers=[1, 3])
    return randomize(XAttnForConditionalGeneration(config, text_model=text).eval())


def turn(model, **options):
    return model.generate(token_ids(1), pixel_values=pixels(1, 1), return_dict_in_generate=True, **GREEDY, **options)


@torch.no_grad()
@pytest.mark.parametrize("change", ["select", "repeat", "reorder", "crop"])
def test_images_stay_without_text(change, model):
    """A question that is written into the encoded images, so that the next one is read as its continuation."""
    images = pixels(2, 1)
    cache = model.encode_images(pixel_values=images)
    if change == "select":
        cache.batch_select_indices(torch.tensor([1, 0]))
        images = images[[1, 0]]
    elif change == "repeat":
        cache.batch_repeat_interleave(2)
        images = images.repeat_interleave(2, 0)
    elif change == "reorder":
        cache.reorder_cache(torch.tensor([0, 1]))
    else:
        model(token_ids(2), cache=cache)
        cache.crop(-token_ids(2).shape[1])
    for length in (7, 20):
        ids = token_ids(len(images), length, seed=length)
        found = model.generate(ids, cache=cache, **GREEDY)
        assert torch.equal(found, model.generate(ids, pixel_values=images, **GREEDY))
        assert int(cache.get_seq_length()) == 0


def test_images_with_the_text_of_a_forward(model):
    """A question whose beginning counts as read, because another text of that length was."""
    cache = model.encode_images(pixel_values=pixels(1, 1))
    with torch.no_grad(), CaptureLogger(logging.get_logger("hf_xattn.generation_xattn")) as said:
        model.generate(token_ids(1, 20, seed=11), cache=cache, **GREEDY)
        assert said.out == ""
        model(token_ids(1), cache=cache)
        model.generate(token_ids(1, 20, seed=11), cache=cache, **GREEDY)
    assert "`cache` from `encode_images` holds text" in said.out


@pytest.mark.parametrize("given, columns", [("new", 17), ("new", 20), ("whole", 19)])
def test_mask_of_another_length(given, columns, model):
    """New text without the last generated token, which no cache holds; or text that is read twice."""
    made, new = turn(model), token_ids(1, 4, seed=9)
    assert int(made[CACHE].get_seq_length()) == 12 and made.sequences.shape[1] == 13
    ids = new if given == "new" else torch.cat([made.sequences, new], dim=1)
    mask = torch.ones(1, columns, dtype=torch.long)
    with pytest.raises(ValueError, match=r"Expected `attention_mask` of shape \(batch, .* behind the 12 tokens"):
        model.generate(ids, cache=made[CACHE], attention_mask=mask, **GREEDY)


def test_new_text_with_the_last_token(model):
    """A mask that is right, and refused."""
    made, new = turn(model), token_ids(1, 4, seed=9)
    text = torch.cat([made.sequences, new], dim=1)
    cached = int(made[CACHE].get_seq_length())
    mask = torch.ones_like(text)
    found = model.generate(text[:, cached:], cache=made[CACHE], attention_mask=mask, **GREEDY)
    assert torch.equal(found[:, -6:], model.generate(text, pixel_values=pixels(1, 1), **GREEDY)[:, -6:])


@pytest.mark.parametrize("options", [{"num_beams": 3}, {"num_beams": 3, "num_return_sequences": 3}], ids=str)
def test_text_of_other_beams(options, model):
    """The cache of a beam search, whose rows are not those of the sequences that it returns."""
    made = turn(model, **options)
    text = torch.cat([made.sequences, token_ids(len(made.sequences), 4, seed=9)], dim=1)
    with pytest.raises(ValueError, match="comes from a beam search"):
        model.generate(text.repeat_interleave(3 // len(text), 0), cache=made[CACHE], **GREEDY)
    images = select_images(made[CACHE], [0])
    expected = model.generate(text, pixel_values=pixels(1, 1).expand(len(text), -1, -1, -1, -1), **GREEDY)
    assert torch.equal(model.generate(text, cache=images, **GREEDY), expected)


def test_images_of_unknown_weights(model, tmp_path):
    """A file that says its images were encoded by weights that came later."""
    talk = turn(model)[CACHE]
    changed = copy.deepcopy(model)
    with torch.no_grad():
        changed.blocks[0].attn.k_proj.weight.mul_(-2)
    with pytest.raises(ValueError, match="Expected `cache` to come from `encode_images` .*or `forward` or `generate`"):
        save_image_cache(talk, tmp_path / "images.safetensors", changed)
    assert not list(tmp_path.iterdir())


@torch.no_grad()
def test_emptied_images(model):
    """A question that is answered without the images, which `reset` removed."""
    cache = model.encode_images(pixel_values=pixels(1, 1))
    cache.reset()
    with pytest.raises(ValueError, match="Expected `cache` to hold the images of `encode_images`"):
        model.generate(token_ids(1), cache=cache, **GREEDY)
    found = model.generate(token_ids(1), pixel_values=pixels(1, 1), cache=cache, **GREEDY)
    assert torch.equal(found, model.generate(token_ids(1), pixel_values=pixels(1, 1), **GREEDY))


@torch.no_grad()
@pytest.mark.parametrize("visibility, told", [("all", True), ("latest", False)])
def test_a_later_image_that_earlier_text_does_not_see(visibility, told):
    """Other answers with a cache than without one, and no word about it."""
    model, ids = make_model(image_visibility=visibility, image_token_id=3), token_ids(1)
    ids[0, 1] = 3
    cache = model.encode_images(pixel_values=pixels(1, 1)).fork(DynamicCache(config=model.config.text_config))
    with torch.no_grad(), CaptureLogger(logging.get_logger("hf_xattn.images.conversation")) as said:
        model(ids, cache=cache)
        assert said.out == ""
        model(ids, pixel_values=pixels(1, 1, seed=8), cache=cache)
    assert ("read without them" in said.out) == told


def test_a_picture_that_is_turned_is_another_one():
    """A white picture of 64 x 32 pixels that is taken for the cached one of 32 x 64."""
    upright, lying = torch.ones(1, 1, 3, 64, 32), torch.ones(1, 1, 3, 32, 64)
    assert int(digest(upright)) != int(digest(lying)) and int(digest(upright)) == int(digest(upright.clone()))


def marked(model_rule="latest"):
    """A model whose text sees images by their markers, and ids without a marker."""
    model = strengthen(make_model(image_token_id=5, image_visibility=model_rule))

    def ids(length, *markers, seed=0):
        drawn = token_ids(1, length, seed=seed)
        drawn[drawn == 5] = 6
        drawn[0, list(markers)] = 5
        return drawn

    return model, ids


@torch.no_grad()
@pytest.mark.parametrize("way", ["crop", "crop of the text half"])
def test_marker_of_removed_text(way):
    """A picture that is answered with the one of a question that was taken back to the system prompt."""
    model, ids = marked()
    system, asked = ids(6, seed=1), ids(5, 0, seed=2)
    for length, warns in ((5, True), (4, False)):
        cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
        model(torch.cat([system, asked], dim=1), pixel_values=pixels(1, 1), cache=cache)
        (cache if way == "crop" else cache.self_attention_cache).crop(-length)
        warning_once.cache_clear()
        with CaptureLogger(logging.get_logger("hf_xattn.cache.xattn_cache")) as said:
            model(ids(5, 0, seed=3), pixel_values=pixels(1, 1, seed=8), cache=cache)
        assert ("the next markers show them, and not the new ones" in said.out) == warns


@torch.no_grad()
def test_static_cache_after_a_failed_prefill():
    """A picture that is answered with the one of a call that failed before it had read anything."""
    model, _ = marked()
    cache = EncoderDecoderCache(StaticCache(config=model.config.text_config, max_cache_len=32), DynamicCache())

    def fail(*args):
        raise RuntimeError("out of memory")

    handle = model.model.text_model.register_forward_pre_hook(fail)
    ids = token_ids(1)
    ids[0, 1:], ids[0, 0] = 7, 5
    with pytest.raises(RuntimeError, match="out of memory"):
        model.generate(ids, pixel_values=pixels(1, 1), cache=cache, **GREEDY)
    handle.remove()
    with pytest.raises(ValueError, match="holds images of text that was removed"):
        model.generate(ids, pixel_values=pixels(1, 1, seed=8), cache=cache, **GREEDY)


@torch.no_grad()
@pytest.mark.parametrize("change", ["select", "repeat", "reorder"])
def test_images_of_other_weights_in_other_rows(change):
    """Keys and values of weights that have changed since, because rows for text count as text."""
    model = make_model()
    cache = model.encode_images(pixel_values=pixels(2, 1))
    rows = torch.tensor([1, 0])
    if change == "select":
        cache.batch_select_indices(rows)
    elif change == "repeat":
        cache.batch_repeat_interleave(2)
    else:
        cache.reorder_cache(rows)
    model.blocks[0].attn.k_proj.weight.mul_(1.5)
    with pytest.raises(ValueError, match="holds images that another model encoded, or this one with other"):
        model(token_ids(4 if change == "repeat" else 2), cache=cache)


@torch.no_grad()
def test_a_picture_sent_again_in_a_later_turn():
    """A new picture at the marker of one that the cache takes for its own."""
    model, ids = marked()
    cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
    first, second = pixels(1, 1), pixels(1, 1, seed=8)
    text = model.generate(ids(6, 0), pixel_values=first, cache=cache, **GREEDY)
    both = torch.cat([first, second], dim=1)
    text = torch.cat([text, ids(8, 1, 5, seed=3)], dim=1)
    with pytest.raises(ValueError, match="Row 0: expected one image marker for each of 1 images without one, got 2"):
        model.generate(text, pixel_values=both, cache=cache, **GREEDY)
    whole = torch.cat([first, both], dim=1)
    made = model.generate(text, pixel_values=whole, cache=cache, **GREEDY)  # the refused call has left nothing behind
    assert torch.equal(made, model.generate(text, pixel_values=whole, **GREEDY))


@torch.no_grad()
@pytest.mark.parametrize("options", [{"num_beams": 2}, {"num_return_sequences": 2, "do_sample": True}])
def test_a_later_picture_for_rows_that_share_it(options):
    """An error inside of the check above, where the cached text has more rows than the ids: one for each answer."""
    model, ids = marked()
    cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
    first, more = ids(6, 0).repeat(2, 1), ids(3, seed=9).repeat(2, 1)
    model(first, pixel_values=pixels(2, 1), cache=cache)
    cache.batch_repeat_interleave(2)
    model(more.repeat(2, 1), cache=cache)
    text = torch.cat([first, more, ids(5, 1, seed=3).repeat(2, 1)], dim=1)
    made = model.generate(text, pixel_values=pixels(2, 1, seed=8), cache=cache, **(GREEDY | options))
    assert torch.equal(made[:: len(made) // 2, :14], text)


@torch.no_grad()
def test_text_without_markers_of_encoded_images():
    """An answer that has seen no image, as if there were none."""
    model, ids = marked()
    cache = model.encode_images(pixel_values=pixels(1, 1))
    for markers, warns in (((0,), False), ((), True)):
        with CaptureLogger(logging.get_logger("hf_xattn.generation_xattn")) as said:
            model.generate(ids(6, *markers), cache=cache, **GREEDY)
        assert ("The text of `generate` has no image marker" in said.out) == warns
