"""Images that come again with a filled cache."""

import pytest
import torch
from conftest import make_model, pixels, token_ids
from conversation_helpers import MARKER, close, marked, states_of

from hf_xattn.image_cache import combine_images


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
        model(ids, past_key_values=cache, **inputs(*given))
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
def test_images_that_come_again_row_by_row():
    """Rows with different numbers of images: a new image of one row that takes the place of another row's padding."""
    model, ids = marked("previous"), token_ids(2, 9)
    ids[:, 1] = ids[0, 3] = ids[:, 6] = MARKER
    a, b, c = images_cases()
    first = joined(a, b)
    mask = torch.tensor([[True, True], [True, False]])
    cache = model(ids[:, :5], pixel_values=first, image_mask=mask).past_key_values
    later = torch.stack([joined(a, b, c)[0], joined(a, c, b)[1]])  # row 1 has two images, its padding at the end
    later_mask = torch.tensor([[True, True, True], [True, True, False]])
    inputs = {"pixel_values": later, "image_mask": later_mask}
    logits = model(ids[:, 5:], past_key_values=cache, **inputs).logits
    assert close(logits, model(ids, use_cache=False, **inputs).logits[:, 5:])
    assert cache.cross_attention_cache.layout.num_images == 3


@torch.no_grad()
@pytest.mark.parametrize("kind", ["tokens", "images", "padding"])
def test_masks_in_the_places_of_the_call(kind):
    """A mask laid over the cache's places of images where the call has them in others."""
    model, ids = make_model(), token_ids(2, 9)
    a, b, c = images_cases()
    mask = torch.tensor([[True, True], [True, False]])
    cache = model(ids[:, :5], pixel_values=joined(a, b), image_mask=mask).past_key_values
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
    logits = model(ids[:, 5:], past_key_values=cache, **inputs).logits
    assert close(logits, expected[:, 5:])


@torch.no_grad()
def test_images_of_other_precision_cannot_be_compared():
    """The same picture in bfloat16 appended as another one."""
    model, ids, images = make_model(), token_ids(2, 4), pixels()
    cache = model.encode_images(pixel_values=images)
    with pytest.raises(ValueError, match=r"in torch.float32.*got torch.bfloat16"):
        model(ids, pixel_values=images.bfloat16(), past_key_values=cache)
    half = make_model()
    half.model.vision_tower.bfloat16()
    half.model.connector.bfloat16()
    cache = half.encode_images(pixel_values=images)
    half(ids, pixel_values=images.bfloat16(), past_key_values=cache)  # what the tower gets is the same
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
    model(ids, pixel_values=again, image_mask=mask, past_key_values=combined)
    assert combined.cross_attention_cache.get_seq_length() == 32
    mixed = combine_images(
        [model.encode_images(pixel_values=a[:1]), model.encode_images(cross_attention_states=states_of(model, b[1:]))]
    )
    with pytest.raises(ValueError, match="content was not recorded"):
        model(ids, pixel_values=a, past_key_values=mixed)
