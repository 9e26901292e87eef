"""What is not served on vLLM is refused by name. These tests need no vLLM."""

import pytest
import torch

from helpers.models.own_parts import TURNING
from helpers.models.tiny_architectures import tiny_config
from helpers.models.tiny_models import make_text, vision_config
from hf_xattn import CrossAttentionConfig, XAttnConfig
from hf_xattn.cache.text_progress import count_markers
from hf_xattn.cache.visibility import image_order, visible_images
from hf_xattn.utils.config_checks import own_fields
from hf_xattn.vllm_plugin import served
from hf_xattn.vllm_plugin.served import DECODERS, FIELDS, check_served, last_seen, why_not_served


def config(**given):
    given = {"text_config": make_text("llama").config, "vision_config": vision_config(), **given}
    return XAttnConfig(**given)


def test_every_field_is_in_a_table():
    """An option that was added later, and that the engine silently ignores."""
    for config_class, table in FIELDS:
        assert set(own_fields(config_class)) == set(table), config_class.__name__


def test_an_unknown_option_is_refused(monkeypatch):
    """As above, in a version whose tables were forgotten."""
    (block, known), *others = FIELDS
    monkeypatch.setattr(served, "FIELDS", ((block, known - {"quiet_softmax"}), *others))
    assert why_not_served(config()) is None
    with pytest.raises(ValueError, match="quiet_softmax=True"):
        check_served(config(cross_attention_config={"quiet_softmax": True}))


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
def test_last_seen(rule):
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
