"""Checkpoints without the weights of their bases: bases and folder together are the model, bit for bit, or nothing is
loaded.
"""

import os
import shutil
import subprocess
import sys

import pytest
import torch
import transformers
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    LlavaConfig,
    LlavaForConditionalGeneration,
    MllamaVisionModel,
    SiglipVisionModel,
    ViTConfig,
    ViTForImageClassification,
)

from helpers.checkout import ROOT
from helpers.models.checkpoints_with_code import make_custom
from helpers.models.saved_models import (
    ADDED,
    loaded,
    logits_of,
    make,
    make_base,
    make_first,
    make_vision,
    names_in,
    put_onto,
    same_model,
    small,
)
from helpers.models.tiny_mllama import make_mllama
from helpers.models.tiny_models import TEXT_CONFIGS, make_text, pixels, randomize, token_ids, vision_config
from helpers.processes import warm_processes
from hf_xattn import XAttnForConditionalGeneration, XAttnModel, remove_blocks, retrofit
from hf_xattn.checkpoints.folders import MANIFEST, WEIGHTS


IMAGES = {"pixel_values": pixels()}


@pytest.mark.parametrize("name", TEXT_CONFIGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bases_and_added_weights_are_the_model_again(name, dtype, vision, tmp_path):
    """A weight that neither the bases nor the folder hold; a tie that is lost; a folder with the bases in it."""
    model = make(tmp_path, vision, name, dtype)
    model.save_pretrained(tmp_path / "added", adapter_only=True)
    assert all("cross_attention_block" in name or ".connector." in name for name in names_in(tmp_path / "added"))
    expected = ["config.json", MANIFEST, ADDED, "generation_config.json", "README.md", "xattn_stub.py"]
    assert sorted(os.listdir(tmp_path / "added")) == sorted(expected)
    same_model(model, AutoModelForImageTextToText.from_pretrained(tmp_path / "added"))


def test_a_persons_card_and_the_name(vision, tmp_path):
    """A card that a person wrote, overwritten or taken for damage; a model named after a folder that is gone."""
    model = make(tmp_path, vision)
    model.save_pretrained(tmp_path / "added", adapter_only=True)
    assert model.name_or_path == str(tmp_path / "added")
    (tmp_path / "added" / "README.md").write_text("my own words")
    same_model(model, XAttnForConditionalGeneration.from_pretrained(tmp_path / "added"))
    model.save_pretrained(tmp_path / "added", adapter_only=True)
    assert (tmp_path / "added" / "README.md").read_text() == "my own words"
    same_model(model, XAttnForConditionalGeneration.from_pretrained(tmp_path / "added"))


@pytest.mark.parametrize(
    "auto_class", ["AutoModelForCausalLM", "AutoModelForImageTextToText", "AutoModelForMultimodalLM", "itself"]
)
def test_classes_and_their_arguments(auto_class, vision, tmp_path):
    """A class that takes another way in, or arguments of `from_pretrained` that are lost on the way."""
    model = make(tmp_path, vision)
    model.save_pretrained(tmp_path / "whole")
    model.save_pretrained(tmp_path / "added", adapter_only=True)
    loader = XAttnForConditionalGeneration if auto_class == "itself" else getattr(transformers, auto_class)
    for options in (
        {},
        {"dtype": torch.bfloat16},
        {"dtype": "auto", "image_visibility": "latest", "image_token_id": 3},
        {"attn_implementation": {"cross_attention_config": "eager"}},
        {"device_map": "cpu"},
        {"torch_dtype": torch.float16},
    ):
        whole, added = (loader.from_pretrained(tmp_path / folder, **options) for folder in ("whole", "added"))
        assert type(added) is XAttnForConditionalGeneration and added.config.name_or_path == str(tmp_path / "added")
        assert added.dtype == whole.dtype and added.config.image_visibility == whole.config.image_visibility
        kernels = [each.blocks[0].attn.config._attn_implementation for each in (whole, added)]
        assert kernels[0] == kernels[1]
        assert {n: t.dtype for n, t in added.state_dict().items()} == {
            n: t.dtype for n, t in whole.state_dict().items()
        }
        if "image_visibility" not in options:
            assert torch.equal(logits_of(whole), logits_of(added))
    loaded, info = loader.from_pretrained(tmp_path / "added", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not loaded.training
    with pytest.raises(TypeError, match="image_visibilty"):
        loader.from_pretrained(tmp_path / "added", image_visibilty="latest")


def test_a_body_loads_without_its_head(vision, tmp_path):
    """`AutoModel` of a folder with a head, and a body that was saved alone."""
    model = make(tmp_path, vision)
    model.save_pretrained(tmp_path / "added", adapter_only=True)
    body = AutoModel.from_pretrained(tmp_path / "added")
    assert isinstance(body, XAttnModel)
    assert torch.equal(logits_of(body), logits_of(model.model))
    body.save_pretrained(tmp_path / "body", adapter_only=True)
    assert torch.equal(logits_of(AutoModel.from_pretrained(tmp_path / "body")), logits_of(model.model))


def test_device_map_with_disk(vision, tmp_path):
    """Weights that accelerate puts on a disk and does not find again; and a save from there."""
    model = make(tmp_path, vision)
    model.save_pretrained(tmp_path / "added", adapter_only=True)
    loaded = AutoModelForImageTextToText.from_pretrained(
        tmp_path / "added", device_map="auto", max_memory={"cpu": "120KB"}, offload_folder=tmp_path / "offload"
    )
    assert "disk" in loaded.hf_device_map.values()
    assert torch.equal(logits_of(loaded), logits_of(model))
    loaded.save_pretrained(tmp_path / "again", adapter_only=True)
    same_model(model, AutoModelForImageTextToText.from_pretrained(tmp_path / "again"))


@pytest.mark.parametrize("name", ["llama", "llama_tied"])
@pytest.mark.parametrize("in_head", [False, True])
def test_added_vocabulary_is_saved_with_the_blocks(name, in_head, vision, tmp_path):
    """Rows behind the vocabulary that are left with the base, tied or not."""
    model = make(tmp_path, vision, name, additional_vocab_size=3, additional_vocab_in_head=in_head)
    model.get_input_embeddings().additional.weight.data.normal_()
    model.save_pretrained(tmp_path / "added", adapter_only=True)
    loaded = AutoModelForImageTextToText.from_pretrained(tmp_path / "added")
    same_model(model, loaded)
    ids = torch.tensor([[96, 5, 98, 7]])
    assert torch.equal(model(ids).logits, loaded(ids).logits)


@pytest.mark.parametrize("name", ["llama", "llama_tied"])
def test_what_was_trained_beside_the_blocks(name, vision, tmp_path):
    """A tower, a text weight or a tied embedding that was trained and is taken from the base again; -0.0 that becomes
    0.0.
    """
    model = make(tmp_path, vision, name)
    tower = model.model.vision_tower.state_dict()
    changed = next(n for n in tower if n.endswith("fc1.weight"))
    tower[changed].view(-1)[-1] += 1e-6
    zeros = next(n for n in tower if n.endswith("layer_norm1.bias"))
    assert tower[zeros][0] == 0
    tower[zeros][0] = -0.0
    text = model.model.text_model
    text.model.norm.weight.data[0] = 3
    text.model.embed_tokens.weight.data[5] *= 2
    model.save_pretrained(tmp_path / "added", adapter_only=True)
    beside = {n for n in names_in(tmp_path / "added") if "cross_attention_block" not in n and "connector" not in n}
    prefix = "model.text_model.model"
    assert beside == {
        f"model.vision_tower.{changed}",
        f"model.vision_tower.{zeros}",
        f"{prefix}.norm.weight",
        f"{prefix}.embed_tokens.weight",
    }
    loaded = AutoModelForImageTextToText.from_pretrained(tmp_path / "added")
    same_model(model, loaded)
    tied = name == "llama_tied"
    assert (loaded.get_input_embeddings().weight is loaded.get_output_embeddings().weight) == tied


def test_more_words_in_the_vocabulary(vision, tmp_path):
    """Embeddings of another size than the base's."""
    model = make(tmp_path, vision)
    model.resize_token_embeddings(100)
    model.save_pretrained(tmp_path / "added", adapter_only=True)
    same_model(model, AutoModelForImageTextToText.from_pretrained(tmp_path / "added"))


def test_every_shard_of_added_weights_is_loaded(vision, tmp_path):
    """A shard that is left behind."""
    model = make(tmp_path, vision)
    model.save_pretrained(tmp_path / "added", adapter_only=True, max_shard_size="40KB")
    assert len(list((tmp_path / "added").glob(f"{WEIGHTS}-*.safetensors"))) > 1
    same_model(model, AutoModelForImageTextToText.from_pretrained(tmp_path / "added"))


def test_other_dtype_than_the_base(vision, tmp_path):
    """A base that is loaded in its own dtype, not in the model's; a tower in a third one."""
    model = make(tmp_path, vision, dtype=torch.float32)
    model.model.text_model.to(torch.bfloat16)
    model.save_pretrained(tmp_path / "whole")
    model.save_pretrained(tmp_path / "added", adapter_only=True)
    assert not any("vision_tower" in name or "self_attn" in name for name in names_in(tmp_path / "added"))
    for options in ({}, {"dtype": torch.float32}):
        whole, added = (
            AutoModelForImageTextToText.from_pretrained(tmp_path / folder, **options) for folder in ("whole", "added")
        )
        same_model(whole, added)


def test_features_instead_of_a_tower(tmp_path):
    """A tower that is looked for where there is none."""
    model = randomize(retrofit(make_base(tmp_path / "text"), every=2)).eval()
    model.save_pretrained(tmp_path / "added", adapter_only=True)
    loaded = AutoModelForImageTextToText.from_pretrained(tmp_path / "added")
    states = torch.randn(2, 5, 32)
    assert torch.equal(
        model(token_ids(), cross_attention_states=states).logits,
        loaded(token_ids(), cross_attention_states=states).logits,
    )


def test_text_half_and_vision_half(tmp_path):
    """The name of a larger model's folder, which its text half forgets; the tower of a larger model."""
    torch.manual_seed(0)
    llava = LlavaForConditionalGeneration(
        LlavaConfig(text_config=TEXT_CONFIGS["llama"](), vision_config=vision_config(), image_token_index=90)
    )
    llava.save_pretrained(tmp_path / "llava")
    loaded_llava = LlavaForConditionalGeneration.from_pretrained(tmp_path / "llava")
    for text in (tmp_path / "llava", loaded_llava):
        model = randomize(retrofit(text, every=2)).eval()
        model.save_pretrained(tmp_path / "added", adapter_only=True)
        assert all("cross_attention_block" in name for name in names_in(tmp_path / "added"))
        assert torch.equal(
            AutoModelForImageTextToText.from_pretrained(tmp_path / "added")(token_ids()).logits,
            model(token_ids()).logits,
        )


@pytest.mark.parametrize("source", ["tower", "mllama"])
def test_a_tiled_tower_stays_with_its_base(source, tmp_path):
    """Mllama's tower, with its tiles."""
    make_mllama().save_pretrained(tmp_path / "mllama")
    tower = MllamaVisionModel.from_pretrained(tmp_path / "mllama")
    tower.save_pretrained(tmp_path / "tower")
    model = randomize(retrofit(make_text(), MllamaVisionModel.from_pretrained(tmp_path / source), every=2)).eval()
    text = make_base(tmp_path / "text")
    model.save_pretrained(tmp_path / "added", adapter_only=True, text_base=text)
    assert not any("vision_tower" in name for name in names_in(tmp_path / "added"))
    loaded = AutoModelForImageTextToText.from_pretrained(tmp_path / "added")
    call = {
        "input_ids": token_ids(1),
        "pixel_values": torch.randn(1, 1, 4, 3, 28, 28),
        "aspect_ratio_ids": torch.ones(1, 1, dtype=torch.long),
        "aspect_ratio_mask": torch.ones(1, 1, 4, dtype=torch.long),
    }
    with torch.no_grad():
        assert torch.equal(model(**call).logits, loaded(**call).logits)


def test_a_decoder_that_a_caller_registered_is_loaded(registered_decoder, vision, tmp_path):
    """A decoder that transformers does not know, registered by the caller."""
    make_custom().save_pretrained(tmp_path / "text")
    model = randomize(retrofit(tmp_path / "text", vision, every=2)).eval()
    model.save_pretrained(tmp_path / "added", adapter_only=True)
    same_model(model, AutoModelForImageTextToText.from_pretrained(tmp_path / "added"))


def test_another_process_loads_the_folder(vision, tmp_path):
    """Anything that only this process knows; a relative path of a base."""
    make_base(tmp_path / "text")
    here = os.getcwd()
    os.chdir(tmp_path)
    try:
        model = randomize(retrofit("./text", vision, cross_attention_layers=[1, 3])).eval()
    finally:
        os.chdir(here)
    model.save_pretrained(tmp_path / "added", adapter_only=True)
    torch.save({"ids": token_ids(), "pixels": pixels(), "logits": logits_of(model)}, tmp_path / "call.pt")
    code = (
        "import torch, hf_xattn, transformers\n"
        "torch.set_num_threads(1)\n"
        f"call = torch.load({str(tmp_path / 'call.pt')!r})\n"
        f"model = transformers.AutoModelForCausalLM.from_pretrained({str(tmp_path / 'added')!r})\n"
        "assert torch.equal(model(call['ids'], pixel_values=call['pixels']).logits, call['logits'])\n"
    )
    done = warm_processes.run(["-c", code])
    assert done.returncode == 0, done.stderr


FROM_THE_HUB = """
import json, sys, torch
import hf_xattn, transformers
from hf_xattn.checkpoints.folders import MANIFEST
torch.manual_seed(0)
model = hf_xattn.retrofit("org/text", "org/vision", every=2, revision=sys.argv[2] or None).eval()
for block in model.blocks:
    block.attn.o_proj.weight.data.normal_()
model.save_pretrained(sys.argv[1], adapter_only=True)
record = json.load(open(f"{sys.argv[1]}/{MANIFEST}"))["text_base"]
assert (record["name_or_path"], record["revision"]) == ("org/text", "c" * 40), record
loaded = transformers.AutoModelForImageTextToText.from_pretrained(sys.argv[1])
call = {"input_ids": torch.tensor([[5, 6]]), "pixel_values": torch.randn(1, 1, 3, 32, 32)}
with torch.no_grad():
    assert torch.equal(model(**call).logits, loaded(**call).logits)
"""


@pytest.mark.parametrize("revision", ["", pytest.param("main", marks=pytest.mark.slow)])
def test_bases_of_the_hub(revision, vision, tmp_path):
    """A commit that is not recorded, or a base that is looked for as a folder. The Hub's cache stands in
    for the Hub.
    """
    make_base(tmp_path / "text")
    for name in ("text", "vision"):
        cache = tmp_path / "cache" / f"models--org--{name}"
        shutil.copytree(tmp_path / name, cache / "snapshots" / ("c" * 40))
        (cache / "refs").mkdir()
        (cache / "refs" / "main").write_text("c" * 40)
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_CACHE": str(tmp_path / "cache"),
    }
    arguments = [sys.executable, "-c", FROM_THE_HUB, str(tmp_path / "added"), revision]
    done = subprocess.run(arguments, env=environment, capture_output=True, text=True, cwd=tmp_path / "cache")
    assert done.returncode == 0, done.stderr
    snapshot = tmp_path / "cache" / "models--org--added" / "snapshots" / ("d" * 40)
    shutil.copytree(tmp_path / "added", snapshot)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("d" * 40)
    code = "import hf_xattn, transformers\ntransformers.AutoModel.from_pretrained('org/added', revision='main')"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_loaded_model_is_saved_again(vision, tmp_path):
    """A model that has forgotten its bases: after an adapter-only folder, a whole folder, or a base that moved."""
    model = make(tmp_path, vision)
    model.save_pretrained(tmp_path / "0", adapter_only=True)
    AutoModelForImageTextToText.from_pretrained(tmp_path / "0").save_pretrained(tmp_path / "1", adapter_only=True)
    AutoModelForImageTextToText.from_pretrained(tmp_path / "1").save_pretrained(tmp_path / "2")
    loaded = AutoModelForImageTextToText.from_pretrained(tmp_path / "2")
    assert loaded.image_identity() == model.image_identity()
    loaded.save_pretrained(tmp_path / "3", adapter_only=True)
    assert names_in(tmp_path / "3") == names_in(tmp_path / "0")
    (tmp_path / "text-llama").rename(tmp_path / "moved")
    loaded = AutoModelForImageTextToText.from_pretrained(tmp_path / "3", text_base=tmp_path / "moved")
    loaded.save_pretrained(tmp_path / "4", adapter_only=True)
    same_model(model, AutoModelForImageTextToText.from_pretrained(tmp_path / "4"))


@torch.no_grad()
def answers_of(model):
    return model(token_ids(), **IMAGES).logits


@pytest.fixture
def first(tmp_path):
    return make_first(tmp_path)


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
    expected = answers_of(model)
    assert torch.equal(answers_of(loaded(tmp_path / "second")), expected)
    mine = answers_of(first)
    second = put_onto(first, tmp_path / "second")
    assert torch.equal(answers_of(second), expected) and not torch.allclose(mine, expected)
    second.save_pretrained(tmp_path / "again", adapter_only=True)
    assert torch.equal(answers_of(loaded(tmp_path / "again")), expected)
    assert torch.equal(answers_of(put_onto(second, tmp_path / "first")), mine)


@pytest.mark.parametrize(
    "options",
    [{"num_hidden_layers": 3}, {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}}],
    ids=str,
)
def test_settings_of_a_text_model(options, first, tmp_path):
    """Blocks that were trained on fewer layers, or on other positions."""
    text = AutoModelForCausalLM.from_pretrained(tmp_path / "text", **options)
    small(retrofit(text, tmp_path / "vision", layers=[1, 2]), tmp_path / "second")
    base = remove_blocks(first)
    what = "changes weights of its text model" if "num_hidden_layers" in options else "another one: `rope_parameters`"
    with pytest.raises(ValueError, match=what):
        XAttnForConditionalGeneration.from_pretrained(tmp_path / "second", text_base=base)
    XAttnForConditionalGeneration.from_pretrained(tmp_path / "first", text_base=base)


def test_rows_of_an_earlier_head_do_not_stay(first, tmp_path):
    """Rows of a head that stay when another folder has none, or only rows of embeddings."""
    options = {"one": (2, True), "other": (2, False), "none": (0, False)}
    for name, (size, in_head) in options.items():
        added = {"additional_vocab_size": size, "additional_vocab_in_head": in_head}
        small(retrofit(tmp_path / "text", tmp_path / "vision", every=2, **added), tmp_path / name)
    for name in (*options, "one"):
        first = put_onto(first, tmp_path / name)
        assert torch.equal(answers_of(first), answers_of(loaded(tmp_path / name))), name


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


def test_towers_without_a_pooler(tmp_path):
    """The tower of a classifier, whose pooler is drawn anew at each load: a base that is refused."""
    make_base(tmp_path / "text")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    ViTForImageClassification(ViTConfig(image_size=32, patch_size=8, **sizes)).save_pretrained(tmp_path / "vit")
    model = small(retrofit(tmp_path / "text", tmp_path / "vit", every=2), tmp_path / "small")
    again = loaded(tmp_path / "small")
    assert torch.equal(answers_of(again), answers_of(model))
    assert torch.equal(answers_of(put_onto(again, tmp_path / "small")), answers_of(model))
