"""What training learns from, and what it must be told."""

import logging

import pytest
import torch

from helpers.models.marked_models import MARKER, RULES, marked
from helpers.models.tiny_models import make_model, make_text, pixels, token_ids
from hf_xattn import freeze_base
from hf_xattn.utils.transformers_api import CACHE


def gradients(model):
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0}


def test_training_on_encoded_images_equals_training_on_images():
    """Projections, connector and tower without gradients, because the images were encoded before the text was read."""
    found = []
    for encoded in (False, True):
        model, ids, images = make_model(), token_ids(), pixels()
        freeze_base(model, vision=False)
        model.train()
        inputs = {"cache": model.encode_images(pixel_values=images)} if encoded else {"pixel_values": images}
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
    model(ids, labels=ids, cache=cache).loss.backward()
    assert "encoded without gradients" in warnings_of_call.text
    warnings_of_call.clear()
    model.eval()(ids, cache=make_model().encode_images(pixel_values=pixels()))
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
    model(ids, labels=ids, cache=cache).loss.backward()
    assert "encoded without gradients" not in warnings_of_call.text


@pytest.mark.parametrize("rule", RULES[1:])
@pytest.mark.parametrize("train", [False, True])
def test_images_without_markers_are_refused(rule, train):
    """Images that no text token may see: a run whose blocks have zero gradients, an answer about nothing."""
    model, ids, images = marked(rule).train(train), token_ids(), pixels(2, 2)
    ids[:, 1] = ids[0, 3] = MARKER
    with pytest.raises(ValueError, match=r"\[2, 2\] images a row, got \[2, 1\] markers"):
        model(ids, pixel_values=images, labels=ids)
    with pytest.raises(ValueError, match=r"got \[0, 0\] markers"):
        model(token_ids(), pixel_values=images)
    mask = torch.tensor([[True, True], [True, False]])
    model(ids, pixel_values=images, image_mask=mask, labels=ids)
    # More text may follow, or the caller decides.
    model(token_ids(), pixel_values=images, use_cache=True)
    model(token_ids(), pixel_values=images, cross_attention_mask=torch.ones(2, 7, 32, dtype=torch.bool))


def test_frozen_text_without_images():
    """A step without images and nothing that learns: "element 0 of tensors does not require grad" ends the run."""
    for options in ({}, {"vision": False}, {"image_visibility": "previous", "image_token_id": MARKER}):
        model, ids = make_model(**options).train(), token_ids()
        freeze_base(model)
        base = make_text().train()
        for inputs in ({"input_ids": ids}, {"inputs_embeds": model.get_input_embeddings()(ids).detach()}):
            outputs = model(**inputs, labels=ids, use_cache=True)
            assert torch.equal(outputs.logits, base(ids).logits)
            assert not outputs[CACHE].cross_attention_cache.layers
            outputs.loss.backward()
            assert all(not weight.grad.any() for block in model.blocks for weight in block.parameters())
        with torch.no_grad():
            assert not model(ids).logits.requires_grad


def test_stand_in_image_only_where_it_is_needed():
    """A vision tower that runs for text without images, where the text learns, or nothing does."""
    model, ids, calls = make_model().train(), token_ids(), []
    model.model.vision_tower.register_forward_hook(lambda *_: calls.append(1))
    model(ids, labels=ids).loss.backward()
    freeze_base(model)
    model.get_output_embeddings().requires_grad_(True)
    model(ids, labels=ids).loss.backward()
    model.requires_grad_(False)
    model(ids, labels=ids)
    freeze_base(model)
    model(inputs_embeds=model.get_input_embeddings()(ids).requires_grad_(), labels=ids).loss.backward()
    with torch.no_grad():
        model(ids, labels=ids)
    model.eval()
    model(ids, labels=ids)
    model.train()
    model(ids, labels=ids).loss.backward()  # the blocks learn, the tower does not
    assert not calls and model.model.connector.layers[0].weight.grad is not None
    freeze_base(model, vision=False)
    model(ids, labels=ids).loss.backward()
    assert len(calls) == 1


def test_text_goes_on_after_a_step_without_images():
    """A cache that remembers the stand-in image, and an image that comes later and takes its place."""
    model, ids, later = freeze_base(marked("previous")).train(), token_ids(length=4), token_ids(seed=5)
    later[:, 1] = MARKER
    found = []
    for training in (True, False):
        cache = model.train(training)(ids, use_cache=True)[CACHE]
        found.append(model(later, pixel_values=pixels(), cache=cache).logits)
    assert torch.allclose(*found, atol=1e-5)
