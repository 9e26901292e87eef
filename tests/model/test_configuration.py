"""Configurations: what they default to, what they refuse and with which words, and what survives saving."""

import logging

import pytest
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, LlamaConfig

from helpers.models import own_parts
from helpers.models.tiny_models import TEXT_CONFIGS, vision_config
from hf_xattn import CrossAttentionConfig, XAttnConfig
from hf_xattn.configuration_xattn import PerceiverConfig
from hf_xattn.utils import config_checks


def xattn_config(**fields) -> XAttnConfig:
    return XAttnConfig(text_config=TEXT_CONFIGS["llama"](), **fields)


def perceiver_config(**fields) -> XAttnConfig:
    block = {"context_size": 24}
    return xattn_config(
        vision_config=vision_config(), connector_type="perceiver", cross_attention_config=block, **fields
    )


DEFAULTS = {
    "hidden_size": 768,
    "context_size": 768,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "head_dim": 64,
    "intermediate_size": 3072,
    "hidden_act": "silu",
    "mlp_type": "gated",
    "norm_type": "rmsnorm",
    "norm_eps": 1e-6,
    "attention_bias": False,
    "mlp_bias": False,
    "attention_dropout": 0.0,
    "gate": "tanh",
    "gate_granularity": "scalar",
    "gate_init": 1.0,
    "zero_init": True,
    "qk_norm": False,
    "qk_norm_eps": 1e-6,
    "context_norm": False,
    "quiet_softmax": False,
    "position_bias": False,
    "position_bias_num_buckets": 32,
    "position_bias_max_distance": 128,
    "position": "none",
    "position_options": None,
    "initializer_range": 0.02,
}


@pytest.mark.parametrize("field", DEFAULTS)
def test_no_default_moves(field):
    """Rules out a default that moves unnoticed: checkpoints leave default fields out of their config.json."""
    assert getattr(CrossAttentionConfig(), field) == DEFAULTS[field]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("head_dim", value) for value in (0, -8, 2.5, True, "8")),
        *((field, 0) for field in ("hidden_size", "context_size", "num_attention_heads", "num_key_value_heads")),
        *((field, 0) for field in ("position_bias_num_buckets", "position_bias_max_distance", "norm_eps")),
        *((field, "other") for field in ("mlp_type", "norm_type", "gate_granularity", "zero_init", "gate_init")),
        ("attention_dropout", 1.0),
        ("attention_dropout", -0.1),
        ("qk_norm_eps", -1e-6),
        ("gate_init", float("nan")),
        ("initializer_range", -0.02),
    ],
)
def test_value_is_refused(field, value):
    """A size that fails layers later as an empty weight, a choice that falls through to some branch, or `"False"`,
    which is true.
    """
    with pytest.raises(StrictDataclassError, match=f"'{field}'") as error:
        CrossAttentionConfig(**{field: value})
    assert str(value) in str(error.value)
    config = CrossAttentionConfig()
    with pytest.raises(StrictDataclassError, match=f"'{field}'"):
        setattr(config, field, value)


def test_unknown_name_is_refused():
    """The name of a gate that nobody has registered."""
    with pytest.raises(ValueError, match="`gate`.*sigmoid"):
        CrossAttentionConfig(gate="sigmoid")


def test_a_block_without_an_mlp_has_no_biases_in_it():
    """A flag that is dropped."""
    with pytest.raises(ValueError, match="`mlp_bias=False` with `mlp_type='none'`.* got True"):
        CrossAttentionConfig(mlp_type="none", mlp_bias=True)


@pytest.mark.parametrize(
    "field, choices",
    [
        ("mlp_type", ["gated", "plain", "none"]),
        ("norm_type", ["rmsnorm", "layernorm"]),
        ("gate", ["tanh", "none"]),
        ("gate_granularity", ["scalar", "channel"]),
    ],
)
def test_refusal_names_the_choices(field, choices):
    """Rules out an error that says no without saying what would be right, and a choice that is refused itself."""
    with pytest.raises((ValueError, StrictDataclassError)) as error:
        CrossAttentionConfig(**{field: "other"})
    assert all(repr(choice) in str(error.value) for choice in choices)
    for choice in choices:
        assert getattr(CrossAttentionConfig(**{field: choice}), field) == choice


def test_heads_must_divide():
    """Rules out head counts that split a weight unevenly: a shape error in the first forward at best."""
    with pytest.raises(ValueError, match=r"`num_attention_heads` \(5\) does not divide `hidden_size` \(32\)"):
        CrossAttentionConfig(hidden_size=32, num_attention_heads=5)
    with pytest.raises(ValueError, match=r"`num_key_value_heads` \(3\) must divide `num_attention_heads` \(4\)"):
        CrossAttentionConfig(hidden_size=32, num_attention_heads=4, num_key_value_heads=3)
    with pytest.raises(ValueError, match=r"`num_key_value_heads` \(8\) must divide `num_attention_heads` \(4\)"):
        CrossAttentionConfig(hidden_size=32, num_attention_heads=4, num_key_value_heads=8)
    assert CrossAttentionConfig(hidden_size=32, num_attention_heads=5, head_dim=7).head_dim == 7


def test_position_bias_buckets():
    """Rules out bucket numbers that T5's formula divides by zero on; they do not matter without a position bias."""
    for buckets in (2, 7):
        with pytest.raises(ValueError, match=f"`position_bias_num_buckets`.*{buckets}"):
            CrossAttentionConfig(position_bias=True, position_bias_num_buckets=buckets)
    with pytest.raises(ValueError, match="`position_bias_max_distance` larger .*got 32 and 8"):
        CrossAttentionConfig(position_bias=True, position_bias_max_distance=8)
    CrossAttentionConfig(position_bias_num_buckets=7)
    CrossAttentionConfig(position_bias=True, position_bias_num_buckets=4, position_bias_max_distance=2)


def test_double_zero_is_refused():
    """Rules out gate and projection both zero: the gradient of each is the other's value, nothing would ever move."""
    for gate_init in (0, 0.0, -0.0):
        with pytest.raises(ValueError) as error:
            CrossAttentionConfig(gate_init=gate_init, zero_init=True)
        message = str(error.value)
        assert "`gate_init=0.0`" in message and "`zero_init=True`" in message and "gradient" in message
    with pytest.raises(ValueError, match="gradient"):
        xattn_config(cross_attention_config={"gate_init": 0.0})


@pytest.mark.parametrize(
    "fields, identity",
    [
        ({}, True),
        ({"zero_init": False, "gate_init": 0.0}, True),
        ({"gate": "none"}, True),
        ({"gate": "none", "gate_init": 0.0}, True),
        ({"zero_init": False}, False),
        ({"zero_init": False, "gate": "none", "gate_init": 0.0}, False),
    ],
)
def test_starts_at_identity(fields, identity):
    """Rules out a block that is announced as the identity and is none, or the other way round."""
    assert CrossAttentionConfig(**fields).starts_at_identity is identity


@pytest.mark.parametrize(
    ("make", "name", "nearest"),
    [
        (CrossAttentionConfig, "num_heads", "num_attention_heads"),
        (CrossAttentionConfig, "gate_inti", "gate_init"),
        (PerceiverConfig, "num_latent", "num_latents"),
        (xattn_config, "image_visibilty", "image_visibility"),
        (xattn_config, "vision_conifg", "vision_config"),
    ],
)
def test_misspelt_fields_are_refused(make, name, nearest):
    """A field that silently keeps its default, because its misspelt name became an attribute."""
    with pytest.raises(TypeError, match=f"has no field `{name}`. Did you mean `{nearest}`"):
        make(**{name: 3})
    # What transformers lets every configuration have.
    config = make(note="mine", num_labels=3, _name_or_path="here", use_cache=True, tie_word_embeddings=False)
    assert config.note == "mine" and config.num_labels == 3


@pytest.fixture
def warnings(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("hf_xattn"), "propagate", True)
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    config_checks.logger.warning_once.cache_clear()
    return caplog


@pytest.mark.parametrize("make", [CrossAttentionConfig, PerceiverConfig, xattn_config])
def test_unknown_fields_are_told(make, warnings, tmp_path):
    """An option of a newer version, or of another library, that is kept as an attribute and does nothing, without a
    word.
    """
    config = make(num_labels=3, _name_or_path="here", use_cache=True, dtype="float32", temperature=1.0)
    config.save_pretrained(tmp_path)
    type(config).from_pretrained(tmp_path)
    assert not warnings.records
    config = make(bogus=1)
    told = f"{type(config).__name__} has no field `bogus`. The attribute is kept"
    assert warnings.text.count(told) == 1
    warnings.clear()
    for name in ("bogus", f"new_{'gate_init' if make is CrossAttentionConfig else 'hidden_act'}"):
        config_checks.logger.warning_once.cache_clear()
        saved = {**config.to_dict(), name: 1}
        assert getattr(type(config).from_dict(saved), name) == 1
        assert f"{type(config).__name__} has no field `{name}`" in warnings.text


@pytest.mark.parametrize("part", ["cross_attention_config", "perceiver_config"])
def test_fields_of_a_dict(part):
    """A `dict` that a user wrote, with a name that is no field; one of a newer version's file, refused."""
    make = {"cross_attention_config": xattn_config, "perceiver_config": perceiver_config}[part]
    with pytest.raises(ValueError, match=r"has unknown fields \['bogus'\]"):
        make(**{part: {"bogus": 1}})
    saved = {**getattr(make(), part).to_dict(), "bogus": 1, "hidden_actt": 2}
    assert getattr(make(**{part: saved}), part).hidden_actt == 2


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"connector_bias": "no"}, "'connector_bias' expected bool, got str"),
        ({"vision_feature_select_strategy": "cls"}, "'vision_feature_select_strategy' expected one of.*got cls"),
        ({"image_visibility": "next"}, "'image_visibility' expected one of.*'latest'.*got next"),
        ({"image_token_id": "<image>"}, "'image_token_id' with value '<image>'"),
        ({"source_config": "mllama"}, "'source_config' with value 'mllama'"),
        ({"cross_attention_config": 3}, "'cross_attention_config' with value 3"),
        ({"cross_attention_config": {"num_attention_heads": 0}}, "'num_attention_heads'.*\n.*got 0"),
        ({"connector_hidden_act": ["gelu"]}, "'connector_hidden_act' expected str, got list"),
        ({"cross_attention_layers": "13"}, "'cross_attention_layers' with value '13'"),
        ({"cross_attention_layers": [1.0]}, "'cross_attention_layers' with value \\[1.0\\]"),
        ({"cross_attention_layers": [True]}, "'cross_attention_layers' with value \\[True\\]"),
    ],
    ids=str,
)
def test_types_are_refused(fields, message):
    """A wrong type that fails somewhere else, or nowhere."""
    with pytest.raises(StrictDataclassError, match=message):
        xattn_config(**fields)


def test_text_config_is_required():
    """Rules out a model around a decoder that nobody chose."""
    with pytest.raises(ValueError, match="`text_config`.*NoneType"):
        XAttnConfig()


@pytest.mark.parametrize(
    "layers, words",
    [
        ([1, 5], ["[5]", "4 layers", "0 to 3", "4 is a block after the last"]),
        ([-1], ["[-1]", "4 layers"]),
        ([], ["empty"]),
    ],
)
def test_layers_are_refused(layers, words):
    """Rules out a block that sits nowhere."""
    with pytest.raises(ValueError, match="`cross_attention_layers`") as error:
        xattn_config(cross_attention_layers=layers)
    assert all(word in str(error.value) for word in words)


def test_layers_are_resolved():
    """Rules out a config whose list of layers is unsorted or unknown until a model exists."""
    assert xattn_config().cross_attention_layers == [3]
    assert xattn_config(cross_attention_layers=(3, 0)).cross_attention_layers == [0, 3]
    assert xattn_config(cross_attention_layers=[4, 1, 4, 1]).cross_attention_layers == [1, 1, 4, 4]
    deep = XAttnConfig(text_config=LlamaConfig(num_hidden_layers=10, hidden_size=32, num_attention_heads=4))
    assert deep.cross_attention_layers == [3, 7]
    shallow = XAttnConfig(text_config=LlamaConfig(num_hidden_layers=2, hidden_size=32, num_attention_heads=4))
    assert shallow.cross_attention_layers == [1]


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"cross_attention_config": {"hidden_size": 48}}, ["hidden_size", "48", "32"]),
        ({"cross_attention_config": CrossAttentionConfig(hidden_size=48)}, ["hidden_size", "48", "32"]),
        ({"cross_attention_config": {"gates": "tanh"}}, ["gates", "gate_init"]),
        ({"connector_type": "conv"}, ["`connector_type`", "'conv'", "'mlp'"]),
        ({"image_visibility": "latest"}, ["'latest'", "`image_token_id`"]),
        ({"image_visibility": "previous"}, ["'previous'", "`image_token_id`"]),
        ({"image_token_id": 96}, ["`image_token_id`", "96"]),
        ({"image_token_id": -1}, ["`image_token_id`", "-1", "96"]),
    ],
)
def test_combination_is_refused(fields, words):
    """Rules out settings that contradict the decoder or one another and would fail in the first forward."""
    with pytest.raises(ValueError) as error:
        xattn_config(**fields)
    assert all(word in str(error.value) for word in words)


def test_identity_connector_needs_the_towers_width():
    """Rules out vision features that reach the key projection with a width it does not take."""
    with pytest.raises(ValueError, match=r"\(24\).*`connector_type='identity'`, got 32"):
        xattn_config(vision_config=vision_config(), connector_type="identity")
    xattn_config(vision_config=vision_config(), connector_type="identity", cross_attention_config={"context_size": 24})


def test_sizes_follow_the_decoder():
    """Rules out a block of default sizes in a decoder of other sizes."""
    block = xattn_config().cross_attention_config
    assert (block.hidden_size, block.num_attention_heads, block.num_key_value_heads) == (32, 4, 2)
    assert (block.head_dim, block.intermediate_size, block.context_size) == (8, 64, 32)
    block = xattn_config(cross_attention_config={"num_attention_heads": 2, "qk_norm": True}).cross_attention_config
    assert (block.num_attention_heads, block.num_key_value_heads, block.head_dim) == (2, 2, 16) and block.qk_norm


NON_DEFAULT = {
    "hidden_size": 32,
    "context_size": 20,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 6,
    "intermediate_size": 40,
    "hidden_act": "gelu",
    "mlp_type": "plain",
    "norm_type": "layernorm",
    "norm_eps": 1e-4,
    "attention_bias": True,
    "mlp_bias": True,
    "attention_dropout": 0.25,
    "gate": "tanh",
    "gate_granularity": "channel",
    "gate_init": 0.0,
    "zero_init": False,
    "qk_norm": True,
    "qk_norm_eps": 1e-3,
    "context_norm": True,
    "quiet_softmax": True,
    "position_bias": True,
    "position_bias_num_buckets": 8,
    "position_bias_max_distance": 16,
    "position": own_parts.TURNING,
    "position_options": {"rate": 0.5},
    "initializer_range": 0.1,
}


@pytest.mark.parametrize("fields", [NON_DEFAULT, {}])
def test_block_config_round_trip(tmp_path, fields):
    """Rules out a field that is dropped on the way through `to_dict` or a file."""
    config = CrossAttentionConfig(**fields)
    config.save_pretrained(tmp_path)
    for back in (CrossAttentionConfig.from_dict(config.to_dict()), AutoConfig.from_pretrained(tmp_path)):
        assert type(back) is CrossAttentionConfig
        for field in DEFAULTS:
            assert getattr(back, field) == getattr(config, field), field
    assert set(NON_DEFAULT) == set(DEFAULTS)


def test_a_saved_configuration_loads_equal(tmp_path):
    """Rules out a saved model that comes back with other blocks, layers or connector.

    https://github.com/huggingface/transformers/issues/36077
    """
    config = xattn_config(
        vision_config=vision_config(),
        cross_attention_config=NON_DEFAULT,
        cross_attention_layers=[0, 2],
        image_token_id=0,
        image_visibility="latest",
        connector_type="linear",
        connector_hidden_act="relu",
        connector_bias=False,
    )
    config.save_pretrained(tmp_path)
    for back in (XAttnConfig.from_dict(config.to_dict()), AutoConfig.from_pretrained(tmp_path)):
        assert type(back) is XAttnConfig
        for field in ("cross_attention_layers", "image_token_id", "image_visibility", "connector_type"):
            assert getattr(back, field) == getattr(config, field), field
        assert (back.connector_hidden_act, back.connector_bias) == ("relu", False)
        for field in NON_DEFAULT:
            assert getattr(back.cross_attention_config, field) == NON_DEFAULT[field], field
        assert type(back.text_config) is LlamaConfig and back.text_config.vocab_size == config.text_config.vocab_size
        assert back.vision_config.hidden_size == 24


@pytest.mark.parametrize("subfolder", ["", "inner"])
def test_what_is_read_back_equals_what_was_saved(tmp_path, subfolder):
    """The path of a folder that stays in the configuration, or a part that differs when it is read alone."""
    config = xattn_config(
        vision_config=vision_config(),
        perceiver_config={},
        connector_type="perceiver",
        cross_attention_config={"context_size": 24},
    )
    config.save_pretrained(tmp_path / subfolder)
    for part in (config, config.cross_attention_config, config.perceiver_config, config.text_config):
        options = {"subfolder": subfolder} if subfolder else {}
        back, unused = type(part).from_pretrained(tmp_path, return_unused_kwargs=True, **options)
        back, expected = back.to_dict(), part.to_dict()
        back.pop("transformers_version"), expected.pop("transformers_version")
        assert back == expected and not unused, type(part)
    assert XAttnConfig.from_pretrained(tmp_path / subfolder, name_or_path="given").name_or_path == "given"


def test_derived_sizes_survive_saving(tmp_path):
    """Rules out a block whose sizes equal class defaults, are left out of the file, and come back as the decoder's."""
    text = LlamaConfig(hidden_size=768, num_attention_heads=6, num_key_value_heads=2, intermediate_size=100)
    config = XAttnConfig(
        text_config=text, cross_attention_config={"num_attention_heads": 12, "intermediate_size": 3072}
    )
    config.save_pretrained(tmp_path)
    back = AutoConfig.from_pretrained(tmp_path).cross_attention_config
    for field in DEFAULTS:
        assert getattr(back, field) == getattr(config.cross_attention_config, field), field


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_live_text_config_keeps_its_kernels(implementation):
    """Rules out the outer config resetting a live config's attention to None, with which the causal mask vanishes."""
    text = TEXT_CONFIGS["mixtral"]()
    text._attn_implementation = implementation
    text._experts_implementation = "eager"
    config = XAttnConfig(text_config=text)
    assert config.text_config is text
    assert text._attn_implementation == implementation and text._experts_implementation == "eager"
    assert config._attn_implementation == implementation
    assert config.cross_attention_config._attn_implementation == implementation
