"""What the text has seen of the images follows the text."""

import pytest
import torch

from helpers.models.marked_models import MARKER, close, marked
from helpers.models.tiny_models import pixels, token_ids


@torch.no_grad()
@pytest.mark.parametrize("rule", ["previous", "latest", "latest_group"])
def test_a_turn_that_is_cropped_away_takes_its_markers_along(rule):
    """An image that stays visible, or a marker that stays counted, after its turn was taken back."""
    model, images, ids = marked(rule), pixels(2, 3), token_ids(2, 12)
    ids[:, 1] = ids[0, 5] = ids[1, 6] = ids[:, 9] = MARKER
    cache = model.encode_images(pixel_values=images)
    model(ids[:, :4], cache=cache)
    taken_back = token_ids(2, 5, seed=20)
    taken_back[:, 2] = MARKER
    model(taken_back, cache=cache)
    cache.crop(-5)
    logits = [model(part, cache=cache).logits for part in ids[:, 4:].split(3, dim=1)]
    assert close(torch.cat(logits, 1), model(ids, pixel_values=images, use_cache=False).logits[:, 4:])
    # Also where only the text half is cropped, and in the middle of a call.
    cache.self_attention_cache.crop(-5)
    logits = model(ids[:, 7:], cache=cache).logits
    assert close(logits, model(ids, pixel_values=images, use_cache=False).logits[:, 7:])


@pytest.mark.parametrize("rule", ["previous", "latest"])
@pytest.mark.parametrize("method", ["beams", "return_sequences", "lookup"])
def test_generated_markers_follow_their_rows(rule, method):
    """Markers that the model writes, counted for another beam, or counted although the candidate was rejected."""
    model = marked(rule)
    rows = 1 if method == "lookup" else 2
    images = pixels(rows, 4)
    ids = token_ids(rows, 5)
    ids[:, 1] = MARKER
    with torch.no_grad():  # the model likes to write markers
        head = model.get_output_embeddings().weight
        if method == "lookup":
            encoded = model.encode_images(pixel_values=images)
            written = model.generate(ids, cache=encoded, max_new_tokens=12, do_sample=False)[0, 5:]
            head[MARKER] = 1.05 * head[written.mode().values]
        else:
            head[MARKER] *= 6
    encoded = model.encode_images(pixel_values=images)
    options = {
        "beams": {"num_beams": 4, "do_sample": False},
        "return_sequences": {"num_return_sequences": 3, "do_sample": True, "top_k": 3},
        "lookup": {"prompt_lookup_num_tokens": 3, "do_sample": False},
    }[method]
    torch.manual_seed(0)
    tokens = model.generate(ids, cache=encoded, max_new_tokens=12, **options)
    assert (tokens[:, 5:] == MARKER).any(), "the test needs generated markers"
    torch.manual_seed(0)
    if method == "lookup":
        expected = model.generate(ids, cache=encoded, max_new_tokens=12, do_sample=False)
        expected_logits = model(tokens, pixel_values=images, use_cache=True).logits[:, 4:-1].argmax(-1)
        assert torch.equal(tokens, expected) and torch.equal(tokens[:, 5:], expected_logits)
        return
    # Without a cache each step reads the whole text anew.
    mask = torch.ones(rows, 4, dtype=torch.bool)
    uncached = _uncached(model, ids, images, mask, options)
    assert torch.equal(tokens, uncached)


def _uncached(model, ids, images, mask, options):
    check = model._check_markers
    model._check_markers = lambda *_: None  # fewer markers than images, as beside encoded ones
    try:
        return model.generate(ids, pixel_values=images, image_mask=mask, max_new_tokens=12, use_cache=False, **options)
    finally:
        model._check_markers = check
