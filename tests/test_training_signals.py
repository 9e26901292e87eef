"""What training learns from, and what it must be told."""

import logging

import pytest
import torch
from conftest import make_model, pixels, token_ids
from conversation_helpers import MARKER, RULES, marked

from hf_xattn import freeze_base


def gradients(model):
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0}


def test_training_on_encoded_images_equals_training_on_images():
    """Projections, connector and tower without gradients, because the images were encoded before the text was read."""
    found = []
    for encoded in (False, True):
        model, ids, images = make_model(), token_ids(), pixels()
        freeze_base(model, vision=False)
        model.train()
        inputs = {"past_key_values": model.encode_images(pixel_values=images)} if encoded else {"pixel_values": images}
        model(ids, labels=ids, **inputs).loss.backward()
        found.append(gradients(model))
    assert found[0].keys() == found[1].keys()
    assert any("vision_tower" in name for name in found[1]) and any("k_proj" in name for name in found[1])
    for name, expected in found[0].items():
        assert torch.allclose(found[1][name], expected, atol=1e-6), name


def test_encode_images_follows_the_grad_mode():
    """A graph kept where nobody asked for it, or none where one is needed."""
    model = make_model()
    with torch.no_grad():
        assert not model.encode_images(pixel_values=pixels()).cross_attention_cache.layers[0].keys.requires_grad
    assert model.encode_images(pixel_values=pixels()).cross_attention_cache.layers[0].keys.requires_grad


@pytest.fixture
def warnings_of_call(caplog):
    logger = logging.getLogger("transformers")
    from hf_xattn import call

    call.logger.warning_once.cache_clear()
    before, logger.propagate = logger.propagate, True
    logging.getLogger("hf_xattn").propagate = True
    caplog.set_level(logging.WARNING)
    yield caplog
    logger.propagate = before


def test_constant_images_in_training_are_told(warnings_of_call):
    """A run whose projections learn nothing, without a word."""
    model, ids = make_model().train(), token_ids()
    with torch.no_grad():
        cache = model.encode_images(pixel_values=pixels())
    model(ids, labels=ids, past_key_values=cache).loss.backward()
    assert "encoded without gradients" in warnings_of_call.text
    warnings_of_call.clear()
    model.eval()(ids, past_key_values=make_model().encode_images(pixel_values=pixels()))
    assert "encoded without gradients" not in warnings_of_call.text


def test_constant_images_are_fine_where_nothing_of_theirs_learns(warnings_of_call):
    """A warning that nobody can heed."""
    model, ids = make_model().train(), token_ids()
    freeze_base(model)
    model.model.connector.requires_grad_(False)
    for block in model.blocks:
        block.attn.k_proj.requires_grad_(False)
        block.attn.v_proj.requires_grad_(False)
    with torch.no_grad():
        cache = model.encode_images(pixel_values=pixels())
    model(ids, labels=ids, past_key_values=cache).loss.backward()
    assert "encoded without gradients" not in warnings_of_call.text


@pytest.mark.parametrize("rule", RULES[1:])
@pytest.mark.parametrize("train", [False, True])
def test_images_without_markers_are_refused(rule, train):
    """Images that no text token may see: a run whose blocks have zero gradients, an answer about nothing."""
    model, ids, images = marked(rule).train(train), token_ids(), pixels(2, 2)
    ids[:, 1] = ids[0, 3] = MARKER
    with pytest.raises(ValueError, match=r"rows have \[2, 2\] images, got \[2, 1\] markers"):
        model(ids, pixel_values=images, labels=ids)
    with pytest.raises(ValueError, match=r"got \[0, 0\] markers"):
        model(token_ids(), pixel_values=images)
    mask = torch.tensor([[True, True], [True, False]])
    model(ids, pixel_values=images, image_mask=mask, labels=ids)
    # More text may follow, or the caller decides.
    model(token_ids(), pixel_values=images, use_cache=True)
    model(token_ids(), pixel_values=images, cross_attention_mask=torch.ones(2, 7, 32, dtype=torch.bool))
