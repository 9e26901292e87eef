"""Every vision model of transformers: it works as a tower, or `retrofit` says why it cannot be one."""

import copy

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModel, CLIPVisionConfig, CLIPVisionModelWithProjection, ViltConfig

from helpers.models.custom_tower import CustomTower, CustomTowerConfig
from helpers.models.tiny_models import make_text, randomize, token_ids
from helpers.models.tiny_vision import picture_size, tiny_tower, tiny_vision_config
from hf_xattn import XAttnForConditionalGeneration, freeze, retrofit
from hf_xattn.parts.measured_towers import measured_features
from hf_xattn.parts.towers import check_tower_class, vision_model_types, why_no_tower
from hf_xattn.utils.architectures import TILED_VISION_TYPES
from hf_xattn.utils.towers import UNTESTED, class_of_type


WORK = [name for name in vision_model_types() if why_no_tower(name) is None and name not in UNTESTED]
REFUSED = [name for name in vision_model_types() if why_no_tower(name) is not None]


# Detectors and readers of text have many parts, and take more than a second each.
LONG = {"d_fine", "deimv2", "mobilenet_v2", "rt_detr", "rt_detr_v2", "uvdoc"}
LONG |= {name for name in WORK if name.startswith("pp_")}
TRIED = [
    pytest.param(name, marks=pytest.mark.slow) if name in LONG else name
    for name in WORK
    if name not in TILED_VISION_TYPES  # tests/importers has one
]


@pytest.mark.parametrize("model_type", TRIED)
def test_a_tower_tells_images_apart_and_loads_again(model_type, tmp_path):
    """A tower that is refused, whose features do not fit, mix pictures or do not tell them apart, that changes while it
    is frozen, or that does not come back from a file.
    """
    tiny_tower(model_type).save_pretrained(tmp_path / "tower")
    model = retrofit(make_text(), tmp_path / "tower", every=2)
    tower = model.model.vision_tower
    pixels = torch.randn(2, 1, getattr(tower.config, "num_channels", 3), *picture_size(tower.config))
    randomize(model)

    freeze(model, text=True, vision=True)
    before = copy.deepcopy(tower.state_dict())
    optimizer = torch.optim.SGD([weight for weight in model.parameters() if weight.requires_grad], lr=0.01)
    model.train()
    model(token_ids(), pixel_values=pixels, labels=token_ids()).loss.backward()
    assert all(weight.grad.any() for weight in model.model.connector.parameters())
    optimizer.step()
    assert all(torch.equal(value, before[name]) for name, value in tower.state_dict().items())

    with torch.no_grad():
        model.eval()
        logits = model(token_ids(), pixel_values=pixels).logits
        assert logits.isfinite().all()
        assert (model(token_ids(), pixel_values=pixels.flip(0)).logits - logits).abs().max() > 1e-3
        alone = model(token_ids()[:1], pixel_values=pixels[:1]).logits
        assert torch.allclose(alone, logits[:1], atol=1e-4)
        two = model(token_ids()[:1], pixel_values=pixels.transpose(0, 1)).logits  # both in one row, in any order
        assert torch.allclose(
            model(token_ids()[:1], pixel_values=pixels.transpose(0, 1).flip(1)).logits, two, atol=1e-4
        )

        model.save_pretrained(tmp_path / "saved")
        loaded = XAttnForConditionalGeneration.from_pretrained(tmp_path / "saved").eval()
        assert torch.allclose(loaded(token_ids(), pixel_values=pixels).logits, logits, atol=1e-5)
        asked = [each.generate(token_ids(), pixel_values=pixels, max_new_tokens=3) for each in (model, loaded)]
        assert torch.equal(*asked)


@pytest.mark.parametrize("model_type", REFUSED)
def test_a_model_that_cannot_be_a_tower_is_refused(model_type):
    """A model that cannot be a tower, found out at the first picture, or that gives features of something else."""
    with pytest.raises(ValueError, match="Expected `vision` to be a vision model"):
        check_tower_class("vision", class_of_type(CONFIG_MAPPING[model_type]))


def test_refused_before_any_work():
    """A tower that `retrofit` takes, and the first call does not: it draws the patches that it hides by chance."""
    text = make_text()
    with pytest.raises(ValueError, match="got a ViTMAEModel, which cannot be a tower: it hides three quarters"):
        retrofit(text, AutoModel.from_config(tiny_vision_config("vit_mae")))
    with pytest.raises(ValueError, match="got a ViltModel, which cannot be a tower: it reads text"):
        retrofit(text, AutoModel.from_config(ViltConfig(hidden_size=24, num_hidden_layers=1, num_attention_heads=2)))
    assert not any("cross_attention_block" in name for name, _ in text.named_modules())


class OwnTower(CLIPVisionModelWithProjection):
    pass


def test_a_tower_that_would_come_back_as_another():
    """A saved model whose tower is built as another class, with other names of weights, when it is loaded."""
    config = CLIPVisionConfig(hidden_size=24, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    with pytest.raises(ValueError, match="be a CLIPVisionModel, which is built.* got a OwnTower"):
        retrofit(make_text(), OwnTower(config))
    retrofit(make_text(), CLIPVisionModelWithProjection(config))  # which loads without its projection


@pytest.mark.parametrize(("model_type", "width"), [("sam2_vision_model", 64), ("cvt", 16), ("llama4_vision_model", 20)])
def test_the_axis_of_the_width(model_type, width):
    """The height of a map with the channels last, taken for the width of its features."""
    assert measured_features(tiny_vision_config(model_type)).width == width
    model = retrofit(make_text(), tiny_tower(model_type), every=2)
    assert model.model.connector.layers[0].in_features == width
    tower = model.model.vision_tower
    pixels = torch.randn(2, 3, *picture_size(tower.config))
    with torch.no_grad():
        found = model.get_image_features(pixels).last_hidden_state
        own = tower(pixel_values=pixels).last_hidden_state
    assert torch.equal(found, own.permute(0, 3, 1, 2) if model_type == "sam2_vision_model" else own)


class ChannelsLastTower(CustomTower):
    def forward(self, pixel_values):
        output = super().forward(pixel_values)
        output.last_hidden_state = output.last_hidden_state.unflatten(1, (28, 28))  # of 224 pixels
        return output


class OneRowTower(CustomTower):
    def forward(self, pixel_values):
        output = super().forward(pixel_values)
        output.last_hidden_state = output.last_hidden_state.flatten(0, 1)[None]
        return output


@pytest.mark.parametrize(("tower", "came"), [(ChannelsLastTower, "come last"), (OneRowTower, "for 2 images")])
def test_features_that_are_not_those_of_a_picture(tower, came):
    """Rows of a map taken for channels, or the tokens of all pictures for those of one."""
    with pytest.raises(ValueError, match=came):
        retrofit(make_text(), tower(CustomTowerConfig()))


def test_queries_have_no_places():
    """A code of places on the queries of a detector, whose number is a square by chance."""
    config = tiny_vision_config("rt_detr")
    config.num_queries = 4
    assert measured_features(config) == (32, None)
    assert measured_features(tiny_vision_config("sapiens2")).tokens is None  # 16 patches behind 9 others are 25
