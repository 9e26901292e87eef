"""Checkpoints that lack weights: they are refused, and only `allow_missing_weights=True` loads them."""

import json
import shutil

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    LlamaModel,
    ViTConfig,
    ViTForImageClassification,
)
from transformers.integrations.peft import MIN_PEFT_VERSION

from helpers.inputs.training_examples import MIXED, write_examples
from helpers.models.saved_models import loaded, make_base, make_vision, put_onto, small
from helpers.models.template_models import save_chat_model
from helpers.models.tiny_models import make_model, make_text, pixels, randomize, token_ids, vision_config
from hf_xattn import XAttnForConditionalGeneration, XAttnModel, retrofit
from hf_xattn.checkpoints.folders import WEIGHTS
from hf_xattn.commands.main import main
from hf_xattn.training.run_folder import CHECKPOINTS, OPTIONS_FILE


IMAGES = {"pixel_values": pixels()}


LOADERS = (
    XAttnForConditionalGeneration.from_pretrained,
    XAttnModel.from_pretrained,
    AutoModel.from_pretrained,
    AutoModelForCausalLM.from_pretrained,
    AutoModelForImageTextToText.from_pretrained,
)
LAYER = "model.text_model.model.layers.1."
BLOCK = LAYER + "cross_attention_block."
# What is missing: the decoder, the weights, how many they are, and the first of them.
CASES = {
    "connector": ("llama", "model.connector.", 4, "model.connector.layers.0.bias"),
    "a weight of the connector": ("llama", "model.connector.layers.2.bias", 1, "model.connector.layers.2.bias"),
    "all blocks": ("llama", "cross_attention_block", 22, BLOCK + "attn.k_proj.weight"),
    "a block": ("llama", BLOCK, 11, BLOCK + "attn.k_proj.weight"),
    "a gate": ("llama", BLOCK + "mlp_gate", 1, BLOCK + "mlp_gate"),
    "a layer": ("llama", LAYER + "mlp.", 3, LAYER + "mlp.down_proj.weight"),
    "the head": ("llama", "lm_head", 1, "model.text_model.lm_head.weight"),
    "embeddings that are tied": ("llama_tied", "embed_tokens", 2, "model.text_model.lm_head.weight"),
    "the tower": ("llama", "model.vision_tower.", 37, "model.vision_tower.embeddings.patch_embedding.bias"),
    "a head of another name on disk": ("gpt_neox", "embed_out", 1, "model.text_model.lm_head.weight"),
}


def damage(file, part, renamed=False):
    weights = load_file(file)
    for name in [name for name in weights if part in name]:
        tensor = weights.pop(name)
        if renamed:
            weights[name.replace("model.", "modle.")] = tensor
    save_file(weights, file, {"format": "pt"})


@pytest.mark.parametrize("renamed", [False, True], ids=["missing", "renamed"])
@pytest.mark.parametrize("case", CASES)
def test_a_checkpoint_without_all_weights_is_refused(case, renamed, tmp_path):
    """A model that answers with random weights, or is blind, and says so in a table of the log at most."""
    decoder, part, count, first = CASES[case]
    make_model(decoder).save_pretrained(tmp_path)
    damage(tmp_path / "model.safetensors", part, renamed)
    for load in LOADERS:
        with pytest.raises(ValueError, match=rf"{tmp_path} is not complete: {count} weights are missing") as raised:
            load(tmp_path)
        assert f"'{first.removeprefix('model.')}" in str(raised.value) or f"'{first}" in str(raised.value)
        assert (f"and {count - 3} more" in str(raised.value)) == (count > 3)
        moved = 1 if "tied" in case else count
        assert (f"It holds {moved} for which the model has no place, 'modle." in str(raised.value)) == renamed


@pytest.mark.parametrize("part", ["experts.2.w3", "experts.2."])
def test_a_layer_that_lacks_an_expert_is_refused(part, tmp_path):
    """A layer whose experts are fewer than its router chooses from."""
    make_model("mixtral").save_pretrained(tmp_path)
    damage(tmp_path / "model.safetensors", LAYER + "block_sparse_moe." + part)
    for load in LOADERS:
        with pytest.raises(RuntimeError):
            load(tmp_path)


def test_only_where_it_is_asked_for(tmp_path, caplog):
    """The one way around that changes other weights, does not say what is random, or is taken for something else."""
    model = make_model()
    model.save_pretrained(tmp_path)
    damage(tmp_path / "model.safetensors", "model.connector.")
    expected = load_file(tmp_path / "model.safetensors")
    for load in LOADERS:
        caplog.clear()
        loaded = load(tmp_path, allow_missing_weights=True)
        found = [record.message for record in caplog.records if record.name == "hf_xattn.utils.checkpoint_files"]
        assert len(found) == 1 and "connector.layers.0.bias', " in found[0] and "and 1 more" in found[0]
        state = loaded.state_dict()
        prefix = "" if isinstance(loaded, XAttnForConditionalGeneration) else "model."
        assert all(torch.equal(state[name.removeprefix(prefix)], tensor) for name, tensor in expected.items())
        assert all(parameter.isfinite().all() for parameter in loaded.base_model.connector.parameters())
    with pytest.raises(ValueError, match="4 weights are missing"):
        XAttnForConditionalGeneration.from_pretrained(tmp_path, allow_missing_weights=False, connector_type="mlp")


def test_whole_models_say_nothing(tmp_path, caplog):
    """A warning, or an error, for what no folder holds: ties, and buffers that are not saved."""
    for name in ("llama_tied", "gpt2", "opt"):
        make_model(name).save_pretrained(tmp_path / name, max_shard_size="30KB")
        XAttnForConditionalGeneration.from_pretrained(tmp_path / name, allow_missing_weights=True)
    assert not [record for record in caplog.records if record.name == "hf_xattn.utils.checkpoint_files"]


def test_weights_of_the_caller():
    """A `state_dict` with names that the model does not have, which leaves it random."""
    model = make_model()
    weights = {name.replace("connector", "connectr"): tensor for name, tensor in model.state_dict().items()}
    options = {"config": model.config, "state_dict": weights}
    message = "`state_dict` is not complete: 4 weights are missing.*holds 4 for which .*'model.connectr.layers.0.bias'"
    with pytest.raises(ValueError, match=message):
        XAttnForConditionalGeneration.from_pretrained(None, **options)
    XAttnForConditionalGeneration.from_pretrained(None, allow_missing_weights=True, **options)
    new = XAttnForConditionalGeneration.from_pretrained(None, config=model.config, state_dict={})
    assert all(parameter.isfinite().all() for parameter in new.parameters())


def test_a_base_below_an_adapter_must_be_complete(tmp_path):
    """A base that is not complete, below an adapter (PEFT) in the same folder: the report on the adapter hides it."""
    pytest.importorskip("peft", minversion=MIN_PEFT_VERSION)
    model = make_model()
    model.save_pretrained(tmp_path)
    model.add_adapter(LoraConfig(target_modules=["q_proj"], r=2))
    model.save_pretrained(tmp_path)
    XAttnForConditionalGeneration.from_pretrained(tmp_path)
    damage(tmp_path / "model.safetensors", "model.connector.")
    for load in (XAttnForConditionalGeneration.from_pretrained, AutoModelForCausalLM.from_pretrained):
        with pytest.raises(ValueError, match="4 weights are missing"):
            load(tmp_path)


@pytest.fixture
def bases(tmp_path):
    make_text().save_pretrained(tmp_path / "text")
    AutoModel.from_config(vision_config()).save_pretrained(tmp_path / "vision")
    return tmp_path


def test_added_weights_that_lack_some_are_refused(bases):
    """A folder of added weights that lacks some, as its manifest says, or whose base does."""
    model = randomize(retrofit(bases / "text", bases / "vision", cross_attention_layers=[1, 3]))
    added = bases / "added"
    model.save_pretrained(added, adapter_only=True)
    file = added / f"{WEIGHTS}.safetensors"
    whole = file.read_bytes()
    damage(file, "model.connector.", renamed=True)
    for load in LOADERS:
        with pytest.raises(ValueError, match=r"4 weights are missing.*connector.*holds 4 .*'modle\."):
            load(added)
    XAttnForConditionalGeneration.from_pretrained(added, allow_missing_weights=True)
    file.write_bytes(whole)
    XAttnForConditionalGeneration.from_pretrained(added)
    damage(bases / "text" / "model.safetensors", "layers.2.mlp")
    with pytest.raises(ValueError, match="`text` .*3 weights are missing, 'model.layers.2.mlp.down_proj.weight'"):
        XAttnForConditionalGeneration.from_pretrained(added)


def test_base_of_a_retrofit(bases):
    """A retrofit of a checkpoint that is not complete, such as a decoder without its head."""
    LlamaModel(make_text().config).save_pretrained(bases / "body")
    with pytest.raises(ValueError, match="`text` .*body.* is not complete: 1 weights are missing, 'lm_head.weight'"):
        retrofit(bases / "body", cross_attention_layers=[1])
    retrofit(AutoModelForCausalLM.from_pretrained(bases / "body"), cross_attention_layers=[1])
    damage(bases / "vision" / "model.safetensors", "layers.0.mlp")
    with pytest.raises(ValueError, match="`vision` .*4 weights are missing"):
        retrofit(bases / "text", bases / "vision", cross_attention_layers=[1])
    # A classifier's checkpoint has no pooler, and nothing reads the pooled output.
    sizes = {"hidden_size": 24, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    ViTForImageClassification(ViTConfig(**sizes, image_size=32, patch_size=8)).save_pretrained(bases / "classifier")
    model = retrofit(bases / "text", bases / "classifier", cross_attention_layers=[1])
    assert model(token_ids(), pixel_values=pixels()).logits.isfinite().all()


def test_check_refuses_a_checkpoint_without_its_connector(tmp_path, capsys):
    """`hf-xattn check` that says of a random connector that all holds."""
    make_model().save_pretrained(tmp_path)
    damage(tmp_path / "model.safetensors", "model.connector.")
    assert main(["check", str(tmp_path)]) == 2
    assert "is not complete: 4 weights are missing, 'model.connector.layers.0.bias'" in capsys.readouterr().err


def test_resume_refuses_a_checkpoint_without_its_connector(tmp_path, capsys):
    """A run that goes on from a checkpoint without its connector, with that of the model it began with."""
    save_chat_model(tmp_path / "model")
    data, out = write_examples(tmp_path / "data", MIXED), tmp_path / "out"
    options = ["--data", data, "--output", out, "--steps", 2, "--save-steps", 1, "--text-share", 0, "--device", "cpu"]
    command = ["train", tmp_path / "model", *options]
    assert main([str(word) for word in command]) == 0
    shutil.rmtree(out / CHECKPOINTS / "checkpoint-2")
    saved = json.loads((out / OPTIONS_FILE).read_text())
    (out / OPTIONS_FILE).write_text(json.dumps({name: value for name, value in saved.items() if name != "complete"}))
    damage(out / CHECKPOINTS / "checkpoint-1" / "model.safetensors", "model.connector.")
    assert main([*(str(word) for word in command), "--resume"]) == 2
    assert "checkpoint-1 is not complete: 4 weights are missing" in capsys.readouterr().err


@torch.no_grad()
def logits_of(model):
    return model(token_ids(), **IMAGES).logits


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
