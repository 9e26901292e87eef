"""`vision_feature_layer`: other hidden states of the tower than its last one, as in Llava."""

import pytest
import torch
from transformers import CLIPVisionConfig, ConvNextConfig, LlavaConfig, LlavaForConditionalGeneration, SwinConfig

from helpers.models.tiny_models import TEXT_CONFIGS, pixels, token_ids
from hf_xattn import XAttnConfig, XAttnForConditionalGeneration
from hf_xattn.checkpoints.model_identity import tower_identity


VISION = {
    "hidden_size": 24,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 8,
}


def with_layer(layer, **config):
    options = {
        "text_config": TEXT_CONFIGS["llama"](),
        "vision_config": CLIPVisionConfig(**VISION),
        "cross_attention_layers": [1, 3],
        **config,
    }
    return XAttnForConditionalGeneration(XAttnConfig(vision_feature_layer=layer, **options)).eval()


@torch.no_grad()
@pytest.mark.parametrize("layer", [-2, [-2], [1, 3, 0]], ids=str)
@pytest.mark.parametrize("strategy", ["full", "default"])
def test_features_are_those_of_llava(layer, strategy):
    """Another layer, another order of several, or a class token that is dropped from one of them alone."""
    ours = with_layer(layer, vision_feature_select_strategy=strategy)
    chosen = {"vision_feature_layer": layer, "vision_feature_select_strategy": strategy}
    config = LlavaConfig(
        text_config=TEXT_CONFIGS["llama"](), vision_config=CLIPVisionConfig(**VISION), image_token_index=90, **chosen
    )
    theirs = LlavaForConditionalGeneration(config).eval().model
    theirs.vision_tower.load_state_dict(ours.model.vision_tower.state_dict())
    projector = theirs.multi_modal_projector
    projector.linear_1.load_state_dict(ours.model.connector.layers[0].state_dict())
    projector.linear_2.load_state_dict(ours.model.connector.layers[2].state_dict())
    images = pixels(2)
    expected = theirs.get_image_features(images[:, 0], **chosen).pooler_output
    outputs = ours.get_image_features(images)
    assert torch.allclose(outputs.pooler_output[:, 0], torch.stack(list(expected)), atol=1e-5)
    assert outputs.hidden_states is None
    assert len(ours.get_image_features(images, output_hidden_states=True).hidden_states) == 4
    logits = ours(token_ids(), pixel_values=images).logits
    features = outputs.last_hidden_state[:, None]
    assert torch.allclose(ours(token_ids(), vision_features=features).logits, logits, atol=1e-5)


@pytest.mark.parametrize("layer", [None, 1])
def test_every_weight_of_a_tower_that_trains_has_a_gradient(layer):
    """Weights behind the layer, whose gradient DDP would wait for."""
    model = with_layer(layer, cross_attention_config={"zero_init": False}).train()
    ids = token_ids()
    model(ids, pixel_values=pixels(), labels=ids).loss.backward()
    gradients = {name: weight.grad for name, weight in model.model.vision_tower.named_parameters()}
    assert all(gradient is not None for gradient in gradients.values())
    learns = {int(name.split("layers.")[1][0]) for name, each in gradients.items() if ".layers." in name and each.any()}
    assert learns == ({0, 1, 2} if layer is None else {0})


@torch.no_grad()
def test_chosen_layers_survive_saving(tmp_path):
    model = with_layer([1, -1])
    expected = model(token_ids(), pixel_values=pixels()).logits
    model.save_pretrained(tmp_path)
    loaded = XAttnForConditionalGeneration.from_pretrained(tmp_path)
    assert loaded.config.vision_feature_layer == [1, -1]
    assert torch.equal(loaded(token_ids(), pixel_values=pixels()).logits, expected)


@torch.no_grad()
def test_compiled_features_of_several_layers_are_the_same():
    model = with_layer([1, -1])
    expected = model(token_ids(), pixel_values=pixels()).logits
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert torch.allclose(compiled(token_ids(), pixel_values=pixels()).logits, expected, atol=1e-5)


def test_identity_of_encoded_pictures():
    """A folder of features of one layer that is read for those of another."""
    model = with_layer(1)
    names = set()
    for layer in (1, 2, [1], None):
        model.config.vision_feature_layer = layer
        names.add(tower_identity(model.config, model.model.vision_tower))
    assert len(names) == 4


def test_layers_that_the_tower_lacks_are_refused():
    conv = ConvNextConfig(hidden_sizes=[8, 16], depths=[1, 1], num_stages=2, patch_size=4)
    for options, told in (
        ({"layer": 4}, r"from -4 to 3, because the vision tower has 3 layers and 0 stands for its embeddings, got 4"),
        ({"layer": [1, -5]}, r"from -4 to 3.*got \[1, -5\]"),
        ({"layer": []}, r"at least one layer, got \[\]"),
        ({"layer": -1, "vision_config": conv}, "towers whose layers all have one width, got -1 with a convnext"),
        ({"layer": -1, "vision_config": None}, "`vision_feature_layer=-1` needs a `vision_config`, got None"),
        ({"layer": [0, 1], "connector_type": "identity"}, r"`cross_attention_config.context_size` .* \(48\).* got 32"),
    ):
        with pytest.raises(ValueError, match=told):
            with_layer(**options)
    swin = SwinConfig(embed_dim=8, depths=[1, 1], num_heads=[2, 2], window_size=2, image_size=32, patch_size=4)
    with pytest.raises(ValueError, match=r"\(images, tokens, width=16\), got 0, whose shapes are \[\(2, 64, 8\)\]"):
        with_layer(0, vision_config=swin).get_image_features(pixels())
    with pytest.raises(ValueError, match=r"`vision_features` of shape .*width=48.* got \(2, 16, 24\)"):
        with_layer([0, 1])(token_ids(), vision_features=torch.zeros(2, 16, 24))
