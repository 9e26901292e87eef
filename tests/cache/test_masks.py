"""Masks beside caches: what they say acts as it would without a cache, or is refused."""

import copy

import pytest
import torch
from transformers.cache_utils import DynamicCache, EncoderDecoderCache, StaticCache

from helpers.models.marked_models import MARKER, RULES, close, generate, marked, states_of, strong_model, turn
from helpers.models.tiny_models import make_model, make_text, pixels, token_ids
from hf_xattn.utils.transformers_api import CACHE


GREEDY = {"max_new_tokens": 6, "do_sample": False}


@pytest.mark.parametrize("form", ["tiles", "images", "tokens"])
@pytest.mark.parametrize("given", ["all", "new", "none"])
@pytest.mark.parametrize("mask_of", ["whole", "new"])
def test_mask_over_the_chat_with_a_kept_cache(form, given, mask_of):
    """A mask over the whole chat laid over the new tokens only, or one for the new tokens shifted by
    the cached ones.
    """
    model, images = marked("latest"), pixels(2, 2 if given == "none" else 3)
    ids = token_ids(2, 8)
    ids[:, 1] = ids[:, 4] = MARKER
    by_image = torch.zeros(2, 30, images.shape[1], dtype=torch.bool)
    by_image[:, 1:4, 0] = True
    by_image[:, 4:, 1] = True
    by_image[0, 6:, 0] = True  # not what the markers say
    by_image[1, 15:, :2] = torch.tensor([True, False])
    by_image[1, 20:, -1] = True

    def masks(part):
        if form == "tiles":
            return {"cross_attention_mask": part[..., None].repeat(1, 1, 1, 2).long()}
        if form == "images":
            return {"image_attention_mask": part.long()}
        return {"cross_attention_mask": part.repeat_interleave(16, dim=-1)}

    wants = {"output_logits": True, "return_dict_in_generate": True}
    first = generate(model, ids, pixel_values=images[:, :2], **masks(by_image[:, :8, :2]), **wants)
    cached = first[CACHE].get_seq_length()
    chat = torch.cat([first.sequences, token_ids(2, 30 - 13, seed=9)], dim=1)
    # Text between the prompt and the new turn has seen what the prompt's last token saw.
    by_image[:, 8:cached] = by_image[:, 7:8]
    part = by_image if mask_of == "whole" else by_image[:, cached:]
    again = {} if given == "none" else {"pixel_values": images if given == "all" else images[:, 2:]}
    answer = generate(model, chat, cache=first[CACHE], **again, **masks(part), **wants)
    expected = generate(model, chat, pixel_values=images, use_cache=False, **masks(by_image), **wants)
    assert torch.equal(answer.sequences, expected.sequences)
    assert close(torch.stack(answer.logits), torch.stack(expected.logits))


def test_mask_over_the_chat_beside_a_static_cache():
    """A cache that does not know what its text has seen: a mask over all of it, or for the new text, says the same."""
    model, images, ids = make_model(), pixels(), token_ids(2, 6)
    cache = EncoderDecoderCache(StaticCache(config=model.config.text_config, max_cache_len=64), DynamicCache())
    first = generate(model, ids, pixel_values=images, cache=cache, return_dict_in_generate=True)
    chat = torch.cat([first.sequences, token_ids(2, 4, seed=9)], dim=1)
    mask = torch.rand(2, chat.shape[1], 16) < 0.5
    mask[:, :10] = True
    expected = generate(model, chat, pixel_values=images, use_cache=False, cross_attention_mask=mask)
    for given in (mask, mask[:, 10:]):
        again = copy.deepcopy(cache)
        assert torch.equal(generate(model, chat, cache=again, cross_attention_mask=given), expected)


def test_masks_of_another_length_are_refused():
    """A mask that is cut or repeated until it fits the text."""
    model, ids, images = make_model(), token_ids(2, 6), pixels()
    for length in (1, 3, 7, 20):
        mask = torch.ones(2, length, 16, dtype=torch.bool)
        for options in ({}, {"use_cache": False}, {"num_beams": 2}):
            with pytest.raises(ValueError, match=rf"\(2, 6, 16\) .*got \(2, {length}, 16\)"):
                generate(model, ids, pixel_values=images, cross_attention_mask=mask, **options)
        with pytest.raises(ValueError, match=rf"\(2, 6, 16\) .*got \(2, {length}, 16\)"):
            model(ids, pixel_values=images, cross_attention_mask=mask)
    for mask in (torch.ones(2, 6, 3, dtype=torch.long), torch.ones(2, 5, 1, dtype=torch.long)):
        with pytest.raises(ValueError, match=r"image_attention_mask.*\(2, 6, 1\)"):
            generate(model, ids, pixel_values=images, image_attention_mask=mask)


@pytest.mark.parametrize("form", ["tiles", "tokens"])
@pytest.mark.parametrize("method", ["lookup", "assistant"])
def test_a_mask_for_each_token_fits_candidates(form, method):
    """A per-token mask that candidate tokens do not fit, or that reaches the assistant, which has no place for it."""
    model, ids = make_model(), token_ids(1, 4).repeat(1, 3)
    mask = torch.rand(1, 12, 2) < 0.6
    mask = mask[:, :, None].long() if form == "tiles" else mask.repeat_interleave(8, dim=-1)
    inputs = {"pixel_values": pixels(1), "cross_attention_mask": mask}
    assistant = make_text(seed=11)
    assistant.generation_config.num_assistant_tokens = 3
    options = {"prompt_lookup_num_tokens": 3} if method == "lookup" else {"assistant_model": assistant}
    assert torch.equal(generate(model, ids, **inputs, **options), generate(model, ids, **inputs, use_cache=False))


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("kind", ["image_mask", "token_mask"])
def test_masks_beside_encoded_images_act(rows, kind):
    """A mask that comes with encoded images and is dropped without a word."""
    model, images, ids = make_model(), pixels(rows, 2), token_ids(2 * rows, 6)
    encoded = model.encode_images(pixel_values=images)
    mask = torch.tensor([[True, False], [False, True], [True, True], [False, False]])[: 2 * rows]
    if kind == "token_mask":
        mask = (torch.rand(2 * rows, 32) < 0.5) & mask.repeat_interleave(16, dim=1)
    name = "image_mask" if kind == "image_mask" else "cross_attention_mask"
    repeated = images.repeat_interleave(2, dim=0)
    if kind == "token_mask":
        beside = {"cross_attention_states": states_of(model, repeated).flatten(1, 2), name: mask}
    else:
        beside = {"pixel_values": repeated, name: mask}
    for options in ({}, {"num_beams": 3}, {"cache_implementation": "static"}):
        expected = generate(
            model, ids, use_cache=False, **beside, **{k: v for k, v in options.items() if k == "num_beams"}
        )
        assert torch.equal(generate(model, ids, cache=encoded, **{name: mask}, **options), expected)
    # The encoded images are as they were.
    expected = generate(model, ids, pixel_values=repeated, use_cache=False)
    assert torch.equal(generate(model, ids, cache=encoded), expected)
    with pytest.raises(ValueError, match=f"`{name}`"):
        generate(model, ids, cache=encoded, **{name: mask[:, :-1]})


@torch.no_grad()
def test_masks_beside_a_conversation_must_agree():
    """Padding that changes in the middle of a conversation, whose first part was read with other padding."""
    model, images, ids = make_model(), pixels(2, 2), token_ids(2, 6)
    mask = torch.tensor([[True, True], [True, False]])
    cache = model(ids, pixel_values=images, image_mask=mask)[CACHE]
    more = token_ids(2, 3, seed=8)
    expected = model(torch.cat([ids, more], 1), pixel_values=images, image_mask=mask).logits[:, 6:]
    assert close(model(more, cache=cache, image_mask=mask).logits, expected)
    with pytest.raises(ValueError, match="the same `image_mask` for the images.*In row 0, 2 of 2"):
        model(more, cache=cache, image_mask=~mask)
    tokens = torch.ones(2, 32, dtype=torch.bool)
    tokens[1, 3:7] = False
    with pytest.raises(ValueError, match="the same `cross_attention_mask` for the images.*In row 1, 4 of 32"):
        model(more, cache=cache, cross_attention_mask=tokens)
    assert cache.get_seq_length() == 9


@torch.no_grad()
@pytest.mark.parametrize("rule", RULES)
def test_mask_over_new_images_leaves_the_others_to_the_rule(rule):
    """A mask for the images of a call that hides, or shows, those of the cache."""
    model, images = marked(rule), pixels(2, 2)
    ids = token_ids(2, 10)
    ids[:, 1] = ids[0, 6] = MARKER
    cache = model(ids[:, :5], pixel_values=images[:, :1])[CACHE]
    mask = torch.rand(2, 5, 16) < 0.5
    logits = model(ids[:, 5:], pixel_values=images[:, 1:], cross_attention_mask=mask, cache=cache).logits
    seen = torch.zeros(2, 10, 32, dtype=torch.bool)
    seen[:, 0 if rule == "all" else 1 :, :16] = True
    if rule == "latest" or rule == "latest_group":
        seen[0, 6:, :16] = False  # the second marker is another image's
    seen[:, 5:, 16:] = mask
    expected = model(ids, pixel_values=images, cross_attention_mask=seen, use_cache=False).logits
    assert close(logits, expected[:, 5:])


@pytest.fixture(scope="module")
def model():
    return strong_model()


@pytest.mark.parametrize("given, columns", [("new", 17), ("new", 20), ("whole", 19)])
def test_mask_of_another_length(given, columns, model):
    """New text without the last generated token, which no cache holds; or text that is read twice."""
    made, new = turn(model), token_ids(1, 4, seed=9)
    assert int(made[CACHE].get_seq_length()) == 12 and made.sequences.shape[1] == 13
    ids = new if given == "new" else torch.cat([made.sequences, new], dim=1)
    mask = torch.ones(1, columns, dtype=torch.long)
    with pytest.raises(ValueError, match=r"Expected `attention_mask` of shape \(batch, .* behind the 12 tokens"):
        model.generate(ids, cache=made[CACHE], attention_mask=mask, **GREEDY)
