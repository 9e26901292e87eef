"""Images that come again with a filled cache."""

import pytest
import torch
from transformers import DynamicCache, EncoderDecoderCache

from helpers.models.marked_models import MARKER, close, marked, marked_model, states_of
from helpers.models.tiny_models import make_model, pixels, token_ids
from hf_xattn.storage.image_files import combine_images
from hf_xattn.utils.transformers_api import CACHE


GREEDY = {"max_new_tokens": 6, "do_sample": False}


WHAT_TO_SEND = "Pass only the new images, or all images of the conversation from the first on"


def images_cases():
    a, b, c = (pixels(2, 1, seed=seed) for seed in (50, 51, 52))
    return a, b, c


def joined(*images):
    return torch.cat(images, dim=1)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["pixels", "states", "states_flat"])
def test_images_that_come_again(kind):
    """Cached images appended a second time, or new ones taken for cached ones, without a word."""
    model, ids = make_model(), token_ids(2, 4)
    a, b, c = images_cases()

    def inputs(*images):
        if kind == "pixels":
            return {"pixel_values": joined(*images)}
        states = states_of(model, joined(*images))
        return {"cross_attention_states": states if kind == "states" else states.flatten(1, 2)}

    def length(cached, given):
        cache = model.encode_images(**inputs(*cached))
        model(ids, cache=cache, **inputs(*given))
        return cache.cross_attention_cache.get_seq_length() // 16

    assert length([a, b], [a, b]) == 2, "all known"
    assert length([a, b], [a, b, c]) == 3, "one more"
    assert length([a, b], [c]) == 3, "only a new one"
    assert length([a], [a, a]) == 2, "the same picture twice, on purpose"
    assert length([a, a], [a, a]) == 2
    assert length([a, b], [a, b, a]) == 3
    for cached, given in (([a, b], [b]), ([a, b], [a]), ([a, b], [b, a]), ([a], [c, a]), ([a, b], [a, c])):
        if kind == "states_flat" and len(cached) == len(given):
            continue  # features without an axis of images are one image, and this is another one
        with pytest.raises(ValueError, match=rf"row 0 the cache holds [12] images, got .* {WHAT_TO_SEND}"):
            length(cached, given)


@torch.no_grad()
@pytest.mark.parametrize("rule", ["previous", "latest"])
def test_a_cached_image_that_is_sent_again_with_its_marker(rule):
    """Two new images, the first of them sent before: the second was shown at the marker of the first."""
    model, ids = marked(rule), token_ids(2, 12)
    a, b, _ = images_cases()
    ids[:, 1] = ids[:, 5] = ids[:, 7] = MARKER

    def turns(second, **given):
        cache = model(ids[:, :4], pixel_values=a)[CACHE]
        return model(ids[:, 4 : 4 + second], cache=cache, **given).logits

    with pytest.raises(ValueError, match="Row 0: expected one image marker .* none yet .1., got 2"):
        turns(8, pixel_values=joined(a, b))
    with pytest.raises(ValueError, match="Row 1: expected one image marker .* none yet .1., got 2"):
        other = model(ids[:, :4], pixel_values=torch.cat([pixels(1, 1, seed=9), a[1:]]))[CACHE]
        ids_now, given = ids[:, 4:].clone(), torch.cat([joined(pixels(1, 1, seed=9), b[:1]), joined(a, b)[1:]])
        ids_now[0, 3] = 7
        model(ids_now, cache=other, pixel_values=given)
    whole = model(ids, pixel_values=joined(a, a, b)).logits[:, 4:]
    assert close(turns(8, pixel_values=joined(a, a, b)), whole)  # all images of the conversation, and then the new ones
    assert close(turns(3, pixel_values=joined(a, b)), model(ids[:, :7], pixel_values=joined(a, b)).logits[:, 4:])
    encoded = model.encode_images(pixel_values=a)  # which wait for their markers
    assert close(model(ids[:, :7], cache=encoded, pixel_values=joined(a, b)).logits[:, 4:], turns(3, pixel_values=b))
    encoded = model.encode_images(pixel_values=a)
    later = model(ids[:, :1], cache=encoded)[CACHE]
    assert close(model(ids[:, 1:7], cache=later, pixel_values=joined(a, b)).logits[:, 3:], turns(3, pixel_values=b))


def rows_with_padding(*images):
    """The first two images in a cache, of which row 1 has only the first one; all of them; and their masks."""
    mask = torch.tensor([[True, True], [True, False]])
    return joined(*images[:2]), mask, joined(*images), torch.nn.functional.pad(mask, (0, 1), value=True)


@torch.no_grad()
@pytest.mark.parametrize("given", ["all", "new"])
@pytest.mark.parametrize("content", ["same", "other"])
def test_rows_with_different_numbers_of_images(given, content):
    """A new image at the marker of a cached one, where a row has padding among its images, of whatever content."""
    model, ids = marked("previous"), token_ids(2, 9)
    ids[:, 1] = ids[0, 3] = ids[:, 6] = MARKER
    first, mask, images, whole = rows_with_padding(*images_cases())
    expected = model(ids, pixel_values=images, image_mask=whole, use_cache=False).logits[:, 5:]
    cache = model(ids[:, :5], pixel_values=first, image_mask=mask)[CACHE]
    if content == "other":
        images[1, 1] = torch.nan
    inputs = {"pixel_values": images, "image_mask": whole} if given == "all" else {"pixel_values": images[:, 2:]}
    assert close(model(ids[:, 5:], cache=cache, **inputs).logits, expected)
    assert cache.cross_attention_cache.layout.num_images == 3


@torch.no_grad()
def test_other_slots_than_before_are_refused():
    """A new image of one row in the slot of another row's padding, which was found by a search of each row."""
    model, ids = marked("previous"), token_ids(2, 9)
    ids[:, 1] = ids[0, 3] = ids[:, 6] = MARKER
    first, mask, images, whole = rows_with_padding(*images_cases())
    expected = model(ids, pixel_values=images, image_mask=whole, use_cache=False).logits[:, 5:]
    cache = model(ids[:, :5], pixel_values=first, image_mask=mask)[CACHE]
    left = torch.stack([images[0], images[1, [0, 2, 1]]])  # the padding of row 1 stands at its end
    end = torch.tensor([[True, True, True], [True, True, False]])
    only_one = torch.stack([images[0], pixels(1, 3, seed=77)[0]])  # row 1 has new images alone
    for given in (
        {"pixel_values": left, "image_mask": end},
        {"pixel_values": images},  # without a word on what is padding
        {"pixel_values": images[:, :2]},
        {"pixel_values": images[:, 1:], "image_mask": whole[:, 1:]},
        {"pixel_values": only_one, "image_mask": whole},
    ):
        for call, arguments in (
            (model, {"input_ids": ids[:, 5:]}),
            (model.generate, {"input_ids": ids, "max_new_tokens": 2}),
            (model.encode_images, {}),
        ):
            with pytest.raises(ValueError, match=WHAT_TO_SEND):
                call(**arguments, **given, cache=cache)
    assert close(model(ids[:, 5:], cache=cache, pixel_values=images[:, 2:]).logits, expected)  # nothing was left behind


@torch.no_grad()
def test_pixels_and_features_in_one_cache():
    """An image that was lost: all pixels of the conversation are given, and the cache holds features, too."""
    model, ids, (a, b, c) = make_model(), token_ids(2, 4), images_cases()
    cache = model.encode_images(pixel_values=a)
    model.encode_images(cross_attention_states=states_of(model, b), cache=cache)
    for given in (joined(a, c), a):
        with pytest.raises(ValueError, match=WHAT_TO_SEND):
            model(ids, cache=cache, pixel_values=given)
    logits = model(ids, cache=cache, pixel_values=c).logits
    assert close(logits, model(ids, pixel_values=joined(a, b, c), use_cache=False).logits)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["pixels", "states"])
@pytest.mark.parametrize("rule", ["all", "previous", "latest", "latest_group"])
def test_text_rows_that_share_the_images(rule, kind):
    """A new image at another text row's marker, where several text rows share an image row of `encode_images`."""
    model, ids, (a, b, c) = marked(rule), token_ids(4, 12), images_cases()
    ids[:, 1] = ids[::2, 3] = ids[1::2, 4] = ids[1, 7] = ids[3, 8] = ids[::2, 9] = MARKER

    def inputs(*images, repeats=1):
        given = joined(*images).repeat_interleave(repeats, 0)
        return {"pixel_values": given} if kind == "pixels" else {"cross_attention_states": states_of(model, given)}

    whole = inputs(a, b, c, repeats=2)
    if rule == "all":
        whole["image_attention_mask"] = torch.ones(4, 12, 3).long()
        whole["image_attention_mask"][:, :6, 2] = 0
    expected = model(ids, **whole, use_cache=False).logits
    for given in (inputs(a, b, c), inputs(c)):
        cache = model.encode_images(**inputs(a))
        model.encode_images(cache=cache, **inputs(a, b))
        first = model(ids[:, :6], cache=cache, **inputs(a, b)).logits
        last = model(ids[:, 6:], cache=cache, **given).logits
        assert close(torch.cat([first, last], 1), expected)
        assert cache.cross_attention_cache.layout.num_images == 3


@torch.no_grad()
@pytest.mark.parametrize("rule", ["previous", "latest"])
def test_images_again_after_text_was_removed(rule):
    """A turn that is taken back and asked with another picture, which the cache takes for the one that it holds."""
    model, ids, (a, b, c) = marked(rule), token_ids(2, 12), images_cases()
    ids[:, 1] = ids[:, 5] = ids[:, 9] = MARKER
    cache = model(ids[:, :4], pixel_values=a)[CACHE]
    model(ids[:, 4:8], cache=cache, pixel_values=joined(a, b))
    cache.crop(-4)
    for given in (joined(a, c), a, joined(b, c)):
        with pytest.raises(ValueError, match=WHAT_TO_SEND):
            model(ids[:, 4:8], cache=cache, pixel_values=given)
    again = model(ids[:, 4:8], cache=cache, pixel_values=joined(a, b)).logits
    more = model(ids[:, 8:], cache=cache, pixel_values=joined(a, b, c)).logits
    expected = model(ids, pixel_values=joined(a, b, c), use_cache=False).logits
    assert close(torch.cat([again, more], 1), expected[:, 4:])


@torch.no_grad()
@pytest.mark.parametrize("kind", ["tokens", "images", "padding"])
def test_masks_of_all_images_that_are_given(kind):
    """A mask laid over other images than those of the call, which gives those of the cache again."""
    model, ids = make_model(), token_ids(2, 9)
    first, mask, images, real = rows_with_padding(*images_cases())
    cache = model(ids[:, :5], pixel_values=first, image_mask=mask)[CACHE]
    inputs = {"pixel_values": images, "image_mask": real}
    sees = torch.ones(2, 9, 3, dtype=torch.bool)
    sees[:, 5:] = torch.rand(2, 4, 3) < 0.6
    sees[:, :5, 1:] = torch.tensor([[True, False], [False, False]])[:, None]  # what the first call has seen
    whole = sees.repeat_interleave(16, dim=-1)
    expected = model(ids, cross_attention_mask=whole, use_cache=False, **inputs).logits
    if kind == "padding":  # of tokens, the same for all text
        padding = torch.ones(2, 48, dtype=torch.bool)
        padding[1, 20:26] = padding[0, 40:] = False
        whole[:, 5:] = padding[:, None]
        expected = model(ids, cross_attention_mask=whole, use_cache=False, **inputs).logits
        inputs["cross_attention_mask"] = padding
    elif kind == "tokens":
        inputs["cross_attention_mask"] = whole[:, 5:]
    else:
        inputs["image_attention_mask"] = sees[:, 5:].long()
    logits = model(ids[:, 5:], cache=cache, **inputs).logits
    assert close(logits, expected[:, 5:])


@torch.no_grad()
def test_images_that_come_again_beside_masks_of_text_rows():
    """Images hidden from some of the text rows that share an image row: the places of a mask were those of another."""
    model, ids, images = make_model(), token_ids(4, 8), pixels(2, 3)
    for hidden in (
        [[1, 0], [1, 1], [1, 1], [1, 1]],
        [[1, 1], [1, 0], [1, 1], [0, 1]],
        [[1, 1], [1, 1], [1, 0], [1, 0]],
    ):
        hidden = torch.tensor(hidden) > 0
        cache = model.encode_images(images[:, :2])
        model(ids[:, :5], cache=cache, image_mask=hidden)
        for again in (images, images[:, :2]):
            with pytest.raises(ValueError, match=WHAT_TO_SEND):
                model(ids[:, 5:], cache=cache, pixel_values=again)
        sees = torch.rand(4, 3, 3) < 0.6
        sees[:, :, :2] &= hidden[:, None]
        logits = model(ids[:, 5:], cache=cache, pixel_values=images[:, 2:], image_attention_mask=sees.long()).logits
        sees = torch.cat([torch.nn.functional.pad(hidden, (0, 1))[:, None].expand(4, 5, 3), sees], dim=1).long()
        whole = model(ids, pixel_values=images.repeat_interleave(2, 0), image_attention_mask=sees, use_cache=False)
        assert close(logits, whole.logits[:, 5:])


@torch.no_grad()
def test_images_that_come_again_beside_a_mask_of_tokens_for_each_text_row():
    """IndexError: the text rows of an image row hide different tokens, and the images are given again."""
    model, ids, images = make_model(), token_ids(4, 8), pixels(2, 3)
    padding, tokens = torch.tensor([[True, True], [True, False]]), torch.rand(4, 32) < 0.7
    cache = model.encode_images(images[:, :2], image_mask=padding)
    model(ids[:, :5], cache=cache, cross_attention_mask=tokens)
    given = {"pixel_values": images, "image_mask": torch.nn.functional.pad(padding, (0, 1), value=True)}
    logits = model(ids[:, 5:], cache=cache, **given).logits
    sees = torch.ones(4, 8, 48, dtype=torch.bool)
    sees[:, :, :32] = (tokens & padding.repeat_interleave(16, 1).repeat_interleave(2, 0))[:, None]
    sees[:, :5, 32:] = False
    whole = model(ids, pixel_values=images.repeat_interleave(2, 0), cross_attention_mask=sees, use_cache=False).logits
    assert close(logits, whole[:, 5:])


FORMS = {
    "tokens": {"cross_attention_mask": torch.ones(2, 4, 32, dtype=torch.bool)},
    "tiles": {"cross_attention_mask": torch.ones(2, 4, 2, 1, dtype=torch.bool)},
    "images": {"image_attention_mask": torch.ones(2, 4, 2)},
}


@torch.no_grad()
@pytest.mark.parametrize("rule", ["all", "previous", "latest", "latest_group"])
@pytest.mark.parametrize("form", FORMS)
def test_a_mask_does_not_show_padding(form, rule):
    """A padding image of the cache that a mask for each text token shows, and that stays hidden without a word."""
    model, ids, (a, b, _) = marked(rule), token_ids(2, 8), images_cases()
    ids[:, :2] = MARKER
    mask = torch.tensor([[True, True], [True, False]])
    cache = model(ids[:, :4], pixel_values=joined(a, b), image_mask=mask)[CACHE]
    for call in (model, model.generate):
        text = ids[:, 4:] if call is model else ids
        with pytest.raises(ValueError, match=f"`{next(iter(FORMS[form]))}` to hide.*image 1 of row 1"):
            call(text, cache=cache, **FORMS[form])
    if rule == "all":  # who names the padding may show what is beside it
        named = model(ids[:, 4:], cache=cache, image_mask=mask, **FORMS[form]).logits
        expected = model(ids, pixel_values=joined(a, b), image_mask=mask, use_cache=False).logits
        assert close(named, expected[:, 4:])


@torch.no_grad()
@pytest.mark.parametrize("rule", ["previous", "latest", "latest_group"])
@pytest.mark.parametrize("kind", ["pixels", "states"])
def test_padding_that_comes_again_without_a_word(kind, rule):
    """A padding image of the cache that becomes a real one because a later call leaves `image_mask` out, and takes the
    marker of a new image; one that is named real and has no new place.
    """
    model, ids, (a, b, c) = marked(rule), token_ids(2, 12), images_cases()
    ids[:, 8] = MARKER

    def inputs(*images, real=None):
        given = joined(*images)
        named = {} if real is None else {"image_mask": torch.tensor([real] * 2)}
        if kind == "pixels":
            return {"pixel_values": given, **named}
        return {"cross_attention_states": states_of(model, given), **named}

    def cache():
        cached = model(ids[:, :4], **inputs(a, real=[False]))[CACHE]
        model(ids[:, 4:8], cache=cached)
        return cached

    with pytest.raises(ValueError, match=WHAT_TO_SEND):
        model(ids[:, 8:], cache=cache(), **inputs(a, b))
    for real, whole, real_of_whole in (
        ([True, True], (a, a, b), [False, True, True]),
        ([False, True], (a, b), [False, True]),
        ([False, True], (c, b), [False, True]),  # other padding in its place, which nobody sees
    ):
        later, known = inputs(*whole[-2:], real=real), cache()
        logits = model(ids[:, 8:], cache=known, **later).logits
        expected = model(ids, **inputs(*whole, real=real_of_whole), use_cache=True).logits
        assert close(logits, expected[:, 8:])
        assert known.cross_attention_cache.layout.num_images == len(whole)
    masked = model(ids[:, 8:], cache=cache(), **later, image_attention_mask=torch.tensor([[[0, 1]] * 4] * 2)).logits
    sees = torch.tensor([0, 1] * 4).view(1, 4, 2).expand(2, -1, -1)
    sees = torch.nn.functional.pad(sees, (0, 0, 8, 0))
    expected = model(ids, **inputs(c, b), image_attention_mask=sees, use_cache=False).logits
    assert close(masked, expected[:, 8:])


@torch.no_grad()
def test_padding_is_not_encoded():
    """Images that were encoded as padding, and stay blank where a first text names them real."""
    model, ids = make_model(), token_ids()
    mask = torch.tensor([[True, False], [True, True]])
    cache = model.encode_images(pixel_values=pixels(2, 2), image_mask=mask)
    for call in (model, model.generate):
        with pytest.raises(ValueError, match="was not encoded. In row 0, 1 of 2 entries differ"):
            call(ids, cache=cache, image_mask=torch.ones_like(mask))
    tokens = mask.repeat_interleave(16, dim=1)
    tokens[1, 5:] = False
    model(ids, cache=cache, cross_attention_mask=tokens)


@torch.no_grad()
def test_images_of_other_precision_cannot_be_compared():
    """The same picture in bfloat16 appended as another one."""
    model, ids, images = make_model(), token_ids(2, 4), pixels()
    cache = model.encode_images(pixel_values=images)
    with pytest.raises(ValueError, match=r"in torch.float32.*got torch.bfloat16"):
        model(ids, pixel_values=images.bfloat16(), cache=cache)
    half = make_model()
    half.model.vision_tower.bfloat16()
    half.model.connector.bfloat16()
    cache = half.encode_images(pixel_values=images)
    half(ids, pixel_values=images.bfloat16(), cache=cache)  # what the tower gets is the same
    assert cache.cross_attention_cache.get_seq_length() == 16


@torch.no_grad()
def test_combined_caches_know_their_images():
    """Images of a combined cache appended a second time."""
    model, ids = make_model(), token_ids(2, 4)
    a, b, c = images_cases()
    combined = combine_images(
        [model.encode_images(pixel_values=a[:1]), model.encode_images(pixel_values=joined(a, b)[1:])]
    )
    again = torch.stack([joined(a, c)[0], joined(a, b)[1]])
    mask = torch.tensor([[True, False], [True, True]])
    model(ids, pixel_values=again, image_mask=mask, cache=combined)
    assert combined.cross_attention_cache.get_seq_length() == 32
    mixed = combine_images(
        [model.encode_images(pixel_values=a[:1]), model.encode_images(cross_attention_states=states_of(model, b[1:]))]
    )
    with pytest.raises(ValueError, match="content was not recorded"):
        model(ids, pixel_values=a, cache=mixed)


@torch.no_grad()
def test_a_picture_sent_again_in_a_later_turn():
    """A new picture at the marker of one that the cache takes for its own."""
    model, ids = marked_model()
    cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
    first, second = pixels(1, 1), pixels(1, 1, seed=8)
    text = model.generate(ids(6, 0), pixel_values=first, cache=cache, **GREEDY)
    both = torch.cat([first, second], dim=1)
    text = torch.cat([text, ids(8, 1, 5, seed=3)], dim=1)
    with pytest.raises(ValueError, match="Row 0: expected one image marker .* none yet .1., got 2"):
        model.generate(text, pixel_values=both, cache=cache, **GREEDY)
    whole = torch.cat([first, both], dim=1)
    made = model.generate(text, pixel_values=whole, cache=cache, **GREEDY)  # the refused call has left nothing behind
    assert torch.equal(made, model.generate(text, pixel_values=whole, **GREEDY))


@torch.no_grad()
@pytest.mark.parametrize("options", [{"num_beams": 2}, {"num_return_sequences": 2, "do_sample": True}])
def test_a_later_picture_for_rows_that_share_it(options):
    """An error inside of the check above, where the cached text has more rows than the ids: one for each answer."""
    model, ids = marked_model()
    cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
    first, more = ids(6, 0).repeat(2, 1), ids(3, seed=9).repeat(2, 1)
    model(first, pixel_values=pixels(2, 1), cache=cache)
    cache.batch_repeat_interleave(2)
    model(more.repeat(2, 1), cache=cache)
    text = torch.cat([first, more, ids(5, 1, seed=3).repeat(2, 1)], dim=1)
    made = model.generate(text, pixel_values=pixels(2, 1, seed=8), cache=cache, **(GREEDY | options))
    assert torch.equal(made[:: len(made) // 2, :14], text)
