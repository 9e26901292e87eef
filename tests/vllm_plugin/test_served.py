"""What is not served on vLLM is refused by name. These tests need no vLLM."""

import pytest
import torch

from helpers.models.own_parts import TURNING
from helpers.models.tiny_architectures import tiny_config
from helpers.models.tiny_models import make_text, vision_config
from hf_xattn import CrossAttentionConfig, XAttnConfig
from hf_xattn.cache.text_progress import count_markers
from hf_xattn.cache.visibility import image_order, visible_images
from hf_xattn.configuration_xattn import PerceiverConfig
from hf_xattn.utils.config_checks import own_fields
from hf_xattn.vllm_plugin.served import DECODERS, check_served, last_seen


# The fields whose every value is served, but for what `check_served` names.
FIELDS = (
    (
        CrossAttentionConfig,
        frozenset(
            """
            hidden_size num_attention_heads context_size num_key_value_heads head_dim intermediate_size qk_norm_eps
            hidden_act mlp_type norm_type norm_eps attention_bias mlp_bias attention_dropout gate gate_options
            gate_granularity gate_init zero_init qk_norm context_norm quiet_softmax initializer_range position_bias
            position_bias_num_buckets position_bias_max_distance position position_options
            """.split()
        ),
    ),
    (
        PerceiverConfig,
        frozenset(
            """
            hidden_size intermediate_size num_latents num_image_positions num_hidden_layers num_attention_heads head_dim
            hidden_act qk_norm norm_eps
            """.split()
        ),
    ),
    (
        XAttnConfig,
        frozenset(
            """
            text_config vision_config cross_attention_config cross_attention_layers perceiver_config image_token_id
            image_visibility additional_vocab_size additional_vocab_in_head additional_vocab_scaled connector_type
            connector_options connector_hidden_act connector_bias vision_feature_select_strategy vision_feature_layer
            vision_hidden_size source_config
            """.split()
        ),
    ),
)


def config(**given):
    given = {"text_config": make_text("llama").config, "vision_config": vision_config(), **given}
    return XAttnConfig(**given)


def test_every_field_is_in_a_table():
    """An option that was added later, and that the engine silently ignores."""
    for config_class, table in FIELDS:
        assert set(own_fields(config_class)) == set(table), config_class.__name__


@pytest.mark.parametrize(
    "given, named",
    [
        ({"cross_attention_config": {"position_bias": True}}, "position_bias=True"),
        ({"cross_attention_config": {"context_norm": True}}, "context_norm=True"),
        ({"cross_attention_config": {"position": TURNING}}, "`position='turning'`, a position of your own"),
        ({"vision_config": None}, "vision_config=None"),
        ({"text_config": make_text("gpt_neox").config}, "'gpt_neox'"),
    ],
)
def test_refused_by_name(given, named):
    """A model that loads, and answers wrongly."""
    with pytest.raises(ValueError, match=named):
        check_served(config(**given))


def test_a_block_alone_is_no_model():
    with pytest.raises(ValueError, match="CrossAttentionConfig"):
        check_served(CrossAttentionConfig())


def test_decoders_are_named_once():
    assert list(DECODERS) == sorted(DECODERS)


@pytest.mark.parametrize("rule", ["all", "previous", "latest", "latest_group"])
def test_the_engine_keeps_the_images_that_later_text_sees(rule):
    """The engine keeps other images than those that the text after the prompt sees."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        markers = torch.rand(12, generator=generator) < 0.5
        found = int(markers.sum())
        for count in range(1, found + 1):
            order = image_order(torch.ones(1, count, dtype=torch.bool))
            total = torch.full((1, 1), count)
            _, seen, before, _ = count_markers(None, markers[None], total)
            sees = visible_images(order, seen, before, rule)[0, -1]
            assert last_seen(rule, markers.tolist(), count) == int(sees.sum())
            assert bool(sees[count - int(sees.sum()) :].all())  # they are the last ones


def test_too_few_markers():
    with pytest.raises(ValueError, match="1 markers and 2 images"):
        last_seen("previous", [False, True], 2)


def test_added_tokens_of_a_scaled_embedding():
    """Added rows that the engine scales, and transformers does not."""
    fields = {"image_token_id": 96, "image_visibility": "latest"}
    for name in ("gemma2", "gemma3_text", "llama"):
        config = XAttnConfig(
            text_config=tiny_config(name), vision_config=vision_config(), additional_vocab_size=2, **fields
        )
        check_served(config)
        config.additional_vocab_scaled = False
        if name == "llama":
            check_served(config)
            continue
        with pytest.raises(ValueError, match=f"`additional_vocab_scaled=False` with the decoder '{name}'"):
            check_served(config)
