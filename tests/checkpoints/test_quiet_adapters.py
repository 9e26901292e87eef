"""Small checkpoints that answered otherwise than what was saved, without a word."""

import os
import shutil

import pytest
import torch
import transformers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    SiglipVisionModel,
    ViTConfig,
    ViTForImageClassification,
)

from helpers.models.saved_models import make_base, make_vision
from helpers.models.tiny_models import make_text, pixels, randomize, token_ids
from hf_xattn import XAttnForConditionalGeneration, remove_blocks, retrofit
from hf_xattn.importers import convert_checkpoint, export_checkpoint


IMAGES = {"pixel_values": pixels()}


@torch.no_grad()
def logits_of(model):
    return model(token_ids(), **IMAGES).logits


def loaded(folder):
    return AutoModelForImageTextToText.from_pretrained(folder).eval()


def put_onto(model, folder):
    """The folder on the text model of a loaded model."""
    return XAttnForConditionalGeneration.from_pretrained(folder, text_base=remove_blocks(model))


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
    """A tower with a layer more, or another epsilon, than the one that the blocks were trained with."""
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
    second = put_onto(first, tmp_path / "second")
    assert torch.equal(logits_of(second), expected) and not torch.allclose(mine, expected)
    second.save_pretrained(tmp_path / "again", adapter_only=True)
    assert torch.equal(logits_of(loaded(tmp_path / "again")), expected)
    assert torch.equal(logits_of(put_onto(second, tmp_path / "first")), mine)


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
    base = remove_blocks(first)
    if "num_hidden_layers" in options:
        with pytest.raises(ValueError, match="changes weights of its text model"):
            XAttnForConditionalGeneration.from_pretrained(tmp_path / "second", text_base=base)
    else:
        remove_blocks(XAttnForConditionalGeneration.from_pretrained(tmp_path / "second", text_base=base))
    assert f"another `{next(iter(options))}` of the text model" in caplog.text
    caplog.clear()
    XAttnForConditionalGeneration.from_pretrained(tmp_path / "first", text_base=base)
    assert "of the text model" not in caplog.text


def test_a_connector_without_weights(tmp_path):
    """A model with the settings of another folder."""
    make_base(tmp_path / "text"), make_vision(tmp_path / "vision")
    made = {}
    for seed, (name, layer) in enumerate((("a", None), ("b", -2))):
        options = {"connector_type": "identity", "vision_feature_layer": layer}
        made[name] = small(retrofit(tmp_path / "text", tmp_path / "vision", every=2, **options), tmp_path / name, seed)
    model = loaded(tmp_path / "a")
    for name in "ba":
        model = put_onto(model, tmp_path / name)
        assert torch.equal(logits_of(model), logits_of(made[name]))


def test_another_head(first, tmp_path):
    """Rows of a head that stay when another folder has none, or only rows of embeddings."""
    options = {"one": (2, True), "other": (2, False), "none": (0, False)}
    for name, (size, in_head) in options.items():
        added = {"additional_vocab_size": size, "additional_vocab_in_head": in_head}
        small(retrofit(tmp_path / "text", tmp_path / "vision", every=2, **added), tmp_path / name)
    for name in (*options, "one"):
        first = put_onto(first, tmp_path / name)
        assert torch.equal(logits_of(first), logits_of(loaded(tmp_path / name))), name


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
    assert torch.equal(logits_of(put_onto(again, tmp_path / "small")), logits_of(model))
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
