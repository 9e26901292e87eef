"""Checkpoints without the weights of their bases: bases and folder together are the model, bit for bit, or nothing is loaded."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from conftest import TEXT_CONFIGS, make_text, pixels, randomize, token_ids, vision_config
from test_custom_code import make_custom, registered  # noqa: F401  # a fixture
from test_importers_mllama import make_mllama
from transformers import (
    AutoModel,
    AutoModelForImageTextToText,
    LlavaConfig,
    LlavaForConditionalGeneration,
    MllamaVisionModel,
    ResNetConfig,
)

from hf_xattn import XAttnForConditionalGeneration, XAttnModel, retrofit
from hf_xattn.adapters import MANIFEST, WEIGHTS, Adapter


ROOT = Path(__file__).parents[1]
ADDED = f"{WEIGHTS}.safetensors"


@pytest.fixture
def vision(tmp_path):
    torch.manual_seed(7)
    AutoModel.from_config(vision_config()).save_pretrained(tmp_path / "vision")
    return tmp_path / "vision"


def make_base(folder, name="llama", dtype=torch.float32, seed=0):
    make_text(name, dtype, seed).save_pretrained(folder)
    return folder


def make(tmp_path, vision, name="llama", dtype=torch.float32, seed=1, **options):
    """A retrofit of two checkpoints, whose blocks are not the identity."""
    text = make_base(tmp_path / f"text-{name}", name, dtype)
    model = retrofit(text, vision, cross_attention_layers=[1, 3], **options)
    return randomize(model, seed).eval()


@torch.no_grad()
def logits_of(model):
    return model.eval()(token_ids(), pixel_values=pixels())[0]


def names_in(folder):
    return set(Adapter.find(folder, {}).added())


def same_model(model, loaded):
    mine, others = model.state_dict(), loaded.state_dict()
    assert mine.keys() == others.keys()
    assert [n for n in mine if mine[n].dtype != others[n].dtype or not torch.equal(mine[n], others[n])] == []
    assert torch.equal(logits_of(model), logits_of(loaded))


@pytest.mark.parametrize("name", TEXT_CONFIGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_round_trip(name, dtype, vision, tmp_path):
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


def test_body(vision, tmp_path):
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
def test_added_vocabulary(name, in_head, vision, tmp_path):
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
    """A tower, a text weight or a tied embedding that was trained and is taken from the base again; -0.0 that becomes 0.0."""
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


def test_shards(vision, tmp_path):
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
def test_tiled_tower(source, tmp_path):
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


def test_custom_decoder(registered, vision, tmp_path):  # noqa: F811
    """A decoder that transformers does not know, registered by the caller."""
    make_custom().save_pretrained(tmp_path / "text")
    model = randomize(retrofit(tmp_path / "text", vision, every=2)).eval()
    model.save_pretrained(tmp_path / "added", adapter_only=True)
    same_model(model, AutoModelForImageTextToText.from_pretrained(tmp_path / "added"))


def test_in_another_process(vision, tmp_path):
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
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


FROM_THE_HUB = """
import json, sys, torch
import hf_xattn, transformers
from hf_xattn.adapters import MANIFEST
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


@pytest.mark.parametrize("revision", ["", "main"])
def test_bases_of_the_hub(revision, vision, tmp_path):
    """A commit that is not recorded, or a base that is looked for as a folder. The Hub's cache stands in for the Hub."""
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
    assert done.returncode == 0 and "has changed" not in done.stderr, done.stderr


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


def test_base_that_changed(vision, tmp_path, caplog):
    """Other weights of the same shape, taken without a word; and a base as it was, warned of."""
    transformers.logging.enable_propagation()
    model = make(tmp_path, vision)
    model.save_pretrained(tmp_path / "added", adapter_only=True)
    AutoModelForImageTextToText.from_pretrained(tmp_path / "added")
    assert "has changed" not in caplog.text
    make_base(tmp_path / "text-llama", seed=5)
    AutoModelForImageTextToText.from_pretrained(tmp_path / "added")
    assert f"base {tmp_path / 'text-llama'} are not those" in caplog.text and "has changed" in caplog.text
    caplog.clear()
    make_base(tmp_path / "text-llama")
    tower = AutoModel.from_pretrained(vision)
    next(tower.parameters()).data.view(-1)[3] += 1
    tower.save_pretrained(vision)
    AutoModelForImageTextToText.from_pretrained(tmp_path / "added")
    assert f"base {vision} are not those" in caplog.text


def test_bases_that_are_gone_or_of_another_shape(vision, tmp_path):
    """An error from deep inside, or weights at random in place of a base."""
    make(tmp_path, vision).save_pretrained(tmp_path / "added", adapter_only=True)
    make_base(tmp_path / "other", "llama_tied")
    load = AutoModelForImageTextToText.from_pretrained
    with pytest.raises(ValueError, match="`text_base` .*other is a model of another shape"):
        load(tmp_path / "added", text_base=tmp_path / "other")
    shutil.rmtree(tmp_path / "text-llama")
    with pytest.raises(ValueError, match=r"text-llama, where there is no folder now. Pass `text_base=`"):
        load(tmp_path / "added")
    with pytest.raises(ValueError, match="Expected `text_base` to be a folder or a Hub id, got '/nowhere/text'"):
        load(tmp_path / "added", text_base="/nowhere/text")
    with pytest.raises(TypeError, match="Expected `text_base` to be a Hub id or a folder, got int"):
        load(tmp_path / "added", text_base=3)
    with pytest.raises(OSError, match="(?s)added was saved without the weights of its base a/b.*`text_base=`"):
        load(tmp_path / "added", text_base="a/b")


def test_models_that_cannot_be_saved_so(vision, tmp_path):
    """A folder that nobody can load, because a base has no name; arguments that are dropped."""
    from_memory = randomize(retrofit(make_text(), AutoModel.from_pretrained(vision), every=2))
    with pytest.raises(ValueError, match="text_model was not loaded from a checkpoint.*`text_base=`"):
        from_memory.save_pretrained(tmp_path / "added", adapter_only=True)
    make_base(tmp_path / "text")
    from_memory.save_pretrained(tmp_path / "added", adapter_only=True, text_base=tmp_path / "text")
    same_model(from_memory, AutoModelForImageTextToText.from_pretrained(tmp_path / "added"))
    model = make(tmp_path, vision)
    for options, message in (
        ({"adapter_only": True, "push_to_hub": True}, r"Call `model.push_to_hub\(repo_id, adapter_only=True\)`"),
        ({"adapter_only": True, "text_base": 3}, "Expected `text_base` to be a Hub id or a folder, got int"),
        ({"text_base": "a/b"}, "`text_base` needs `adapter_only=True`, got 'a/b'"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            model.save_pretrained(tmp_path / "new", **options)
    model.save_pretrained(tmp_path / "whole")
    with pytest.raises(ValueError, match="`text_base` is for folders of"):
        AutoModelForImageTextToText.from_pretrained(tmp_path / "whole", text_base=tmp_path / "text")
    with pytest.raises(ValueError, match="holds a whole model"):
        model.save_pretrained(tmp_path / "whole", adapter_only=True)
    shutil.rmtree(tmp_path / "text-llama")
    with pytest.raises(ValueError, match="where there is no folder now. Pass `text_base=`"):
        model.save_pretrained(tmp_path / "new", adapter_only=True)
    assert not (tmp_path / "new").exists()


def test_state_dict_without_buffers(tmp_path):
    """Statistics of batch norms that a `state_dict` of parameters alone lacks: they load as they began."""
    AutoModel.from_config(ResNetConfig(embedding_size=8, hidden_sizes=[8], depths=[1])).save_pretrained(
        tmp_path / "net"
    )
    model = make(tmp_path, tmp_path / "net")
    with pytest.raises(ValueError, match="expected all weights of the model.*such as model.vision_tower.*num_batches"):
        model.save_pretrained(tmp_path / "added", adapter_only=True, state_dict=dict(model.named_parameters()))
    model.save_pretrained(tmp_path / "added", adapter_only=True, state_dict=model.state_dict())
    same_model(model, AutoModelForImageTextToText.from_pretrained(tmp_path / "added"))


def test_half_written_folders(vision, tmp_path):
    """A folder of which a part was written, cut off, or mixed with another; and leftovers of a save that failed."""
    model = make(tmp_path, vision)
    folder = tmp_path / "added"
    model.save_pretrained(folder, adapter_only=True)
    load = AutoModelForImageTextToText.from_pretrained
    whole = (folder / ADDED).read_bytes()
    for damage in (whole[:-100], whole[:-4] + b"\0\1\2\3"):
        (folder / ADDED).write_bytes(damage)
        with pytest.raises(ValueError, match=rf"{ADDED} is not the file that was saved: .*cut off or changed"):
            load(folder)
    (folder / ADDED).unlink()
    with pytest.raises(ValueError, match=f"lacks {ADDED}"):
        load(folder)
    (folder / ADDED).write_bytes(whole)
    manifest = (folder / MANIFEST).read_text()
    (folder / MANIFEST).write_text(manifest[:-50])
    with pytest.raises(ValueError, match=f"{MANIFEST} is damaged"):
        load(folder)
    (folder / MANIFEST).write_text(json.dumps({**json.loads(manifest), "format": 99}))
    with pytest.raises(ValueError, match="format 99"):
        load(folder)
    (folder / MANIFEST).unlink()
    with pytest.raises(ValueError, match="only half written"):
        load(folder)
    model.save_pretrained(folder, adapter_only=True)
    same_model(model, load(folder))


def test_a_failed_save_leaves_nothing(vision, tmp_path, monkeypatch):
    """A folder that looks whole after a full disk, or an older one that is lost by it."""
    model = make(tmp_path, vision)
    model.save_pretrained(tmp_path / "added", adapter_only=True)
    before = {path.name: path.read_bytes() for path in (tmp_path / "added").iterdir()}
    monkeypatch.setattr(
        type(model.config), "save_pretrained", lambda *a, **k: (_ for _ in ()).throw(OSError("disk full"))
    )
    for name in ("added", "new"):
        with pytest.raises(OSError, match="disk full"):
            model.save_pretrained(tmp_path / name, adapter_only=True)
    assert before == {path.name: path.read_bytes() for path in (tmp_path / "added").iterdir()}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["added", "text-llama", "vision"]


def test_a_failed_save_of_the_whole_model_leaves_the_adapter(vision, tmp_path):
    """Trained blocks that are deleted for a model that was never written."""
    model = make(tmp_path, vision)
    model.save_pretrained(tmp_path / "added", adapter_only=True)
    with pytest.raises(ValueError, match="not supported"):
        model.save_pretrained(tmp_path / "added", max_shard_size="huge")
    same_model(model, AutoModelForImageTextToText.from_pretrained(tmp_path / "added"))


def test_another_save_into_the_same_folder(vision, tmp_path):
    """Files of two saves that are read together; a processor's files that are lost."""
    model = make(tmp_path, vision)
    folder = tmp_path / "added"
    folder.mkdir()
    (folder / "tokenizer.json").write_text("{}")
    model.save_pretrained(folder, adapter_only=True, max_shard_size="40KB")
    randomize(model, 9).save_pretrained(folder, adapter_only=True)
    assert [path.name for path in folder.glob("*.safetensors")] == [ADDED]
    assert (folder / "tokenizer.json").read_text() == "{}"
    same_model(model, AutoModelForImageTextToText.from_pretrained(folder))
    randomize(model, 10).save_pretrained(folder)
    assert not (folder / MANIFEST).exists() and not (folder / ADDED).exists()
    same_model(model, AutoModelForImageTextToText.from_pretrained(folder))


@pytest.mark.parametrize("folder", [".", "..", "../other/.."])
def test_folders_without_a_name(folder, vision, tmp_path, monkeypatch):
    """Files of the working folder that are moved into the folder above, or deleted; a second save that fails."""
    model = make(tmp_path, vision)
    here = tmp_path / "runs" / "here"
    here.mkdir(parents=True)
    monkeypatch.chdir(here)
    for name in ("model_notes.txt", "rows.jsonl"):
        (here / name).write_text("mine")
    for _ in range(2):
        model.save_pretrained(folder, adapter_only=True)
        assert (here / "model_notes.txt").is_file() and (here / "rows.jsonl").is_file()
    same_model(model, AutoModelForImageTextToText.from_pretrained(folder if folder == "." else here.parent))


def test_edited_configuration_is_named(vision, tmp_path, caplog):
    """A configuration of another model beside these weights."""
    transformers.logging.enable_propagation()
    make(tmp_path, vision).save_pretrained(tmp_path / "added", adapter_only=True)
    file = tmp_path / "added" / "config.json"
    file.write_text(file.read_text().replace('"gelu"', '"relu"'))
    AutoModelForImageTextToText.from_pretrained(tmp_path / "added")
    assert "config.json is not the file that was saved" in caplog.text
