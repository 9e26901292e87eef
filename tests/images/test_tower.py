"""Vision towers: which models can be one, and which image sizes they read."""

import copy
import logging

import pytest
import torch
from transformers import AutoModel, CLIPConfig, SiglipVisionModel, ViTConfig, ViTForImageClassification
from transformers.modeling_outputs import ImageClassifierOutput

from helpers.models import tiny_mllama
from helpers.models.custom_tower import CustomTower, CustomTowerConfig
from helpers.models.tiny_models import make_text, pixels, token_ids, vision_config
from helpers.models.tiny_towers import ANY_SIZE, ONE_SIZE, SMALL_TOWER, model_with
from hf_xattn import XAttnConfig, XAttnForConditionalGeneration, retrofit


SIZES = [(33, 32), (40, 32), (64, 16), (64, 64)]


@torch.no_grad()
@pytest.mark.parametrize("name", ONE_SIZE)
def test_images_of_the_only_size(name):
    """A larger image whose border is left out without a word, or an error from inside the tower."""
    model = model_with(ONE_SIZE[name]())
    assert model(token_ids(), pixel_values=pixels()).logits.isfinite().all()
    for height, width in SIZES:
        message = rf"`pixel_values` with images of \(32, 32\).*{name.split('_')[0]}.*\(2, 1, 3, {height}, {width}\)"
        with pytest.raises(ValueError, match=message):
            model(token_ids(), pixel_values=torch.zeros(2, 1, 3, height, width))


@torch.no_grad()
@pytest.mark.parametrize("name", ANY_SIZE)
def test_images_of_any_size(name):
    """A tower that reads every size, kept from it."""
    model = model_with(ANY_SIZE[name]())
    for height, width in SIZES:
        features = model.get_image_features(torch.randn(2, 1, 3, height, width))
        features = features if isinstance(features, torch.Tensor) else features.pooler_output
        assert features.isfinite().all()


@torch.no_grad()
def test_sizes_that_the_tower_refuses_itself():
    """An error from inside a tower that names no argument."""
    model = model_with(ANY_SIZE["convnext"]())
    with pytest.raises(ValueError, match=r"cannot read `pixel_values` of shape \(2, 1, 3, 2, 2\): "):
        model(token_ids(), pixel_values=torch.zeros(2, 1, 3, 2, 2))


def test_models_that_are_no_towers(tmp_path):
    """A language model, or one that needs more than pixels, found out at the first image."""
    text = make_text()
    with pytest.raises(
        ValueError, match="`vision` to be a vision model, which takes `pixel_values`, got a LlamaForCausalLM"
    ):
        retrofit(text, make_text())
    assert not any("cross_attention_block" in name for name, _ in text.named_modules()), "changed all the same"
    text.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="`vision` to be a vision model.*LlamaModel"):
        retrofit(text, tmp_path)
    with pytest.raises(ValueError, match="`vision_config` to be a vision model.*LlamaModel"):
        XAttnForConditionalGeneration(XAttnConfig(text_config=text.config, vision_config=make_text().config))
    with pytest.raises(ValueError, match="`vision_tower` to be a vision model.*LlamaForCausalLM"):
        config = XAttnConfig(text_config=text.config, vision_config=vision_config())
        XAttnForConditionalGeneration(config, text, make_text())


@torch.no_grad()
def test_a_tower_with_a_head():
    """`AttributeError: 'ImageClassifierOutput' object has no attribute 'last_hidden_state'`."""
    with pytest.raises(
        ValueError,
        match="`vision` to be .* `last_hidden_state`, got a ViTForImageClassification.*'logits'.*`base_model`",
    ):
        retrofit(make_text(), ViTForImageClassification(ViTConfig(**SMALL_TOWER)))
    with pytest.raises(ValueError, match="`vision_config` to be .* `last_hidden_state`, got a CLIPModel"):
        XAttnForConditionalGeneration(XAttnConfig(text_config=make_text().config, vision_config=CLIPConfig()))
    retrofit(make_text(), AutoModel.from_config(ViTConfig(**SMALL_TOWER)))(token_ids(), pixel_values=pixels())


class PlainTower(CustomTower):
    """Takes pixels and nothing else."""

    def forward(self, pixel_values):
        return super().forward(pixel_values)


class TupleTower(CustomTower):
    def forward(self, pixel_values):
        return (super().forward(pixel_values).last_hidden_state,)


class LogitsTower(CustomTower):
    def forward(self, pixel_values):
        return ImageClassifierOutput(logits=super().forward(pixel_values).last_hidden_state.mean(1))


@torch.no_grad()
def test_a_tower_that_takes_pixels_alone():
    """`TypeError: forward() got an unexpected keyword argument 'return_dict'`."""
    model = retrofit(make_text(), PlainTower(CustomTowerConfig()))
    model(token_ids(), pixel_values=pixels())
    assert model.get_image_features(pixels(), output_hidden_states=True).hidden_states is None


@torch.no_grad()
@pytest.mark.parametrize(("tower", "came"), [(TupleTower, "type tuple"), (LogitsTower, r"\['logits'\]")])
def test_a_tower_without_hidden_states(tower, came):
    """An `AttributeError` from a tower whose annotations do not tell what it returns."""
    with pytest.raises(ValueError, match=f"`last_hidden_state`, got a {tower.__name__}, whose output has {came}"):
        retrofit(make_text(), tower(CustomTowerConfig()))


def test_a_class_token_that_is_none(caplog, monkeypatch):
    """`vision_feature_select_strategy="default"` without effect, or that drops the patch in the corner."""
    tiled = tiny_mllama.make_mllama().model.vision_model
    options = {"every": 2, "connector_type": "linear", "vision_feature_select_strategy": "default"}
    with pytest.raises(ValueError, match='"full"` with mllama_vision_model, whose tokens are all read'):
        retrofit(make_text(), copy.deepcopy(tiled), **options)
    with pytest.raises(ValueError, match='"full"` with no vision tower'):
        retrofit(make_text(), every=2, vision_feature_select_strategy="default")
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    with caplog.at_level("WARNING"):
        retrofit(make_text(), SiglipVisionModel(vision_config()), **options)
    assert "siglip_vision_model: this tower has no class token" in caplog.text
