"""Caches whose text was removed, whose masks the caller writes into, or whose rows see different images."""

import copy

import pytest
import torch
from transformers import DynamicCache, EncoderDecoderCache, StaticCache
from transformers.testing_utils import CaptureLogger
from transformers.utils import logging
from transformers.utils.logging import warning_once

from helpers.models.marked_models import marked_model, strong_model
from helpers.models.tiny_models import make_model, pixels, token_ids
from hf_xattn.cache.image_cache import select_images
from hf_xattn.cache.xattn_cache import XAttnCache
from hf_xattn.storage.image_files import combine_images
from hf_xattn.utils.transformers_api import CACHE


GREEDY = {"max_new_tokens": 6, "do_sample": False}


MARKER = 5


def empty(model):
    return EncoderDecoderCache(DynamicCache(config=model.config.text_config), DynamicCache())


def marked(length, seed, *places):
    ids = token_ids(1, length, seed)
    ids[0, list(places)] = MARKER
    return ids


@torch.no_grad()
@pytest.mark.parametrize("visibility", ["all", "latest", "previous"])
@pytest.mark.parametrize("call", ["forward", "generate"])
def test_new_images_after_text_was_cropped(visibility, call):
    """A marker of a new picture that shows the picture of the turn that was taken back."""
    model = make_model(image_token_id=MARKER, image_visibility=visibility)
    first, second, third = (marked(6, seed, 1) for seed in (1, 2, 3))
    a, b, c = (pixels(1, 1, seed) for seed in (11, 12, 13))
    cache = empty(model)
    model(first, pixel_values=a, cache=cache)
    kept = copy.deepcopy(cache)
    model(second, pixel_values=b, cache=cache)
    cache.crop(-6)
    text, options = torch.cat([first, third], 1), {"max_new_tokens": 2, "do_sample": False}
    with pytest.raises(ValueError, match="holds images of text that was removed"):
        if call == "forward":
            model(third, pixel_values=c, cache=cache)
        else:
            model.generate(text, pixel_values=c, cache=cache, **options)
    got = model.generate(text, pixel_values=c, cache=kept, **options)
    both = torch.cat([a, c], 1)
    assert torch.equal(got, model.generate(text, pixel_values=both, **options))


@torch.no_grad()
def test_images_of_a_call_that_failed_before_its_text(monkeypatch):
    """The picture of a failed `generate`, which no text has read, shown at the marker of the next picture."""
    model = make_model(image_token_id=MARKER, image_visibility="previous")
    ids, cache, fails = marked(6, 1, 1), empty(model), {"pixel_values": pixels(1, 1, 11), **GREEDY}
    with monkeypatch.context() as patch:
        patch.setattr(type(model.model._interface), "call", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model.generate(ids, cache=cache, **fails)
    assert cache.text_rows is None and cache.cross_attention_cache.rows == 1
    with pytest.raises(ValueError, match="holds images of text that was removed"):
        model.generate(ids, cache=cache, pixel_values=pixels(1, 1, 12), **GREEDY)


@torch.no_grad()
@pytest.mark.parametrize("call", ["forward", "generate"])
@pytest.mark.parametrize("first", ["forward", "generate"])
def test_a_new_picture_behind_a_system_prompt(first, call):
    """`image_visibility="all"`: a talk about another picture, whose text sees the picture of the last talk, too."""
    model = make_model()
    system, question, other = token_ids(1, 4, 1), token_ids(1, 6, 2), token_ids(1, 6, 3)
    a, b = pixels(1, 1, 11), pixels(1, 1, 12)
    cache, options = empty(model), {"max_new_tokens": 2, "do_sample": False}
    text = torch.cat([system, question], 1)
    if first == "forward":
        model(text, pixel_values=a, cache=cache)
    else:
        model.generate(text, pixel_values=a, cache=cache, **options)
    behind = copy.deepcopy(cache)
    cache.crop(4 - cache.get_seq_length())

    def ask(**given):
        if call == "forward":
            return model(other, cache=cache, **given)
        return model.generate(torch.cat([system, other], 1), cache=cache, **given, **options)

    with pytest.raises(ValueError, match="`crop` has removed a part of the text that came with the images in `cache`"):
        ask(pixel_values=b)
    ask(pixel_values=torch.cat([a, b], 1))  # the caller says that both are meant
    behind.crop(10 - behind.get_seq_length())  # a part of the answer
    model(other, pixel_values=b, cache=behind)


@torch.no_grad()
def test_images_encoded_without_a_text_stay():
    """Images of `encode_images` refused as those of removed text."""
    model = make_model()
    a, b = pixels(1, 1, 11), pixels(1, 1, 12)
    cache = model.encode_images(pixel_values=a)
    model(token_ids(1), cache=cache)
    cache.crop(-7)
    model.encode_images(pixel_values=b, cache=cache)
    expected = model(token_ids(1), pixel_values=torch.cat([a, b], 1)).logits
    assert torch.allclose(model(token_ids(1), cache=cache).logits, expected, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("visibility", ["latest", "previous"])
def test_a_static_text_half_that_was_reset(visibility):
    """Markers and masks of the last talk in a new one."""
    model = make_model(image_token_id=MARKER, image_visibility=visibility)
    ids = marked(8, 1, 1, 4)
    text = StaticCache(config=model.config.text_config, max_cache_len=32)
    cache = model.encode_images(pixel_values=pixels(1, 2)).fork(text)
    expected = model(ids, cache=cache).logits
    text.reset()
    assert torch.allclose(model(ids, cache=cache).logits, expected, atol=1e-6)


@torch.no_grad()
@pytest.mark.parametrize("form", ["tokens", "text", "encode"])
def test_a_mask_that_the_caller_writes_into(form):
    """Text in the cache that loses its images, because one buffer serves for all masks."""
    model = make_model(vision=False, cross_attention_config={"context_size": 16})
    states, later = torch.randn(2, 2, 5, 16), token_ids(2, 4, 8)
    mask = torch.rand((2, 5, 10) if form == "text" else (2, 10)) < 0.5
    mask[..., 0] = True
    given = {"cross_attention_states": states, "cross_attention_mask": mask}
    if form == "encode":
        cache = model.encode_images(**given)
        model(token_ids(2, 5), cache=cache)
    else:
        cache = model(token_ids(2, 5), use_cache=True, **given)[CACHE]
    expected = model(later, cache=copy.deepcopy(cache)).logits
    mask.fill_(False)
    assert torch.equal(model(later, cache=cache).logits, expected)


@torch.no_grad()
def test_masks_of_text_rows_are_not_those_of_images():
    """The mask of one row of images for another one."""
    model = make_model()
    one = model.encode_images(pixel_values=pixels(1, 2, 11))
    other = model.encode_images(pixel_values=pixels(1, 2, 12), image_mask=torch.tensor([[False, True]]))
    model(token_ids(2, 5), cache=one, image_mask=torch.tensor([[True, True], [True, False]]))
    for call in (lambda: combine_images([one, other]), lambda: select_images(one, [0])):
        with pytest.raises(ValueError, match="one mask for each of its 1 image rows, got 2 masks"):
            call()


@torch.no_grad()
def test_the_store_reads_no_padding():
    """NaN in padding tokens, which a call without a store answers rightly."""
    model = make_model(vision=False, cross_attention_config={"context_size": 16})
    states, mask = torch.randn(2, 6, 16), torch.ones(2, 6, dtype=torch.bool)
    states[1, 3:], mask[1, 3:] = float("nan"), False
    given = {"cross_attention_states": states, "cross_attention_mask": mask, "max_new_tokens": 3, "do_sample": False}
    options = {"output_logits": True, "return_dict_in_generate": True}
    expected = model.generate(token_ids(), **given, **options).logits
    model.enable_image_store()
    for got, wanted in zip(model.generate(token_ids(), **given, **options).logits, expected):
        assert torch.allclose(got, wanted, atol=1e-5)


def test_repeated_rows_keep_their_padding():
    """The padding of a prompt for the wrong row, or an error of torch, where a decoder of states has several rows."""
    cache = XAttnCache(DynamicCache())
    cache.text_rows, cache.text_padding = 2, torch.tensor([[3], [0]])
    cache.batch_repeat_interleave(2)
    assert cache.text_padding.tolist() == [[3], [3], [0], [0]] and cache.text_rows == 4


@pytest.fixture(scope="module")
def model():
    return strong_model()


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


@torch.no_grad()
def test_a_cache_whose_images_were_reset_is_refused(model):
    """A question that is answered without the images, which `reset` removed."""
    cache = model.encode_images(pixel_values=pixels(1, 1))
    cache.reset()
    with pytest.raises(ValueError, match="Expected `cache` to hold the images of `encode_images`"):
        model.generate(token_ids(1), cache=cache, **GREEDY)
    found = model.generate(token_ids(1), pixel_values=pixels(1, 1), cache=cache, **GREEDY)
    assert torch.equal(found, model.generate(token_ids(1), pixel_values=pixels(1, 1), **GREEDY))


@torch.no_grad()
@pytest.mark.parametrize("way", ["crop", "crop of the text half"])
def test_marker_of_removed_text(way):
    """A picture that is answered with the one of a question that was taken back to the system prompt."""
    model, ids = marked_model()
    system, asked = ids(6, seed=1), ids(5, 0, seed=2)
    for length, warns in ((5, True), (4, False)):
        cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
        model(torch.cat([system, asked], dim=1), pixel_values=pixels(1, 1), cache=cache)
        (cache if way == "crop" else cache.self_attention_cache).crop(-length)
        warning_once.cache_clear()
        with CaptureLogger(logging.get_logger("hf_xattn.cache.xattn_cache")) as said:
            model(ids(5, 0, seed=3), pixel_values=pixels(1, 1, seed=8), cache=cache)
        assert ("The next markers show these images and not the new ones" in said.out) == warns
