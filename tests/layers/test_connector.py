"""The connector: how its weights start."""

from typing import Any

import pytest
import torch
from memory_checks import memory_of_nan
from tiny_models import make_model, make_text, vision_config
from transformers import AutoModel

from hf_xattn import retrofit
from hf_xattn.images.perceiver import PerceiverResampler


@pytest.mark.parametrize("kind", ["linear", "mlp", "perceiver"])
def test_initial_weights(kind):
    """Features that shrink or grow on their way to the blocks, because another module's initialisation fills the
    layers; a bias that adds noise; latents that are all alike.
    """
    perceiver = {"num_latents": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 16}
    options = {"perceiver_config": perceiver, "cross_attention_config": {"context_size": 24}}
    connector: Any = make_model(connector_type=kind, **(options if kind == "perceiver" else {})).model.connector
    connector.requires_grad_(False)
    linears = [module for module in connector.modules() if isinstance(module, torch.nn.Linear)]
    assert len(linears) == {"linear": 1, "mlp": 2, "perceiver": 6}[kind]
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


@pytest.mark.parametrize("kind", ["linear", "mlp", "perceiver"])
def test_every_weight_gets_a_value(kind):
    """Weights that stay as the memory was, because neither torch nor `_init_weights` writes them."""
    perceiver = {"num_latents": 4, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 16, "qk_norm": True}
    options = {"perceiver_config": perceiver} if kind == "perceiver" else {}
    text, vision = make_text(), AutoModel.from_config(vision_config())
    with memory_of_nan():
        connector = retrofit(text, vision, every=2, connector_type=kind, **options).model.connector
    assert not [name for name, weight in connector.named_parameters() if weight.isnan().any()]
