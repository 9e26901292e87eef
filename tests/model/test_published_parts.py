"""Parts of published designs in `examples/own_parts/published_parts.py`, against their formulas."""

import importlib.util
import sys

import pytest
import torch
from transformers import AutoModel, AutoModelForImageTextToText, Qwen3VLTextConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding, apply_rotary_pos_emb

from helpers.checkout import ROOT
from helpers.models.tiny_models import make_model, make_text, pixels, randomize, token_ids, vision_config
from hf_xattn import CrossAttentionConfig, retrofit
from hf_xattn.utils.parts import CONNECTORS, GATES, POSITIONS


FILE = ROOT / "examples" / "own_parts" / "published_parts.py"
GRID = [4, 4]


@pytest.fixture
def parts(monkeypatch):
    spec = importlib.util.spec_from_file_location("published_parts", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    yield module
    CONNECTORS._makers.pop("deepstack")
    POSITIONS._makers.pop("grid_rotary")
    GATES._makers.pop("moshivis")


@pytest.mark.parametrize("of_rows", [4, 3])
def test_rotary_code_in_three_axes(parts, of_rows):
    """Other axes or frequencies than those of transformers' interleaved code of Qwen3-VL, which MOSS-VL takes over."""
    width = 24  # twelve pairs of channels
    position = parts.GridRotary(
        CrossAttentionConfig(
            hidden_size=48,
            num_attention_heads=2,
            head_dim=width,
            position="grid_rotary",
            position_options={"grid": [2, 3], "of_rows": of_rows},
        )
    )
    theirs = Qwen3VLTextRotaryEmbedding(
        Qwen3VLTextConfig(
            hidden_size=48,
            num_attention_heads=2,
            head_dim=width,
            rope_parameters={
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [12 - 2 * of_rows, of_rows, of_rows],
            },
        )
    )
    query, key = torch.randn(1, 5, 2, width), torch.randn(1, 12, 2, width)

    def by_transformers(states, axes):
        cos, sin = theirs(states, axes[:, None])
        return apply_rotary_pos_emb(states, states, cos, sin, unsqueeze_dim=2)[0]

    of_text = torch.arange(3, 8).expand(3, -1)
    of_image = torch.tensor([[*[0] * 6, *[1] * 6], [0, 0, 0, 1, 1, 1] * 2, [0, 1, 2] * 4])
    assert torch.allclose(position(query, of_text[:1], "queries"), by_transformers(query, of_text), atol=1e-5)
    assert torch.allclose(position(key, torch.arange(12)[None], "keys"), by_transformers(key, of_image), atol=1e-5)


def test_the_gate_computes_its_formula(parts):
    gate = parts.MoshiVisGate(CrossAttentionConfig(hidden_size=16, num_attention_heads=2, gate="moshivis"))
    update, text = torch.randn(2, 3, 16), torch.randn(2, 3, 16)
    down, up = gate.mlp[0].weight, gate.mlp[2].weight
    expected = update / (1 + torch.exp(4 - (update @ down.T).clamp(min=0) @ up.T))
    assert torch.allclose(gate(update, text), expected, atol=1e-6)


@torch.no_grad()
def test_the_deepstack_merger_joins_levels_in_order(parts):
    """Levels or patches that are joined in another order, or norms of other levels."""
    options = {"connector_type": "deepstack", "connector_options": {"grid": GRID}, "vision_feature_layer": [1, -1]}
    model = make_model(**options)
    merger, images = model.model.connector.layers[0], pixels(1)
    states = model.model.vision_tower(pixel_values=images[:, 0], output_hidden_states=True).hidden_states
    expected = []
    for row in (0, 2):
        for column in (0, 2):
            patches = [4 * row + column, 4 * row + column + 1, 4 * row + column + 4, 4 * row + column + 5]
            joined = [norm(states[level][0, patch]) for patch in patches for norm, level in zip(merger.norms, (1, -1))]
            expected.append(merger.fc2(torch.nn.functional.gelu(merger.fc1(torch.cat(joined)))))
    found = model.get_image_features(images).pooler_output
    assert torch.allclose(found[0, 0], torch.stack(expected), atol=1e-5)


@torch.no_grad()
def test_both_in_a_model(parts, tmp_path):
    """A fresh model that is not its base; keys that are turned anew in later steps; options that a save loses."""
    text = make_text()
    block = {"gate": "moshivis", "position": "grid_rotary", "position_options": {"grid": GRID}, "mlp_type": "none"}
    model = retrofit(text, AutoModel.from_config(vision_config()), every=2, cross_attention=dict(block)).eval()
    assert torch.equal(model(token_ids(), pixel_values=pixels()).logits, make_text()(token_ids()).logits)
    randomize(model)
    expected = model(token_ids(), pixel_values=pixels()).logits
    options = {"pixel_values": pixels(), "max_new_tokens": 6, "do_sample": False}
    assert torch.equal(model.generate(token_ids(), **options), model.generate(token_ids(), use_cache=False, **options))
    model.save_pretrained(tmp_path, with_code=True)
    loaded = AutoModelForImageTextToText.from_pretrained(tmp_path)
    assert torch.equal(loaded(token_ids(), pixel_values=pixels()).logits, expected)
    assert (tmp_path / FILE.name).is_file() and loaded.config.cross_attention_config.position_options == {"grid": GRID}
    plain = make_model(cross_attention_config=block | {"position_options": {"grid": [2, 8]}})
    plain.load_state_dict(model.state_dict())
    assert not torch.allclose(plain(token_ids(), pixel_values=pixels()).logits, expected, atol=1e-3)
