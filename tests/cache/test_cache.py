"""The cross half of a cache: images encoded once, asked again, added to, kept over a conversation."""

import copy
from collections import Counter

import pytest
import torch
from transformers.cache_utils import DynamicCache, EncoderDecoderCache, StaticCache

from helpers.models.tiny_models import make_model, pixels, token_ids
from hf_xattn.cache.cross_cache import CrossAttentionLayer, CrossCache
from hf_xattn.cache.image_cache import ImageCache
from hf_xattn.utils.transformers_api import CACHE


MARKER = 3
NEW = 6


def generate(model, ids, **kwargs):
    return model.generate(ids, max_new_tokens=NEW, do_sample=False, **kwargs)


def fresh_cache():
    return EncoderDecoderCache(DynamicCache(), DynamicCache())


def static_cache(model):
    return EncoderDecoderCache(StaticCache(config=model.config.text_config, max_cache_len=64), DynamicCache())


def cross_length(cache):
    lengths = {layer.keys.shape[-2] for layer in cache.cross_attention_cache.layers}
    assert len(lengths) == 1
    return lengths.pop()


def count_encoding(model):
    calls = Counter()
    for block in model.blocks:
        block.attn.k_proj.register_forward_hook(lambda *_: calls.update(["k_proj"]))
    model.model.vision_tower.register_forward_hook(lambda *_: calls.update(["tower"]))
    return calls


def features(model, images):
    with torch.no_grad():
        return model.get_image_features(images).pooler_output


# --- a conversation


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3", "gpt2"])
def test_forward_in_pieces_equals_one_forward(name):
    """A later piece of text that loses the images, or a mask that starts anew."""
    model, ids, images = make_model(name), token_ids(2, 10), pixels(2, 2)
    mask = torch.tensor([[True, True], [True, False]])
    expected = model(ids, pixel_values=images, image_mask=mask, use_cache=False).logits
    first = model(ids[:, :4], pixel_values=images, image_mask=mask)
    cache = first[CACHE]
    assert isinstance(cache, EncoderDecoderCache) and cross_length(cache) == 32
    second = model(ids[:, 4:9], cache=cache)
    third = model(ids[:, 9:], cache=second[CACHE])
    logits = torch.cat([first.logits, second.logits, third.logits], dim=1)
    assert torch.allclose(logits, expected, atol=1e-4)
    assert third[CACHE] is cache and cross_length(cache) == 32 and cache.get_seq_length() == 10
    assert all(cache.is_updated[index] for index in range(2))


@pytest.mark.parametrize("kind", ["returned", "callers", "static"])
@pytest.mark.parametrize("again", [False, True], ids=["text_only", "same_images_again"])
def test_conversation_on_a_kept_cache(kind, again):
    """A second question answered without the image, or with the image twice."""
    model, images = make_model(), pixels()
    calls = count_encoding(model)
    caches = {"returned": lambda: None, "callers": fresh_cache, "static": lambda: static_cache(model)}
    cache, ids = caches[kind](), token_ids()
    for turn in range(3):
        given = {"pixel_values": images} if turn == 0 or again else {}
        outputs = generate(model, ids, cache=cache, return_dict_in_generate=True, **given)
        assert calls == Counter({"k_proj": 2, "tower": 1}), "images are encoded in the first turn only"
        assert cross_length(outputs[CACHE]) == 16
        uncached = make_model()
        assert torch.equal(outputs.sequences, generate(uncached, ids, pixel_values=images, use_cache=False)), turn
        cache = outputs[CACHE]
        ids = torch.cat([outputs.sequences, token_ids(2, 4, seed=20 + turn)], dim=1)


@pytest.mark.parametrize(
    "visibility, given, kind, static",
    [
        ("previous", "new_only", "pixels", False),
        ("latest", "all", "pixels", True),
        ("latest", "new_only", "states", True),
        ("previous", "all", "states", False),
        ("previous", "all", "padded", True),
        ("latest", "new_only", "padded", False),
    ],
)
def test_a_new_image_in_a_later_turn(visibility, given, kind, static):
    """A later image that replaces the earlier ones, is numbered from one again, or brings them along twice."""
    model = make_model(image_token_id=MARKER, image_visibility=visibility)
    images, ids = pixels(2, 3), token_ids()
    ids[:, 1] = MARKER
    mask = torch.ones(2, 3, dtype=torch.bool)
    if kind == "padded":
        mask[1, 1] = False
    states = features(model, images)

    def inputs(chosen):
        result = {"image_mask": mask[:, chosen]} if kind == "padded" else {}
        name, source = ("cross_attention_states", states) if kind == "states" else ("pixel_values", images)
        return {name: source[:, chosen], **result}

    cache = static_cache(model) if static else fresh_cache()
    first = generate(model, ids, cache=cache, return_dict_in_generate=True, **inputs(slice(0, 1)))
    later = token_ids(2, 5, seed=21)
    later[:, 1] = later[0, 3] = MARKER
    if kind != "padded":
        later[1, 3] = MARKER
    ids = torch.cat([first.sequences, later], dim=1)
    chosen = slice(1, 3) if given == "new_only" else slice(0, 3)
    second = generate(model, ids, cache=cache, return_dict_in_generate=True, **inputs(chosen))
    assert cross_length(second[CACHE]) == 48
    expected = generate(model, ids, use_cache=False, **inputs(slice(0, 3)))
    assert torch.equal(second.sequences, expected)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["pixels", "states"])
def test_same_images_are_not_appended_twice(kind):
    """Images that come with every call of a filled cache, counted again at each.

    https://github.com/huggingface/transformers/issues/48000
    """
    model, ids, images = make_model(), token_ids(2, 9), pixels(2, 2)
    inputs = {"pixel_values": images}
    if kind == "states":
        inputs = {"cross_attention_states": features(model, images).flatten(1, 2)}
    expected = model(ids, use_cache=False, **inputs).logits
    calls = count_encoding(model)
    cache = fresh_cache()
    pieces = [model(ids[:, start : start + 3], cache=cache, **inputs).logits for start in (0, 3, 6)]
    assert torch.allclose(torch.cat(pieces, dim=1), expected, atol=1e-4)
    assert cross_length(cache) == 32 and calls["k_proj"] == 2 and calls["tower"] == (kind == "pixels")
    # The same image in another row is another image.
    assert cache.cross_attention_cache.layout.num_images == (2 if kind == "pixels" else 1)
    swapped = {name: value.flip(0) for name, value in inputs.items()}
    model(ids[:, :1], cache=cache, **swapped)
    assert cross_length(cache) == 64


@torch.no_grad()
@pytest.mark.parametrize("name", ["mistral", "gemma3"])
def test_length_is_the_number_of_image_tokens(name):
    """A cross half cut to the sliding window, or padded to the text's length.

    https://github.com/huggingface/transformers/issues/46111
    https://github.com/huggingface/transformers/issues/48141
    """
    model, ids, images = make_model(name), token_ids(1, 4), pixels(1, 3)
    outputs = generate(model, ids, pixel_values=images, return_dict_in_generate=True)
    assert cross_length(outputs[CACHE]) == 48
    outputs = generate(model, ids, pixel_values=images, cache_implementation="static", return_dict_in_generate=True)
    assert cross_length(outputs[CACHE]) == 48
    assert outputs[CACHE].cross_attention_cache.get_seq_length() == 48
    big = EncoderDecoderCache(
        StaticCache(config=model.config.text_config, max_cache_len=100),
        StaticCache(config=model.config.text_config, max_cache_len=100),
    )
    model(ids, pixel_values=images, cache=big)
    assert cross_length(big) == 48


# --- encode once, ask often


@pytest.mark.parametrize(
    "name, options",
    [
        ("llama", {}),
        ("gemma3", {"cache_implementation": "static"}),
        ("gpt2", {"num_beams": 3}),
        ("llama", {"num_beams": 3, "cache_implementation": "static"}),
    ],
    ids=["greedy", "static", "beams", "static_beams"],
)
def test_a_question_leaves_no_trace_in_the_encoded_images(name, options):
    """A first question that changes the answer to the second; a vision tower or projection that runs for a question."""
    model, images = make_model(name), pixels()
    encoded = model.encode_images(pixel_values=images)
    assert isinstance(encoded, ImageCache) and encoded.get_seq_length() == 0
    before = [(layer.keys, layer.values, layer.keys.clone()) for layer in encoded.cross_attention_cache.layers]
    calls = count_encoding(model)
    questions = [token_ids(2, 5, seed=30), token_ids(2, 9, seed=31), token_ids(2, 5, seed=30)]
    answers = [generate(model, ids, cache=encoded, **options) for ids in questions]
    assert not calls
    for ids, answer in zip(questions, answers):
        assert torch.equal(answer, generate(model, ids, pixel_values=images, **options))
    for layer, (keys, values, copied) in zip(encoded.cross_attention_cache.layers, before):
        assert layer.keys is keys and layer.values is values and torch.equal(keys, copied)
    assert encoded.get_seq_length() == 0 and cross_length(encoded) == 16


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"cache_implementation": "static"}], ids=str)
def test_many_questions_about_one_image(options):
    """K/V copied for each question, or question 2 answered about image 1."""
    model, images = make_model(), pixels(2)
    ids = token_ids(6, 5)
    encoded = model.encode_images(pixel_values=images)
    outputs = generate(model, ids, cache=encoded, return_dict_in_generate=True, **options)
    keys = outputs[CACHE].cross_attention_cache.layers[0].keys
    assert keys.shape[0] == 2 and keys.data_ptr() == encoded.cross_attention_cache.layers[0].keys.data_ptr()
    repeated = generate(model, ids, pixel_values=images.repeat_interleave(3, dim=0), **options)
    assert torch.equal(outputs.sequences, repeated)


@pytest.mark.parametrize("visibility", ["all", "previous"])
def test_many_questions_with_masks_and_markers(visibility):
    """Padding images or markers of one row applied to the questions of another."""
    model = make_model(image_token_id=MARKER, image_visibility=visibility)
    images, mask = pixels(2, 2), torch.tensor([[True, True], [True, False]])
    ids = token_ids(4, 6)
    ids[:, 1] = ids[1, 3] = ids[0, 4] = MARKER
    encoded = model.encode_images(pixel_values=images, image_mask=mask)
    repeated = {"pixel_values": images.repeat_interleave(2, 0), "image_mask": mask.repeat_interleave(2, 0)}
    for options in ({}, {"num_beams": 2}):
        expected = generate(model, ids, use_cache=False, **repeated, **options)
        assert torch.equal(generate(model, ids, cache=encoded, **options), expected)
        assert torch.equal(generate(model, ids, cache=encoded, **options), expected)


def test_a_fork_does_not_grow_the_original():
    """An image added in one conversation that shows up in another one about the same encoded image."""
    model, ids, images = make_model(), token_ids(), pixels(2, 2)
    encoded = model.encode_images(pixel_values=images[:, :1])
    both = generate(model, ids, cache=encoded, pixel_values=images, return_dict_in_generate=True)
    assert cross_length(both[CACHE]) == 32 and cross_length(encoded) == 16
    assert encoded.cross_attention_cache.layout.num_images == 1
    assert torch.equal(both.sequences, generate(model, ids, pixel_values=images, use_cache=False))
    assert torch.equal(generate(model, ids, cache=encoded), generate(model, ids, pixel_values=images[:, :1]))


def test_copies_are_independent():
    """A copied cache (to branch a conversation) that shares its growing half."""
    model, ids, images = make_model(), token_ids(), pixels()
    outputs = generate(model, ids, pixel_values=images, return_dict_in_generate=True)
    kept = copy.deepcopy(outputs[CACHE])
    more = torch.cat([outputs.sequences, token_ids(2, 3, seed=40)], dim=1)
    first = generate(model, more, cache=outputs[CACHE])
    assert torch.equal(generate(model, more, cache=kept), first)


# --- operations on a cache


def filled(repeats=1):
    model = make_model()
    encoded = model.encode_images(pixel_values=pixels(3))
    if repeats > 1:
        encoded.batch_repeat_interleave(repeats)
    return model, encoded


def test_rows_can_be_selected_after_a_repeat():
    """Text rows counted as image rows after the batch was repeated."""
    _, encoded = filled(repeats=2)
    keys = encoded.cross_attention_cache.layers[0].keys
    assert keys.shape[0] == 3, "repeating the batch copies nothing"
    encoded.batch_select_indices(torch.tensor([0, 3, 5]))
    assert torch.equal(encoded.cross_attention_cache.layers[0].keys, keys[[0, 1, 2]])
    _, encoded = filled()
    encoded.batch_select_indices(torch.tensor([True, False, True]))
    assert torch.equal(encoded.cross_attention_cache.layers[0].keys, keys[[0, 2]])
    assert encoded.cross_attention_cache.layout.digests[0].values.shape == (2, 1)


@torch.no_grad()
def test_repeat_counts_text_rows():
    """Questions that share images, or have none, counted as image rows when they are repeated: later text of their
    number is refused.
    """
    model = make_model()
    cache = model.encode_images(pixel_values=pixels(2))
    ids = token_ids(6, 5)
    model(ids, cache=cache)
    cache.batch_repeat_interleave(2)
    assert cache.text_rows == 12 and cache.cross_attention_cache.rows == 2
    token = token_ids(12, 1, seed=41)
    logits = model(token, cache=cache).logits
    full = torch.cat([ids.repeat_interleave(2, dim=0), token], dim=1)
    expected = model(full, pixel_values=pixels(2).repeat_interleave(6, dim=0)).logits[:, -1:]
    assert torch.allclose(logits, expected, atol=1e-4)
    cache = model(token_ids(2, 5), use_cache=True)[CACHE]
    cache.batch_repeat_interleave(3)
    assert cache.text_rows == 6
    assert model(token_ids(6, 1), cache=cache).logits.shape[0] == 6


@torch.no_grad()
@pytest.mark.parametrize("visibility", ["all", "previous"])
def test_select_among_many_questions(visibility):
    """Questions counted as images where several share one: another image's K/V, padding or markers."""
    model = make_model(image_token_id=MARKER, image_visibility=visibility)
    images, mask = pixels(2, 2), torch.tensor([[True, True], [True, False]])
    ids = token_ids(6, 5)
    ids[:, 1] = ids[1, 3] = ids[5, 3] = MARKER
    cache = model.encode_images(pixel_values=images, image_mask=mask)
    model(ids, cache=cache)
    rows = torch.tensor([5, 0, 1])
    cache.batch_select_indices(rows)
    token = token_ids(3, 1, seed=41)
    logits = model(token, cache=cache).logits
    images_of_rows = rows // 3
    full = torch.cat([ids[rows], token], dim=1)
    inputs = {"pixel_values": images[images_of_rows], "image_mask": mask[images_of_rows]}
    expected = model(full, use_cache=True, **inputs).logits[:, -1:]
    assert torch.allclose(logits, expected, atol=1e-4)


def test_reset_of_a_fork_leaves_the_original():
    """Encoded images zeroed by a cache that shares them."""
    model, ids = make_model(), token_ids()
    encoded = model.encode_images(pixel_values=pixels())
    expected = encoded.cross_attention_cache.layers[0].keys.clone()
    outputs = generate(model, ids, cache=encoded, return_dict_in_generate=True)
    outputs[CACHE].reset()
    assert torch.equal(encoded.cross_attention_cache.layers[0].keys, expected)
    assert encoded.cross_attention_cache.layout is not None


@torch.no_grad()
def test_beams_and_crop_leave_images_alone():
    """K/V of images copied for beams, which stay within their sample, or cut by rejected candidates."""
    model, ids = make_model(), token_ids(6)
    cache = model.encode_images(pixel_values=pixels(3))
    model(ids, cache=cache)
    layers = [(layer, layer.keys) for layer in cache.cross_attention_cache.layers]
    cache.reorder_cache(torch.tensor([1, 1, 2, 3, 5, 4]))
    cache.crop(-3)
    assert cache.get_seq_length() == 4
    assert all(
        now is layer and now.keys is keys for now, (layer, keys) in zip(cache.cross_attention_cache.layers, layers)
    )


@torch.no_grad()
def test_reset_forgets_images():
    """A reused cache that still holds, or still masks by, the images of the last use."""
    model, ids = make_model(), token_ids()
    cache = fresh_cache()
    mask = torch.tensor([[True, False], [True, True]])
    model(ids, pixel_values=pixels(2, 2), image_mask=mask, cache=cache)
    cache.reset()
    assert cache.cross_attention_cache.layout is None and not any(cache.is_updated.values())
    other = pixels(2, 1, seed=42)
    assert torch.allclose(
        model(ids, pixel_values=other, cache=cache).logits, model(ids, pixel_values=other).logits, atol=1e-5
    )
    assert cross_length(cache) == 16


def test_the_cross_half_of_a_static_cache_is_static():
    """A cross half beside a static cache that is not recognised as static, so that nothing is compiled."""
    model = make_model()
    outputs = generate(
        model, token_ids(), pixel_values=pixels(), cache_implementation="static", return_dict_in_generate=True
    )
    cache = outputs[CACHE]
    assert isinstance(cache.cross_attention_cache, CrossCache) and cache.is_compileable
    assert all(isinstance(layer, CrossAttentionLayer) for layer in cache.cross_attention_cache.layers)


@torch.no_grad()
@pytest.mark.parametrize("rows", [1, 4])
def test_appended_images_need_the_batch_of_the_cache(rows):
    """Images of another batch broadcast over, or mixed into, those that are there."""
    model, ids = make_model(), token_ids()
    cache = model(ids, pixel_values=pixels())[CACHE]
    with pytest.raises(ValueError, match=f"batch 2, got batch {rows}"):
        model(ids, pixel_values=pixels(rows, seed=43), cache=cache)
    with pytest.raises(ValueError, match=f"batch 2, got batch {rows}"):
        generate(model, ids, pixel_values=pixels(rows, seed=43), cache=model.encode_images(pixels()))
