"""`get_image_features`: transformers' own contract, and features that a forward takes for the images."""

import pytest
import torch
from transformers import CLIPVisionConfig, ConvNextConfig, ResNetConfig
from transformers.modeling_outputs import BaseModelOutputWithPooling

from helpers.models.tiny_mllama import TILED, TILES, make_mllama
from helpers.models.tiny_models import make_model, make_text, pixels, token_ids
from hf_xattn import XAttnConfig, XAttnForConditionalGeneration
from hf_xattn.importers import import_checkpoint


def with_tower(vision, **config) -> XAttnForConditionalGeneration:
    text = make_text()
    config = XAttnConfig(text_config=text.config, vision_config=vision, cross_attention_layers=[1, 3], **config)
    return XAttnForConditionalGeneration(config, text_model=text).eval()


def clip(**config) -> XAttnForConditionalGeneration:
    vision = CLIPVisionConfig(
        hidden_size=24, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, image_size=32, patch_size=8
    )
    return with_tower(vision, **config)


@torch.no_grad()
@pytest.mark.parametrize("part", ["model", "body"])
def test_image_features_follow_the_contract_of_transformers(part):
    """A bare tensor where transformers expects an output, features of another kind than the forward's, or the tower's
    pooled token in their place; an axis of images where the pixels have none: transformers expects two axes for each
    sample of those.
    """
    whole, ids, images = make_model(), token_ids(), pixels(2, 3)
    model = whole if part == "model" else whole.model
    outputs = model.get_image_features(images)
    assert type(outputs) is BaseModelOutputWithPooling
    assert outputs.pooler_output.shape == (2, 3, 16, 32)
    assert outputs.hidden_states is None and outputs.attentions is None
    tower = whole.model.vision_tower(pixel_values=images.flatten(0, 1))
    assert torch.equal(outputs.last_hidden_state, tower.last_hidden_state) and tower.last_hidden_state.shape[0] == 6
    expected = whole(ids, pixel_values=images).logits
    assert torch.equal(whole(ids, cross_attention_states=outputs.pooler_output).logits, expected)
    assert torch.equal(whole(ids, cross_attention_states=outputs.pooler_output.flatten(1, 2)).logits, expected)
    single = model.get_image_features(pixel_values=images[:, 0])
    assert torch.equal(single.pooler_output, model.get_image_features(images[:, :1]).pooler_output[:, 0])
    assert single.last_hidden_state.shape == (2, 16, 24)
    expected = whole(ids, pixel_values=images[:, 0]).logits
    assert torch.equal(whole(ids, cross_attention_states=single.pooler_output).logits, expected)

    as_tuple = model.get_image_features(images, return_dict=False)
    assert isinstance(as_tuple, tuple) and len(as_tuple) == 2 and torch.equal(as_tuple[1], outputs.pooler_output)
    whole.config.return_dict = False
    assert isinstance(model.get_image_features(images), tuple)
    assert torch.equal(model.get_image_features(images, return_dict=True).pooler_output, outputs.pooler_output)


@torch.no_grad()
@pytest.mark.parametrize("asked_by", ["argument", "config", "vision_config"])
def test_hidden_states_and_attentions(asked_by):
    """Requests that do not reach the tower, come from one place only, or cannot be refused."""
    model, images = make_model(), pixels(2, 2)
    model.set_attn_implementation("eager")
    asks = {"output_hidden_states": True, "output_attentions": True}
    if asked_by != "argument":
        config = model.config if asked_by == "config" else model.config.vision_config
        config.output_hidden_states = config.output_attentions = True
    outputs = model.get_image_features(images, **(asks if asked_by == "argument" else {}))
    assert [tuple(each.shape) for each in outputs.hidden_states] == [(4, 16, 24)] * 3
    assert [tuple(each.shape) for each in outputs.attentions] == [(4, 2, 16, 16)] * 2
    refused = model.get_image_features(images, output_hidden_states=False, output_attentions=False)
    assert refused.hidden_states is None and refused.attentions is None
    assert torch.equal(refused.pooler_output, outputs.pooler_output)


@torch.no_grad()
def test_features_of_a_tiled_tower_keep_its_tiles():
    """Mllama's tiles taken for images, or features without the tower's own output."""
    theirs = make_mllama()
    ours = import_checkpoint(theirs)
    given = {name: value for name, value in TILED["batch"].items() if name not in ("input_ids", "cross_attention_mask")}
    asks = {"output_hidden_states": True, "output_attentions": True}
    outputs = ours.get_image_features(**given, **asks)
    expected = theirs.model.vision_model(**given, **asks)
    assert outputs.last_hidden_state.shape[:3] == (2, 2, TILES)
    assert torch.allclose(outputs.last_hidden_state, expected.last_hidden_state, atol=1e-5)
    assert outputs.hidden_states is None and outputs.attentions is None  # what transformers records is not these
    silent = ours.get_image_features(**given)
    assert silent.hidden_states is None and silent.attentions is None
    assert outputs.pooler_output.shape == (2, 2, TILES * 5, 32)
    projected = theirs.model.multi_modal_projector(expected.last_hidden_state).flatten(2, 3)
    assert torch.allclose(outputs.pooler_output, projected, atol=1e-5)
    assert len(ours.get_image_features(**given, return_dict=False)) == 2
    with pytest.raises(ValueError, match="`aspect_ratio_ids` is required"):
        ours.get_image_features(given["pixel_values"])


@torch.no_grad()
def test_class_token_is_not_a_feature():
    """`vision_feature_select_strategy` forgotten in the features, or applied to what the tower returned."""
    images = pixels(2, 2)
    for strategy, tokens in (("full", 17), ("default", 16)):
        outputs = clip(vision_feature_select_strategy=strategy).get_image_features(images)
        assert outputs.pooler_output.shape == (2, 2, tokens, 32)
        assert outputs.last_hidden_state.shape == (4, 17, 24)


@torch.no_grad()
@pytest.mark.parametrize(
    "vision",
    [
        ConvNextConfig(hidden_sizes=[8, 16], depths=[1, 1], num_stages=2, patch_size=4),
        ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic"),
    ],
    ids=lambda config: config.model_type,
)
def test_towers_without_attention(vision):
    """A convolutional tower that fails on a request for what it does not have."""
    model = with_tower(vision)
    outputs = model.get_image_features(pixels(2, 2), output_hidden_states=True)
    assert outputs.pooler_output.shape[:2] == (2, 2) and outputs.last_hidden_state.dim() == 4
    assert len(outputs.hidden_states) == 3
    model.config._attn_implementation = "eager"
    model.config.output_attentions = True
    assert not model.get_image_features(pixels(2, 2)).attentions


def test_gradients_and_errors():
    """Features that cannot be trained, or a call without pixels that fails inside the tower."""
    model = make_model()
    model.get_image_features(pixels()).pooler_output.sum().backward()
    assert all(weight.grad is not None for weight in model.model.connector.parameters())
    with pytest.raises(ValueError, match="`get_image_features` needs `pixel_values`"):
        model.get_image_features(None)
    with pytest.raises(ValueError, match="no vision tower"):
        make_model(vision=False).get_image_features(pixels())
