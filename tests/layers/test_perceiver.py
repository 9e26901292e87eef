"""The perceiver resampler as a connector. That it computes what it should is checked against Idefics' and
OpenFlamingo's.
"""

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError

from helpers.models.tiny_models import PERCEIVER, make_model, make_text, pixels, token_ids, vision_config
from hf_xattn import XAttnConfig
from hf_xattn.checkpoints.model_card import tokens_per_image
from hf_xattn.configuration_xattn import PerceiverConfig


def make(**changes):
    return make_model(
        connector_type="perceiver", perceiver_config=PERCEIVER | changes, cross_attention_config={"context_size": 24}
    )


@torch.no_grad()
def test_tokens_and_files(tmp_path):
    """A cache or a report that still counts the tower's tokens; latents that a file loses."""
    model = make(qk_norm=True)
    assert tokens_per_image(model) == 3
    cache = model.encode_images(pixel_values=pixels(2, 2))
    assert cache.cross_attention_cache.layers[0].keys.shape[2] == 2 * 3
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path).eval()
    assert again.config.perceiver_config.num_latents == 3
    expected = model(token_ids(), pixel_values=pixels()).logits
    assert torch.allclose(again(token_ids(), pixel_values=pixels()).logits, expected, atol=1e-5)


def test_every_part_learns():
    """Latents or projections without a gradient."""
    model = make(qk_norm=True).train()
    model(token_ids(), pixel_values=pixels(), labels=token_ids()).loss.backward()
    assert all(parameter.grad.abs().max() > 0 for parameter in model.model.connector.parameters())


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"perceiver_config": PERCEIVER | {"num_latents": 0}}, "(?s)'num_latents'.*got 0"),
        ({"perceiver_config": PERCEIVER | {"norm_eps": 0.0}}, "(?s)'norm_eps'.*positive.*got 0.0"),
        ({"perceiver_config": PERCEIVER | {"hidden_size": 25}}, r"\(25\) must be the vision tower's width \(24\)"),
        ({"perceiver_config": PERCEIVER, "connector_type": "mlp"}, "`connector_type='perceiver'`, got 'mlp'"),
        ({"vision_config": None}, "needs a `vision_config`"),
        ({"cross_attention_config": {"context_size": 32}}, "context_size` to be the vision tower's width .* got 32"),
    ],
)
def test_wrong_fields_are_refused(fields, message):
    """A resampler of other sizes than its neighbours."""
    options = {
        "text_config": make_text().config,
        "vision_config": vision_config(),
        "connector_type": "perceiver",
        "cross_attention_config": {"context_size": 24},
    }
    with pytest.raises((ValueError, StrictDataclassError), match=message):
        XAttnConfig(**options | fields)


def test_default_sizes_follow_the_tower():
    """Sizes that do not follow the tower."""
    config = XAttnConfig(
        text_config=make_text().config,
        vision_config=vision_config(),
        connector_type="perceiver",
        cross_attention_config={"context_size": 24},
    )
    assert config.perceiver_config.hidden_size == 24 and config.perceiver_config.intermediate_size == 96
    assert PerceiverConfig().num_latents == 64
