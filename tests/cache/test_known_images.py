"""Images that come again with a filled cache."""

import pytest
import torch
from marked_models import MARKER, close, marked, states_of
from tiny_models import make_model, pixels, token_ids

from hf_xattn.cache.image_cache import combine_images
from hf_xattn.utils.transformers_api import CACHE


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
        with pytest.raises(ValueError, match=r"Row 0: [12] in the cache, got"):
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

    with pytest.raises(ValueError, match="Row 0: expected one image marker for each of 1 images without one, got 2"):
        turns(8, pixel_values=joined(a, b))
    with pytest.raises(ValueError, match="Row 1: expected one image marker for each of 1 images without one, got 2"):
        other = model(ids[:, :4], pixel_values=torch.cat([pixels(1, 1, seed=9), a[1:]]))[CACHE]
        ids_now, given = ids[:, 4:].clone(), torch.cat([joined(pixels(1, 1, seed=9), b[:1]), joined(a, b)[1:]])
        ids_now[0, 3] = 7
        model(ids_now, cache=other, pixel_values=given)
    whole = model(ids, pixel_values=joined(a, a, b)).logits[:, 4:]
    close(turns(8, pixel_values=joined(a, a, b)), whole)  # all images of the conversation, and then the new ones
    close(turns(3, pixel_values=joined(a, b)), model(ids[:, :7], pixel_values=joined(a, b)).logits[:, 4:])
    encoded = model.encode_images(pixel_values=a)  # which wait for their markers
    close(model(ids[:, :7], cache=encoded, pixel_values=joined(a, b)).logits[:, 4:], turns(3, pixel_values=b))
    encoded = model.encode_images(pixel_values=a)
    later = model(ids[:, :1], cache=encoded)[CACHE]
    close(model(ids[:, 1:7], cache=later, pixel_values=joined(a, b)).logits[:, 3:], turns(3, pixel_values=b))


@torch.no_grad()
def test_images_that_come_again_row_by_row():
    """Rows with different numbers of images: a new image of one row that takes the place of another row's padding."""
    model, ids = marked("previous"), token_ids(2, 9)
    ids[:, 1] = ids[0, 3] = ids[:, 6] = MARKER
    a, b, c = images_cases()
    first = joined(a, b)
    mask = torch.tensor([[True, True], [True, False]])
    cache = model(ids[:, :5], pixel_values=first, image_mask=mask)[CACHE]
    later = torch.stack([joined(a, b, c)[0], joined(a, c, b)[1]])  # row 1 has two images, its padding at the end
    later_mask = torch.tensor([[True, True, True], [True, True, False]])
    inputs = {"pixel_values": later, "image_mask": later_mask}
    logits = model(ids[:, 5:], cache=cache, **inputs).logits
    assert close(logits, model(ids, use_cache=False, **inputs).logits[:, 5:])
    assert cache.cross_attention_cache.layout.num_images == 3


@torch.no_grad()
@pytest.mark.parametrize("kind", ["tokens", "images", "padding"])
def test_masks_in_the_places_of_the_call(kind):
    """A mask laid over the cache's places of images where the call has them in others."""
    model, ids = make_model(), token_ids(2, 9)
    a, b, c = images_cases()
    mask = torch.tensor([[True, True], [True, False]])
    cache = model(ids[:, :5], pixel_values=joined(a, b), image_mask=mask)[CACHE]
    images = torch.stack([joined(a, b, c)[0], joined(a, c, b)[1]])
    inputs = {"pixel_values": images, "image_mask": torch.tensor([[True, True, True], [True, True, False]])}
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
            with pytest.raises(ValueError, match=r"Expected only the new images, because the `image_mask` .* \(4, 2\)"):
                model(ids[:, 5:], cache=cache, pixel_values=again)
        sees = torch.rand(4, 3, 3) < 0.6
        sees[:, :, :2] &= hidden[:, None]
        logits = model(ids[:, 5:], cache=cache, pixel_values=images[:, 2:], image_attention_mask=sees.long()).logits
        sees = torch.cat([torch.nn.functional.pad(hidden, (0, 1))[:, None].expand(4, 5, 3), sees], dim=1).long()
        whole = model(ids, pixel_values=images.repeat_interleave(2, 0), image_attention_mask=sees, use_cache=False)
        assert close(logits, whole.logits[:, 5:])


@torch.no_grad()
def test_images_that_come_again_beside_a_mask_of_tokens_for_each_text_row():
    """IndexError: the text rows of an image row hide different tokens, and images come in another order."""
    model, ids, images = make_model(), token_ids(4, 8), pixels(2, 3)
    padding, tokens = torch.tensor([[True, True], [True, False]]), torch.rand(4, 32) < 0.7
    cache = model.encode_images(images[:, :2], image_mask=padding)
    model(ids[:, :5], cache=cache, cross_attention_mask=tokens)
    again = torch.stack([images[0], images[1, [0, 2, 1]]])
    given = {"pixel_values": again, "image_mask": torch.tensor([[True, True, True], [True, True, False]])}
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

    with pytest.raises(ValueError, match="`image_mask`, got none: image 0 of row 0 is padding"):
        model(ids[:, 8:], cache=cache(), **inputs(a, b))
    for real, whole, real_of_whole in (
        ([False, True], (a, b), [False, True]),
        ([True, True], (a, a, b), [False, True, True]),
        ([False, True], (a, c, b), [False, False, True]),  # another padding image
    ):
        later, known = inputs(*whole[-2:], real=real), cache()
        logits = model(ids[:, 8:], cache=known, **later).logits
        expected = model(ids, **inputs(*whole, real=real_of_whole), use_cache=True).logits
        assert close(logits, expected[:, 8:])
        assert known.cross_attention_cache.layout.num_images == len(whole)
    sees, found = torch.tensor([0, 0, 1]).expand(2, 4, -1), []
    for columns in (sees, sees[..., 1:]):  # of all images, or of those that are given
        found.append(model(ids[:, 8:], cache=cache(), **later, image_attention_mask=columns).logits)
    assert torch.equal(*found)


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
