"""The connector: how its weights start."""

import copy
import itertools
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoModelForImageTextToText
from transformers.models.mllama.configuration_mllama import MllamaVisionConfig

from helpers.models.tiny_mllama import VISION
from helpers.models.tiny_models import make_model, make_text, randomize, token_ids, vision_config
from helpers.models.tiny_towers import ANY_SIZE, ONE_SIZE
from helpers.references.memory_checks import memory_of_nan
from hf_xattn import XAttnConfig, retrofit
from hf_xattn.images.connector import XAttnConnector
from hf_xattn.parts.perceiver import PerceiverResampler


@pytest.mark.parametrize("kind", ["linear", "mlp", "mlp_2d", "perceiver"])
def test_initial_weights_keep_the_scale_of_features(kind):
    """Features that shrink or grow on their way to the blocks, because another module's initialisation fills the
    layers; a bias that adds noise; latents that are all alike.
    """
    perceiver = {"num_latents": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 16}
    options = {"perceiver_config": perceiver, "cross_attention_config": {"context_size": 24}}
    connector: Any = make_model(connector_type=kind, **(options if kind == "perceiver" else {})).model.connector
    connector.requires_grad_(False)
    linears = [module for module in connector.modules() if isinstance(module, torch.nn.Linear)]
    assert len(linears) == {"linear": 1, "mlp": 2, "mlp_2d": 2, "perceiver": 6}[kind]
    for linear in linears:
        assert 0.85 < float(linear.weight.std() * linear.in_features**0.5) < 1.15
        assert abs(float(linear.weight.mean())) < 0.1 * linear.in_features**-0.5
        assert linear.bias is None or not linear.bias.any()
    for module in connector.modules():
        if isinstance(module, torch.nn.LayerNorm):
            assert bool((module.weight == 1).all()) and not module.bias.any()
        if isinstance(module, PerceiverResampler):
            assert 0.9 < float(module.latents.std()) < 1.1


def test_features_keep_their_scale():
    """Image tokens that the blocks see a tenth or ten times as large as the tower's features."""
    model = make_model(connector_type="linear")
    with torch.no_grad():
        made = model.model.connector(torch.randn(64, 24))
    assert made.shape == (64, 32) and 0.8 < float(made.std()) < 1.25


@pytest.mark.parametrize("kind", ["linear", "mlp", "mlp_2d", "perceiver"])
def test_every_weight_gets_a_value(kind):
    """Weights that stay as the memory was, because neither torch nor `_init_weights` writes them."""
    perceiver = {"num_latents": 4, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 16, "qk_norm": True}
    options = {"perceiver_config": perceiver} if kind == "perceiver" else {}
    text, vision = make_text(), AutoModel.from_config(vision_config())
    with memory_of_nan():
        connector = retrofit(text, vision, every=2, connector_type=kind, **options).model.connector
    assert not [name for name, weight in connector.named_parameters() if weight.isnan().any()]


def code_of_places(side, width):
    """What `"mlp_2d"` adds to the tokens of a square picture, place by place."""
    expected = np.zeros((side * side, width))
    for token, channel in itertools.product(range(side * side), range(width)):
        place = token // side if channel % 2 == 0 else token % side
        wave = channel // 2 % 4 + 1
        expected[token, channel] = 0.35 * 2**0.5 * np.cos(np.pi * wave * (place + 0.5) / side)
    return torch.from_numpy(expected)


@torch.no_grad()
@pytest.mark.parametrize(
    ("tower", "strategy", "class_tokens"),
    [("siglip", "full", 0), ("clip", "full", 1), ("clip", "default", 0), ("resnet", "full", 0)],
)
def test_a_code_of_places(tmp_path, tower, strategy, class_tokens):
    """Rows taken for columns, a class token that counts as a place, other weights, a code that is lost in a save."""
    vision = AutoModel.from_config((ONE_SIZE | ANY_SIZE)[tower]()).eval()
    plain, coded = (
        retrofit(
            make_text(), copy.deepcopy(vision), every=2, connector_type=kind, vision_feature_select_strategy=strategy
        ).eval()
        for kind in ("mlp", "mlp_2d")
    )
    coded.model.connector.load_state_dict(plain.model.connector.state_dict())
    images = torch.randn(2, 1, 3, 32, 32)
    added = coded.get_image_features(images).pooler_output - plain.get_image_features(images).pooler_output
    added = added[:, 0]
    assert not added[:, :class_tokens].any()
    patches = added[:, class_tokens:].double()
    side = int(patches.shape[1] ** 0.5)
    expected = code_of_places(side, patches.shape[-1]).expand_as(patches)
    torch.testing.assert_close(patches, expected, atol=1e-5, rtol=1e-5)
    randomize(coded).save_pretrained(tmp_path)
    loaded = AutoModelForImageTextToText.from_pretrained(tmp_path).eval()
    inputs = {"input_ids": token_ids(), "pixel_values": images}
    assert torch.equal(loaded(**inputs).logits, coded(**inputs).logits)
    assert not torch.equal(randomize(plain)(**inputs).logits, coded(**inputs).logits)


def test_places_that_are_not_known():
    """A code of other places than the tokens', because the picture is no square or its tokens are in another order."""
    dropping = retrofit(
        make_text(),
        AutoModel.from_config(vision_config()),
        connector_type="mlp_2d",
        vision_feature_select_strategy="default",
    )
    with pytest.raises(ValueError, match=r"tokens of a square image.*'mlp_2d'`, got 15 tokens"):
        dropping.get_image_features(torch.zeros(1, 1, 3, 32, 32))
    wide = retrofit(make_text(), AutoModel.from_config(ANY_SIZE["resnet"]()), connector_type="mlp_2d")
    with pytest.raises(ValueError, match=r"square images .*'mlp_2d'`, got a height of 32 and a width of 128"):
        wide.get_image_features(torch.zeros(1, 1, 3, 32, 128))
    with pytest.raises(ValueError, match=r"square images .* got a height of 2 and a width of 8"):
        wide(input_ids=token_ids(1), vision_features=torch.zeros(1, 1, 16, 2, 8))  # as many tokens as of a square
    with pytest.raises(ValueError, match="a vision tower of whole images for .*'mlp_2d'`, got 'mllama_vision_model'"):
        tiled = MllamaVisionConfig(**VISION)
        XAttnConnector(XAttnConfig(text_config=make_text().config, vision_config=tiled, connector_type="mlp_2d"))
