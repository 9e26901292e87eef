"""Encoded images know the model and the weights that made them."""

import copy

import pytest
import torch

from helpers.models.marked_models import generate, strong_model, turn
from helpers.models.tiny_models import make_model, pixels, randomize, token_ids
from hf_xattn.checkpoints import model_identity
from hf_xattn.checkpoints.model_identity import ModelIdentity, tower_identity
from hf_xattn.configuration_xattn import CrossAttentionConfig, PerceiverConfig, XAttnConfig
from hf_xattn.storage.image_files import combine_images, save_image_cache
from hf_xattn.utils.config_checks import own_fields
from hf_xattn.utils.transformers_api import CACHE


PERCEIVER = {"num_latents": 5, "num_hidden_layers": 2, "num_attention_heads": 3, "head_dim": 8}
OF_RESAMPLER = {"connector_type": "perceiver", "cross_attention_config": {"context_size": 24}}
# Identities that files of encoded images and of features hold. They were computed before the lists were made.
STORED = {
    "plain": (
        {},
        "08c8d689d6e162ddae211674384c3d9be30fbecdca2295f367b6a9aad70b2efe",
        "dfda9d1c4a83acbd49f3fbb99d4464cd8e598383a56136404afd2a0fa5555eb3",
    ),
    "block": (
        {
            "cross_attention_config": {
                "qk_norm": True,
                "qk_norm_eps": 1e-4,
                "quiet_softmax": True,
                "context_norm": True,
                "norm_type": "layernorm",
                "num_key_value_heads": 1,
            }
        },
        "def6a22787ab0183c9d1ce7bccf443ce7434fe3cfcc78f23cd41e89ad4dada0b",
        "dfda9d1c4a83acbd49f3fbb99d4464cd8e598383a56136404afd2a0fa5555eb3",
    ),
    "features": (
        {"vision_feature_layer": [-2, -1], "connector_type": "linear", "connector_bias": False},
        "068f2afb691d3c29c3df30dac27c3198c88557a95a317ba1b953da69cf612412",
        "a54972c2946a60e1f935844e76669317337a31a92db4266bb0cd0feca398abef",
    ),
    "resampler": (
        {**OF_RESAMPLER, "perceiver_config": PERCEIVER},
        "610cda2bd0f002481cb23e25289c6543625ab58a30ca2e08028f305d6d2943af",
        "dfda9d1c4a83acbd49f3fbb99d4464cd8e598383a56136404afd2a0fa5555eb3",
    ),
    "positions": (
        {**OF_RESAMPLER, "perceiver_config": {**PERCEIVER, "num_image_positions": 2}},
        "1383bf95f3a861178462a22cbbd43df3f87c3723fd7e06dc911605ef5803c20b",
        "dfda9d1c4a83acbd49f3fbb99d4464cd8e598383a56136404afd2a0fa5555eb3",
    ),
    "text side": (
        {
            "image_token_id": 5,
            "image_visibility": "latest",
            "cross_attention_config": {"gate_granularity": "channel", "position_bias": True, "mlp_type": "plain"},
        },
        "08c8d689d6e162ddae211674384c3d9be30fbecdca2295f367b6a9aad70b2efe",
        "dfda9d1c4a83acbd49f3fbb99d4464cd8e598383a56136404afd2a0fa5555eb3",
    ),
}


@torch.no_grad()
@pytest.mark.parametrize("name", STORED)
def test_stored_identities_stay_valid(name):
    """Files of encoded images that a later version no longer takes for its own."""
    options, images, tower = STORED[name]
    model = make_model(**options)
    for parameter in model.parameters():
        parameter.copy_((torch.arange(parameter.numel()) % 7 - 3).reshape(parameter.shape))
    assert model.image_identity() == images
    assert tower_identity(model.config, model.model.vision_tower) == tower


class LaterBlock(CrossAttentionConfig):
    """The configuration of a later version, with an option that changes keys and values."""

    key_scale: float = 1.0


class LaterPerceiver(PerceiverConfig):
    key_scale: float = 1.0


class LaterModel(XAttnConfig):
    key_scale: float = 1.0


@torch.no_grad()
@pytest.mark.parametrize("part", ["cross_attention_config", "perceiver_config", None])
def test_a_new_option_counts(part):
    """Encoded images of another option, which nobody has added to a list."""
    model = make_model(**OF_RESAMPLER, perceiver_config=PERCEIVER)
    parts, tower, config = model.model._image_parts(), model.model.vision_tower, model.config
    expected = model.image_identity(), tower_identity(config, tower)
    later = {"cross_attention_config": LaterBlock, "perceiver_config": LaterPerceiver, None: LaterModel}[part]
    if part is None:
        config = changed = LaterModel(**{name: getattr(config, name) for name in own_fields(XAttnConfig)})
    else:
        before = getattr(config, part)
        changed = later(**{name: getattr(before, name) for name in own_fields(type(before))})
        setattr(config, part, changed)
    assert (ModelIdentity(config).current(parts), tower_identity(config, tower)) == expected
    changed.key_scale = 2.0
    assert ModelIdentity(config).current(parts) != expected[0]
    assert (tower_identity(config, tower) != expected[1]) == (part is None)


def test_lists_name_fields():
    """A field that was renamed, and is listed as harmless under its old name."""
    lists = model_identity
    of_model = {*lists.MODEL_FIELDS, *lists.PARTS, *lists.HARMLESS_OF_MODEL, *lists.BEHIND_TOWER}
    assert of_model <= own_fields(XAttnConfig).keys()
    of_block = {*lists.BLOCK_FIELDS, *lists.WRITTEN_OF_BLOCK, *lists.HARMLESS_OF_BLOCK}
    assert of_block <= own_fields(CrossAttentionConfig).keys()
    assert {*lists.PERCEIVER_FIELDS} <= own_fields(PerceiverConfig).keys()


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
    with pytest.raises(ValueError, match="one model and one state of its weights"):
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


@pytest.fixture(scope="module")
def model():
    return strong_model()


def test_images_of_unknown_weights(model, tmp_path):
    """A file that says its images were encoded by weights that came later."""
    talk = turn(model)[CACHE]
    changed = copy.deepcopy(model)
    with torch.no_grad():
        changed.blocks[0].attn.k_proj.weight.mul_(-2)
    with pytest.raises(ValueError, match="Expected `cache` to come from `encode_images` .*or `forward` or `generate`"):
        save_image_cache(talk, tmp_path / "images.safetensors", changed)
    assert not list(tmp_path.iterdir())


@torch.no_grad()
@pytest.mark.parametrize("change", ["select", "repeat", "reorder"])
def test_images_of_other_weights_in_other_rows(change):
    """Keys and values of weights that have changed since, because rows for text count as text."""
    model = make_model()
    cache = model.encode_images(pixel_values=pixels(2, 1))
    rows = torch.tensor([1, 0])
    if change == "select":
        cache.batch_select_indices(rows)
    elif change == "repeat":
        cache.batch_repeat_interleave(2)
    else:
        cache.reorder_cache(rows)
    model.blocks[0].attn.k_proj.weight.mul_(1.5)
    with pytest.raises(ValueError, match="holds images that another model encoded, or this one with other"):
        model(token_ids(4 if change == "repeat" else 2), cache=cache)
