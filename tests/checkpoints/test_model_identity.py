"""Encoded images know the model and the weights that made them."""

import pytest
import torch
from marked_models import generate
from tiny_models import make_model, pixels, randomize, token_ids

from hf_xattn.cache.image_cache import combine_images


@torch.no_grad()
def test_encoded_images_of_other_weights_are_refused():
    """Encoded images of another model with equal shapes, or of this one before its weights changed."""
    model, ids, images = make_model(), token_ids(), pixels()
    encoded = model.encode_images(pixel_values=images)
    generate(model, ids, cache=encoded)
    other = randomize(make_model(), seed=9)
    for call in (
        lambda: generate(other, ids, cache=encoded),
        lambda: other(ids, cache=encoded),
        lambda: other.encode_images(pixel_values=images, cache=encoded),
    ):
        with pytest.raises(ValueError, match="another model encoded, or this one with other weights"):
            call()
    with pytest.raises(ValueError, match="different models"):
        combine_images([encoded, other.encode_images(pixel_values=images)])
    generate(make_model(), ids, cache=encoded)  # equal weights: the same images
    for parameter in (
        model.blocks[1].attn.v_proj.weight,
        model.model.connector.layers[0].bias,
        next(model.model.vision_tower.parameters()),
    ):
        before = parameter.clone()
        parameter.view(-1)[7] += 0.5
        with pytest.raises(ValueError, match="other weights"):
            model(ids, cache=encoded)
        parameter.copy_(before)
        model(ids, cache=model.encode_images(pixel_values=images))
    model.blocks[0].attn.q_proj.weight.add_(1.0)  # no part of keys and values
    generate(model, ids, cache=encoded)


def test_identity_reads_the_weights_once(monkeypatch):
    """All weights of a tower read again for every question."""
    from hf_xattn.checkpoints import model_identity

    sums = []
    checksum = model_identity.checksum
    monkeypatch.setattr(model_identity, "checksum", lambda tensor: sums.append(1) or checksum(tensor))
    model, ids = make_model(), token_ids()
    encoded = model.encode_images(pixel_values=pixels())
    count = len(sums)
    assert count > 10
    generate(model, ids, cache=encoded)
    generate(model, ids, cache=encoded)
    assert len(sums) == count
    with torch.no_grad():
        model.blocks[0].attn.k_proj.weight.mul_(2)
    model.image_identity()
    assert len(sums) == count + 1
