"""Sets of blocks and small checkpoints that answered otherwise than what was saved, without a word."""

import os
import shutil

import pytest
import torch
import transformers
from saved_models import make_base, make_vision
from tiny_models import make_text, pixels, randomize, token_ids
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    SiglipVisionModel,
    ViTConfig,
    ViTForImageClassification,
)

from hf_xattn import retrofit
from hf_xattn.importers import convert_checkpoint, export_checkpoint


IMAGES = {"pixel_values": pixels()}


@torch.no_grad()
def logits_of(model):
    return model(token_ids(), **IMAGES).logits


def loaded(folder):
    return AutoModelForImageTextToText.from_pretrained(folder).eval()


def small(model, folder, seed=2):
    randomize(model, seed).eval().save_pretrained(folder, adapter_only=True)
    return model


@pytest.fixture
def first(tmp_path):
    """A small checkpoint on two bases, loaded."""
    make_base(tmp_path / "text"), make_vision(tmp_path / "vision")
    small(retrofit(tmp_path / "text", tmp_path / "vision", every=2), tmp_path / "first", seed=1)
    return loaded(tmp_path / "first")


@pytest.mark.parametrize("change", ["fewer layers", "fewer layers, trained", "cut", "another norm"])
def test_settings_of_a_tower(change, first, tmp_path):
    """A tower with a layer more, or another epsilon, than the one that the set was trained with."""
    options = {"layer_norm_eps": 0.5} if change == "another norm" else {"num_hidden_layers": 1}
    tower = SiglipVisionModel.from_pretrained(tmp_path / "vision", **({} if change == "cut" else options))
    if change == "cut":
        layers = tower.get_submodule(next(name for name, _ in tower.named_modules() if name.endswith("layers")))
        del layers[1:]
        tower.config.num_hidden_layers = 1
    if change.endswith("trained"):
        next(tower.parameters()).data.mul_(1.5)
    model = small(retrofit(tmp_path / "text", tower, every=2), tmp_path / "second")
    expected = logits_of(model)
    assert torch.equal(logits_of(loaded(tmp_path / "second")), expected)
    mine = logits_of(first)
    first.load_cross_attention(tmp_path / "second", "second")
    assert torch.equal(logits_of(first), expected) and not torch.allclose(mine, expected)
    first.save_pretrained(tmp_path / "again", adapter_only=True)
    assert torch.equal(logits_of(loaded(tmp_path / "again")), expected)
    first.set_cross_attention("default")
    assert torch.equal(logits_of(first), mine)


@pytest.mark.parametrize(
    "options",
    [{"num_hidden_layers": 3}, {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}}],
    ids=str,
)
def test_settings_of_a_text_model(options, first, tmp_path, caplog):
    """Blocks that were trained on fewer layers, or on other positions."""
    transformers.logging.enable_propagation()
    text = AutoModelForCausalLM.from_pretrained(tmp_path / "text", **options)
    small(retrofit(text, tmp_path / "vision", layers=[1, 2]), tmp_path / "second")
    first.load_cross_attention(tmp_path / "second", "second")
    assert f"another `{next(iter(options))}` of the text model" in caplog.text
    caplog.clear()
    first.load_cross_attention(tmp_path / "first", "third")
    assert "of the text model" not in caplog.text


def test_sets_of_a_connector_without_weights(tmp_path):
    """A switch that ends half way, and a model that is saved with the settings of another set."""
    make_base(tmp_path / "text"), make_vision(tmp_path / "vision")
    made = {}
    for seed, (name, layer) in enumerate((("a", None), ("b", -2))):
        options = {"connector_type": "identity", "vision_feature_layer": layer}
        made[name] = small(retrofit(tmp_path / "text", tmp_path / "vision", every=2, **options), tmp_path / name, seed)
    model = loaded(tmp_path / "a")
    model.load_cross_attention(tmp_path / "b", "b")
    assert torch.equal(logits_of(model), logits_of(made["b"]))
    for name in (None, "default"):
        model.set_cross_attention(name)
    assert torch.equal(logits_of(model), logits_of(made["a"]))


def test_a_set_with_another_head(first, tmp_path):
    """Rows of a head that this model has not, as an AttributeError."""
    for name, in_head in (("one", True), ("other", False)):
        options = {"additional_vocab_size": 2, "additional_vocab_in_head": in_head}
        small(retrofit(tmp_path / "text", tmp_path / "vision", every=2, **options), tmp_path / name)
    model = loaded(tmp_path / "other")
    with pytest.raises(ValueError, match="2 tokens behind its vocabulary .*=True.*this model 2 .*False"):
        model.load_cross_attention(tmp_path / "one", "one")


def test_generation_settings_of_the_text_model(tmp_path):
    """A text model that generates past the end of the text, after the load of a small checkpoint."""
    text = make_text()
    text.generation_config.eos_token_id, text.generation_config.max_new_tokens = [29], 12
    text.save_pretrained(tmp_path / "text")
    make_vision(tmp_path / "vision")
    model = retrofit(tmp_path / "text", tmp_path / "vision", every=2)
    for name, only in (("whole", False), ("small", True)):
        model.save_pretrained(tmp_path / name, adapter_only=only)
        settings = loaded(tmp_path / name).model.text_model.generation_config
        assert (settings.eos_token_id, settings.max_new_tokens) == ([29], 12), name


def test_towers_without_a_pooler(tmp_path, caplog):
    """The tower of a classifier, whose pooler is drawn anew at each load: a base that is said to have changed."""
    transformers.logging.enable_propagation()
    make_base(tmp_path / "text")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    ViTForImageClassification(ViTConfig(image_size=32, patch_size=8, **sizes)).save_pretrained(tmp_path / "vit")
    model = small(retrofit(tmp_path / "text", tmp_path / "vit", every=2), tmp_path / "small")
    again = loaded(tmp_path / "small")
    assert torch.equal(logits_of(again), logits_of(model))
    again.load_cross_attention(tmp_path / "small", "second")
    assert again.model.vision_tower is again.model._all_sets()["default"].vision_tower
    assert "has changed" not in caplog.text


@pytest.mark.parametrize("convert", [convert_checkpoint, export_checkpoint])
def test_an_adapter_beside_the_weights(convert, first, tmp_path):
    """An adapter of PEFT whose settings are copied, and whose weights are not."""
    pytest.importorskip("peft")
    first.save_pretrained(tmp_path / "whole", max_shard_size="60KB")
    shutil.copy(tmp_path / "whole" / "config.json", tmp_path / "whole" / "adapter_config.json")
    with pytest.raises(ValueError, match="adapter of PEFT.*[Mm]erge"):
        convert(tmp_path / "whole", tmp_path / "made")
    assert not os.path.exists(tmp_path / "made")


def test_code_of_a_usual_name(checkpoints):
    """The code of a base in `modeling_*.py`, taken for a file of weights and left out of a small checkpoint."""
    text = checkpoints / "text"
    (text / "custom_decoder.py").rename(text / "modeling_custom.py")
    config = (text / "config.json").read_text().replace('"custom_decoder.', '"modeling_custom.')
    (text / "config.json").write_text(config)
    model = retrofit(text, checkpoints / "vision", every=2, trust_remote_code=True)
    small(model, checkpoints / "small")
    assert (checkpoints / "small" / "modeling_custom.py").is_file()
    again = AutoModelForImageTextToText.from_pretrained(checkpoints / "small", trust_remote_code=True).eval()
    assert torch.equal(logits_of(again), logits_of(model))
