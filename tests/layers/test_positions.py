"""Codes of positions: what the attention gives them, and what it makes of what they return."""

import pytest
import torch
from torch import nn

from helpers.models import own_parts
from helpers.models.marked_models import fresh_cache
from helpers.models.tiny_models import make_model, pixels, token_ids
from hf_xattn import (
    CrossAttentionConfig,
    GatedCrossAttentionBlock,
    XAttnForConditionalGeneration,
    register_position,
)
from hf_xattn.layers.attention import GatedCrossAttention
from hf_xattn.layers.positions import SCORE_PARTS, ScorePart
from hf_xattn.utils.parts import POSITIONS
from hf_xattn.utils.transformers_api import CACHE


def turning_model(**block):
    return make_model(cross_attention_config={"position": own_parts.TURNING, **block}).double()


def turned(states, places, frequencies):
    """Pairs of channels as complex numbers, each turned by its own angle. `states`: `(heads, tokens, D)`."""
    complex_states = torch.complex(*states.chunk(2, dim=-1))
    complex_states = complex_states * torch.polar(torch.ones(()).double(), places[:, None] * frequencies)
    return torch.cat([complex_states.real, complex_states.imag], dim=-1)


@torch.no_grad()
@pytest.mark.parametrize("qk_norm", [False, True], ids=["", "qk_norm"])
@pytest.mark.parametrize("quiet", [False, True], ids=["", "quiet"])
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_against_the_formula(qk_norm, quiet, implementation):
    """Positions of keys on queries, in front of the norm or of its weight, which is moved to the queries elsewhere."""
    config = CrossAttentionConfig(
        hidden_size=16,
        context_size=12,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=6,
        qk_norm=qk_norm,
        quiet_softmax=quiet,
        position=own_parts.TURNING,
        position_options={"rate": 0.75},
        attn_implementation=implementation,
    )
    torch.manual_seed(0)
    layer = GatedCrossAttention(config).double().eval()
    for weight in layer.parameters():
        weight.normal_()
    text, image = torch.randn(3, 16).double(), torch.randn(5, 12).double()

    def heads(projection, states, norm):
        split = projection(states).unflatten(-1, (-1, 6)).transpose(0, 1)
        if norm is None:
            return split
        return split / (split.square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm.weight

    frequencies = layer.position.frequencies
    query = turned(heads(layer.q_proj, text, layer.q_norm), 2 * torch.arange(3), frequencies)
    key = turned(heads(layer.k_proj, image, layer.k_norm), torch.arange(5), frequencies).repeat_interleave(2, 0)
    value = heads(layer.v_proj, image, None).repeat_interleave(2, 0)
    scores = (query @ key.transpose(1, 2) / 6**0.5).exp()
    expected = scores @ value / (scores.sum(-1, keepdim=True) + quiet)
    found, _ = layer(text[None], image[None])
    # The eager attention of transformers computes its softmax in float32.
    assert torch.allclose(found[0], layer.o_proj(expected.transpose(0, 1).flatten(1)), atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_places_of_tokens_start_again_at_each_image():
    """Keys that depend on what stands beside the image: stored, cached and shared ones would be others."""
    model, images = turning_model(), pixels(1, 3).double()
    together = model.encode_images(images).cross_attention_cache
    for index in range(3):
        alone = model.encode_images(images[:, index]).cross_attention_cache
        for joined, own in zip(together.layers, alone.layers):
            assert torch.allclose(joined.keys[:, :, 16 * index : 16 * index + 16], own.keys, atol=1e-12)
    by_token = together.layers[0].keys[0, 0].unflatten(0, (3, 16))
    assert not torch.allclose(by_token[0], by_token[1])


@torch.no_grad()
def test_images_that_come_later():
    model, images, ids = turning_model(), pixels(2, 3).double(), token_ids(2, 9)
    at_once, cache = model(ids[:, 4:], pixel_values=images, use_cache=False).logits, fresh_cache()
    model.encode_images(images[:, :1], cache=cache)
    model.encode_images(images[:, 1:], cache=cache)
    steps = [model(ids[:, index : index + 1], cache=cache).logits for index in range(4, 9)]
    assert torch.allclose(torch.cat(steps, dim=1), at_once, atol=1e-10)


@torch.no_grad()
def test_text_is_counted():
    """Queries that all stand at the same place in decode steps."""
    model, ids = turning_model(), token_ids(1, 6)
    images = pixels(1).double()
    expected = model(ids, pixel_values=images, use_cache=False).logits
    moved = model(ids, pixel_values=images, position_ids=torch.arange(6)[None] + 3, use_cache=False).logits
    cache = model(ids[:, :3], pixel_values=images, use_cache=True)[CACHE]
    steps = [model(ids[:, index : index + 1], cache=cache).logits for index in range(3, 6)]
    assert torch.allclose(torch.cat(steps, dim=1), expected[:, 3:], atol=1e-10)
    assert not torch.allclose(moved, expected, atol=1e-3), "`position_ids` are the places"


class Hiding(nn.Module):
    """Adds so much to the scores of image tokens behind a text token that they are hidden."""

    def forward(self, behind):
        return -1e9 * behind.double()[..., None].expand(-1, -1, -1, 4)


@torch.no_grad()
@pytest.mark.parametrize("position_bias", [False, True], ids=["", "position_bias"])
def test_a_part_that_adds_to_the_scores(monkeypatch, position_bias):
    """Two parts of which one is left out, other distances than in decode steps, or a code that a part replaces."""
    model, images, ids = turning_model(position_bias=position_bias, quiet_softmax=True), pixels(2).double(), token_ids()
    behind = torch.arange(16) > torch.arange(ids.shape[1])[:, None]
    expected = model(ids, pixel_values=images, cross_attention_mask=~behind.expand(2, -1, -1)).logits
    part = ScorePart(lambda config: Hiding(), lambda config, distance: distance > 0)
    monkeypatch.setitem(SCORE_PARTS, "hiding", part)
    adding = turning_model(position_bias=position_bias, quiet_softmax=True)
    adding.load_state_dict(model.state_dict())
    assert torch.allclose(adding(ids, pixel_values=images).logits, expected, atol=1e-10)
    cache = adding.encode_images(images)
    steps = [adding(ids[:, index : index + 1], cache=cache).logits for index in range(ids.shape[1])]
    assert torch.allclose(torch.cat(steps, dim=1), expected, atol=1e-10)


class Table(nn.Module):
    """Learned places, in float32 in a model of any dtype; with a buffer."""

    def __init__(self, config):
        super().__init__()
        self.table = nn.Parameter(torch.linspace(-1, 1, 32 * config.head_dim).view(32, -1).float())
        self.register_buffer("scale", torch.full((), 0.5), persistent=False)

    def forward(self, states, places, of):
        places = nn.functional.embedding(places, self.table)[..., None, :]  # refuses a place below 0
        return states + self.scale * places if of == "keys" else states * places.cos()


@pytest.fixture
def table():
    register_position("table", Table)
    yield {"cross_attention_config": {"position": "table", "qk_norm": True, "context_norm": True}}
    POSITIONS._makers.pop("table")


@torch.no_grad()
def test_padding_in_front_of_a_text_has_a_place(table):
    """A place below 0, which no table has."""
    model, ids = make_model(**table), token_ids(2, 6)
    mask = torch.tensor([[1] * 6, [0, 0, 1, 1, 1, 1]])
    logits = model(ids, attention_mask=mask, pixel_values=pixels()).logits
    alone = model(ids[1:, 2:], pixel_values=pixels()[1:]).logits
    assert torch.allclose(logits[1, 2:], alone[0], atol=1e-4)


@torch.no_grad()
def test_weights_that_wait_on_the_cpu(table, tmp_path):
    """Weights that accelerate brings when their module is called, and not when a method of it is."""
    model = make_model(**table)
    expected = model(token_ids(), pixel_values=pixels()).logits
    model.save_pretrained(tmp_path / "model")
    loaded = XAttnForConditionalGeneration.from_pretrained(
        tmp_path / "model", device_map="auto", max_memory={"cpu": "120KB"}, offload_folder=tmp_path / "offloaded"
    )
    assert "disk" in loaded.hf_device_map.values()
    assert torch.allclose(loaded(token_ids(), pixel_values=pixels()).logits, expected, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("changed", ["frequencies", "k_norm", "context_norm", "options"])
def test_identity_of_encoded_images(changed):
    """A file or a store of keys that were turned in another way, which counts as this model's."""
    block = {"qk_norm": True, "context_norm": True}
    model = turning_model(**block, position_options={"rate": 0.5})
    attention, before = model.base_model.blocks[0].attn, model.base_model.image_identity()
    assert before == turning_model(**block, position_options={"rate": 0.5}).base_model.image_identity()
    if changed == "options":
        other = turning_model(**block, position_options={"rate": 0.75})
        other.load_state_dict(model.state_dict())
        model = other
    else:
        weight = attention.position.frequencies if changed == "frequencies" else getattr(attention, changed).weight
        weight += 0.25
    assert model.base_model.image_identity() != before


def test_what_cannot_be_registered_or_returned():
    class Half(nn.Module):
        def __init__(self, config):
            super().__init__()

        def forward(self, states, places, of):
            return states[..., :2]

    with pytest.raises(ValueError, match=r"`position` to name a position: 'none', .*register_position\('rotary'"):
        CrossAttentionConfig(position="rotary")
    try:
        register_position("half", Half)
        block = GatedCrossAttentionBlock(CrossAttentionConfig(hidden_size=16, num_attention_heads=4, position="half"))
        with pytest.raises(ValueError, match=r"the position Half to return keys .* \(2, 3, 4, 4\), got"):
            block(torch.randn(2, 5, 16), torch.randn(2, 3, 16))
    finally:
        POSITIONS._makers.pop("half", None)
