"""Connectors and gates of one's own: registered, chosen by name, trained, saved and loaded like ours."""

import copy

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from torch.torch_version import TorchVersion
from transformers import AutoModel, AutoModelForImageTextToText

from helpers.models.own_parts import OWN, PoolingConnector, ScaleGate, SigmoidGate
from helpers.models.tiny_models import make_model, make_text, pixels, randomize, token_ids, vision_config
from hf_xattn import (
    CrossAttentionConfig,
    GatedCrossAttentionBlock,
    register_connector,
    register_gate,
    retrofit,
)
from hf_xattn.checks import awake_blocks
from hf_xattn.utils.parts import CONNECTORS, GATES


@pytest.fixture
def forgotten(monkeypatch):
    """Forgets parts: as in a process that has not registered them."""

    def forget(parts, name):
        monkeypatch.setattr(parts, "_makers", {each: made for each, made in parts._makers.items() if each != name})

    return forget


def own_model(**fields):
    return make_model(**copy.deepcopy(OWN | fields))


def blocks_of(model):
    return model.base_model.blocks


def test_a_fresh_model_is_its_base():
    """A constructor's values that transformers writes over, or an update that is not zero at the start."""
    text = make_text()
    ids = token_ids()
    with torch.no_grad():
        expected = text(ids).logits
        model = retrofit(
            text,
            AutoModel.from_config(vision_config()),
            every=2,
            connector_type="pooling",
            connector_options={"pool": 4},
            cross_attention={"gate": "offset_sigmoid", "gate_options": {"offset": 3.0}},
        ).eval()
        assert torch.equal(model(ids, pixel_values=pixels()).logits, expected)
    connector = model.model.connector.layers[0]
    assert type(connector) is PoolingConnector and connector.pool == 4
    assert bool((connector.scale == 1.5).all()) and bool((connector.conv.bias == 0.25).all())
    for block in blocks_of(model):
        assert type(block.attn_gate) is SigmoidGate and block.attn_gate.offset == 3.0
        assert bool((block.mlp_gate.up.weight == 0.125).all())
        assert block.attn_gate is not block.mlp_gate


@torch.no_grad()
def test_a_registered_gate_computes_its_formula():
    """Inputs of a gate that are swapped, a gate that is left out, or one for both branches."""
    config = CrossAttentionConfig(hidden_size=16, num_attention_heads=2, gate="offset_sigmoid", zero_init=False)
    torch.manual_seed(0)
    block = GatedCrossAttentionBlock(config).eval()
    for weight in block.parameters():
        weight.normal_()
    text, image = torch.randn(2, 3, 16), torch.randn(2, 5, 16)

    def by(gate, update, hidden):
        inner = torch.relu((update + hidden) @ gate.down.weight.T) @ gate.up.weight.T
        return torch.sigmoid(inner - 4) * update

    attended, _ = block.attn(block.attn_norm(text), image)
    seen = text + by(block.attn_gate, attended, text)
    expected = seen + by(block.mlp_gate, block.mlp(block.mlp_norm(seen)), seen)
    assert torch.allclose(block(text, image), expected, atol=1e-6)


@torch.no_grad()
def test_image_tokens_are_the_connector_s():
    model = own_model()
    encoded = model.get_image_features(pixels()).pooler_output
    tower = model.model.vision_tower(pixels()[:, 0]).last_hidden_state
    assert encoded.shape[-2:] == (4, 32) and torch.allclose(
        encoded.reshape(2, 4, 32), model.model.connector.layers[0](tower)
    )


@pytest.mark.parametrize("small", [False, True], ids=["whole", "adapter_only"])
@torch.no_grad()
def test_registered_parts_survive_saving(tmp_path, small):
    """Weights that get lost, options that are dropped, a buffer that no checkpoint holds and is empty memory."""
    bases = {}
    if small:
        make_text().save_pretrained(tmp_path / "text")
        AutoModel.from_config(vision_config()).save_pretrained(tmp_path / "vision")
        options = {"connector_type": "pooling", "connector_options": {"pool": 4}}
        options["cross_attention"] = OWN["cross_attention_config"]
        model = randomize(retrofit(tmp_path / "text", tmp_path / "vision", every=2, **copy.deepcopy(options)).eval())
        bases = {"adapter_only": True}
    else:
        model = own_model()
    expected = model(token_ids(), pixel_values=pixels()).logits
    model.save_pretrained(tmp_path / "saved", **bases)
    loaded = AutoModelForImageTextToText.from_pretrained(tmp_path / "saved")
    assert torch.equal(loaded(token_ids(), pixel_values=pixels()).logits, expected)
    assert torch.equal(loaded.model.connector.layers[0].shift, torch.arange(24) / 100)
    assert loaded.config.connector_options == {"pool": 4}
    assert loaded.config.cross_attention_config.gate_options == {"offset": 3.0}


def test_generate_with_cached_images():
    model = own_model()
    options = {"pixel_values": pixels(), "max_new_tokens": 6, "do_sample": False}
    cached = model.generate(token_ids(), **options)
    assert torch.equal(cached, model.generate(token_ids(), use_cache=False, **options))


def test_text_without_images_is_left_alone():
    """A gate that adds to text which sees nothing, in a batch with text that sees something."""
    model = own_model()
    ids = token_ids()
    with torch.no_grad():
        mixed = model(ids, pixel_values=pixels(), image_mask=torch.tensor([[True], [False]])).logits
        assert torch.equal(mixed[1], model(ids).logits[1]) and not torch.equal(mixed[0], model(ids).logits[0])


def test_every_weight_learns():
    model = own_model().train()
    ids = token_ids()
    model(ids, pixel_values=pixels(), labels=ids).loss.backward()
    parts = [model.model.connector, *(gate for block in blocks_of(model) for gate in (block.attn_gate, block.mlp_gate))]
    for part in parts:
        for name, weight in part.named_parameters():
            assert weight.grad is not None and bool(weight.grad.any()), name


def test_a_gate_stays_float32_in_a_model_of_half_precision(tmp_path):
    """Weights that round small updates to zero, or a product of two dtypes that torch refuses."""
    model = own_model(dtype=torch.bfloat16)
    model.save_pretrained(tmp_path)
    for each in (model, AutoModelForImageTextToText.from_pretrained(tmp_path, dtype=torch.bfloat16)):
        assert {weight.dtype for weight in blocks_of(each)[0].attn_gate.parameters()} == {torch.float32}
        logits = each(token_ids(), pixel_values=pixels().bfloat16()).logits
        assert logits.dtype == torch.bfloat16 and bool(logits.isfinite().all())


def test_missing_weights_get_the_constructor_s_values(tmp_path):
    """Empty memory where a checkpoint lacks weights of a part that transformers' `_init_weights` does not know."""
    model = own_model()
    lacking = {
        name: value for name, value in model.state_dict().items() if "connector" not in name and "_gate.up" not in name
    }
    model.save_pretrained(tmp_path, state_dict=lacking)
    with pytest.raises(ValueError, match="not complete"):
        AutoModelForImageTextToText.from_pretrained(tmp_path)
    loaded = AutoModelForImageTextToText.from_pretrained(tmp_path, allow_missing_weights=True)
    connector = loaded.model.connector.layers[0]
    assert bool((connector.scale == 1.5).all()) and bool((connector.conv.bias == 0.25).all())
    gates = blocks_of(loaded)[0].attn_gate, blocks_of(model)[0].attn_gate
    assert bool((gates[0].up.weight == 0.125).all()) and torch.equal(gates[0].down.weight, gates[1].down.weight)


def test_names_that_are_not_registered(tmp_path, forgotten):
    """A misspelt name, and a folder in a process that has not registered its parts."""
    with pytest.raises(ValueError, match=r"`gate` to name a gate: .*'tanh'.*got 'tahn'"):
        CrossAttentionConfig(gate="tahn")
    with pytest.raises(ValueError, match=r"`connector_type` to name a connector: .*'mlp'.*got 'mpl'"):
        retrofit(make_text(), AutoModel.from_config(vision_config()), connector_type="mpl")
    own_model().save_pretrained(tmp_path)
    for parts, name in ((CONNECTORS, "pooling"), (GATES, "offset_sigmoid")):
        known = parts._makers
        forgotten(parts, name)
        with pytest.raises(ValueError, match=rf"hf_xattn\.register_{parts.kind}\('{name}', ITS_CLASS\)"):
            AutoModelForImageTextToText.from_pretrained(tmp_path)
        parts._makers = known


def test_what_cannot_be_registered():
    for name in ("tanh", "offset_sigmoid"):
        with pytest.raises(ValueError, match=f"new `name` for a gate, got '{name}'"):
            register_gate(name, ScaleGate)
    register_gate("offset_sigmoid", SigmoidGate)  # a cell of a notebook that runs twice
    try:
        register_gate("offset_sigmoid", ScaleGate, exist_ok=True)
        assert GATES.maker("offset_sigmoid") is ScaleGate
    finally:
        register_gate("offset_sigmoid", SigmoidGate, exist_ok=True)


def test_options_of_a_part_that_takes_none_are_refused():
    with pytest.raises(ValueError, match="`gate_options` are for a gate of your own, got {'offset': 1} with 'tanh'"):
        CrossAttentionConfig(gate_options={"offset": 1})
    with pytest.raises(StrictDataclassError, match="'gate_options' with value 3"):
        CrossAttentionConfig(gate="offset_sigmoid", gate_options=3)


def test_both_factors_at_zero():
    """A branch that would never learn."""
    with pytest.raises(ValueError, match="starts at zero .`gate='scale'`.*together with `zero_init=True`"):
        CrossAttentionConfig(gate="scale")
    assert CrossAttentionConfig(gate="scale", zero_init=False).starts_at_identity
    assert not CrossAttentionConfig(gate="offset_sigmoid", zero_init=False).starts_at_identity


def test_outputs_of_a_wrong_shape():
    class Wrong(nn.Module):
        def __init__(self, config):
            super().__init__()

        def forward(self, features, hidden_states=None):
            return features[..., :5]

    try:
        register_connector("wrong", Wrong)
        register_gate("wrong", Wrong)
        model = make_model(connector_type="wrong")
        with pytest.raises(
            ValueError, match=r"connector 'wrong' to return .* each of width 32 .* got shape \(2, 16, 5\)"
        ):
            model(token_ids(), pixel_values=pixels())
        model = make_model(cross_attention_config={"gate": "wrong"})
        with pytest.raises(ValueError, match=r"gate Wrong to return .* \(2, 7, 32\), got \(2, 7, 5\)"):
            model(token_ids(), pixel_values=pixels())
    finally:
        for parts in (CONNECTORS, GATES):
            parts._makers.pop("wrong", None)


@pytest.mark.parametrize(
    "fields", [{"gate": "offset_sigmoid"}, {"gate": "scale", "zero_init": False}], ids=["full", "zero"]
)
@torch.no_grad()
def test_check_wakes_the_gate(fields):
    """A fresh model whose caches are compared while an own gate lets images change nothing, or that stays changed."""
    model = make_model(connector_type="pooling", random=False, cross_attention_config=dict(fields)).eval()
    images = {"pixel_values": pixels()}
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    with awake_blocks(model) as awake:
        assert awake and not torch.equal(model(token_ids(), **images).logits, model(token_ids()).logits)
    assert all(torch.equal(before[name], weight) for name, weight in model.state_dict().items())
    with awake_blocks(randomize(model)) as awake:
        assert not awake


def test_the_card_says_what_to_register(tmp_path):
    own_model().save_pretrained(tmp_path)
    card = (tmp_path / "README.md").read_text()
    assert "# first: hf_xattn.register_connector('pooling', ...)" in card
    assert "# first: hf_xattn.register_gate('offset_sigmoid', ...)" in card


@pytest.mark.skipif(TorchVersion(torch.__version__) < "2.9", reason="torch before 2.9 breaks the graph")
@torch.no_grad()
def test_registered_parts_compile():
    """Parts of one's own at which compiled code breaks its graph."""
    model = own_model()
    expected = model(token_ids(), pixel_values=pixels()).logits
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert torch.allclose(compiled(token_ids(), pixel_values=pixels()).logits, expected, atol=1e-5)


def test_a_part_is_made_once():
    """A constructor that runs again for each of its layers, such as one that reads a large file."""
    made = []

    class Counted(PoolingConnector):
        def __init__(self, config):
            made.append(1)
            super().__init__(config)

    try:
        register_connector("counted", Counted)
        retrofit(make_text(), AutoModel.from_config(vision_config()), connector_type="counted")
    finally:
        CONNECTORS._makers.pop("counted", None)
    assert len(made) == 1
