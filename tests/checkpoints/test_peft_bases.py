"""An adapter (PEFT) and the model below it may lie in different repositories, with revisions of their own."""

import os
import shutil

import pytest
import torch
from transformers.integrations.peft import MIN_PEFT_VERSION

from helpers.inputs.damaged_checkpoints import edit_json, setting
from helpers.models.saved_models import make_first
from helpers.models.tiny_models import make_model, token_ids
from hf_xattn import XAttnForConditionalGeneration
from hf_xattn.checkpoints.folders import find_peft
from hf_xattn.importers import convert_checkpoint, export_checkpoint


peft = pytest.importorskip("peft", minversion=MIN_PEFT_VERSION)

COMMITS = {"main": "1" * 40, "tuned": "2" * 40, "old": "3" * 40}


def in_cache(cache, repository, revision, source):
    """Puts a folder into a cache of the Hub, as one revision of a repository: links to its blobs."""
    root = cache / f"models--{repository.replace('/', '--')}"
    snapshot, blobs = root / "snapshots" / COMMITS[revision], root / "blobs"
    for folder in (snapshot, blobs, root / "refs"):
        folder.mkdir(parents=True, exist_ok=True)
    (root / "refs" / revision).write_text(COMMITS[revision])
    for path in source.iterdir():
        blob = blobs / f"{path.name}-{revision}"
        blob.write_bytes(path.read_bytes())
        (snapshot / path.name).symlink_to(blob)


@pytest.fixture
def lora(tmp_path):
    """A base, two states of it, and an adapter, in folders and in a cache of the Hub."""
    torch.manual_seed(0)
    base = make_model()
    base.save_pretrained(tmp_path / "base")
    base.blocks[0].attn.q_proj.weight.data.add_(1)
    base.save_pretrained(tmp_path / "older")
    model = XAttnForConditionalGeneration.from_pretrained(tmp_path / "base")
    model.add_adapter(peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    model.save_pretrained(tmp_path / "lora")
    edit_json("adapter_config.json", setting("b/base", "base_model_name_or_path"))(tmp_path / "lora")
    in_cache(tmp_path / "cache", "b/base", "main", tmp_path / "base")
    in_cache(tmp_path / "cache", "b/base", "old", tmp_path / "older")
    in_cache(tmp_path / "cache", "a/lora", "tuned", tmp_path / "lora")
    return tmp_path, model


@torch.no_grad()
def test_the_base_has_its_own_revision(lora):
    """The adapter's revision asked of the base's repository, which has no such, or has another model under it."""
    folder, model = lora
    ids, cache = token_ids(), folder / "cache"
    loaded = XAttnForConditionalGeneration.from_pretrained("a/lora", revision="tuned", cache_dir=cache)
    assert torch.equal(loaded(ids).logits, model(ids).logits) and loaded.active_adapters() == ["default"]
    edit_json("adapter_config.json", setting("old", "revision"))(folder / "lora")
    found = find_peft(folder / "lora", {"cache_dir": cache})
    assert (found.base, found.revision) == ("b/base", "old")
    older = XAttnForConditionalGeneration.from_pretrained(folder / "lora", cache_dir=cache)
    changed = older.blocks[0].attn.q_proj
    changed = getattr(changed, "base_layer", changed).weight
    before = model.blocks[0].attn.q_proj
    assert torch.equal(changed, getattr(before, "base_layer", before).weight + 1), "main, and not the adapter's base"
    newer = XAttnForConditionalGeneration.from_pretrained(folder / "lora", cache_dir=cache, revision="main")
    assert torch.equal(newer(ids).logits, model(ids).logits), "a folder has no revisions: the caller's is the base's"


def test_the_token_reaches_the_adapter(lora, monkeypatch):
    """An adapter in a private repository that is asked for without the token that opened its configuration."""
    folder, _ = lora
    asked = []

    class Recorded(XAttnForConditionalGeneration):
        def load_adapter(self, name, *args, adapter_kwargs=None, **kwargs):
            asked.append(adapter_kwargs)
            return super().load_adapter(name, *args, adapter_kwargs=adapter_kwargs, **kwargs)

    Recorded.from_pretrained("a/lora", revision="tuned", cache_dir=folder / "cache", token="secret")
    assert asked == [{"cache_dir": folder / "cache", "token": "secret", "revision": "tuned"}]


def test_links_of_the_cache_are_followed(lora):
    """A snapshot of the Hub's cache, which consists of links, refused as one that leads elsewhere."""
    folder, _ = lora
    snapshot = folder / "cache" / "models--b--base" / "snapshots" / COMMITS["main"]
    assert (snapshot / "model.safetensors").is_symlink()
    XAttnForConditionalGeneration.from_pretrained(snapshot)
    (snapshot / "model.safetensors").unlink()
    (snapshot / "model.safetensors").symlink_to(folder / "base" / "model.safetensors")
    with pytest.raises(ValueError, match="leads out of it"):
        XAttnForConditionalGeneration.from_pretrained(snapshot)


@pytest.fixture
def first(tmp_path):
    return make_first(tmp_path)


@pytest.mark.parametrize("convert", [convert_checkpoint, export_checkpoint])
def test_an_adapter_beside_the_weights(convert, first, tmp_path):
    """An adapter of PEFT whose settings are copied, and whose weights are not."""
    pytest.importorskip("peft")
    first.save_pretrained(tmp_path / "whole", max_shard_size="60KB")
    shutil.copy(tmp_path / "whole" / "config.json", tmp_path / "whole" / "adapter_config.json")
    with pytest.raises(ValueError, match="adapter of PEFT.*[Mm]erge"):
        convert(tmp_path / "whole", tmp_path / "made")
    assert not os.path.exists(tmp_path / "made")
