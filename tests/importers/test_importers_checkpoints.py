"""From folder to folder: what is refused, what is left behind, and how much memory it takes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from helpers.models.tiny_mllama import VOCAB, make_mllama
from helpers.models.tiny_models import make_text
from hf_xattn import retrofit
from hf_xattn.importers import import_checkpoint


def without(path, name):
    tensors = load_file(path)
    del tensors[name]
    save_file(tensors, path, metadata={"format": "pt"})


def test_wrong_sources_are_refused(tmp_path):
    """Half a model on disk, found out when it is loaded."""
    source, output = tmp_path / "theirs", tmp_path / "ours"
    weights = source / "model.safetensors"

    def refused(message, **kwargs):
        before = sorted(path.name for path in tmp_path.iterdir())
        with pytest.raises(ValueError, match=message):
            import_checkpoint(source, kwargs.get("output", output))
        assert sorted(path.name for path in tmp_path.iterdir()) == before

    def fresh(size="5GB"):
        for path in source.glob("*"):
            path.unlink()
        make_mllama().save_pretrained(source, max_shard_size=size)

    fresh()
    without(weights, "language_model.model.layers.1.cross_attn_attn_gate")
    refused("not complete.*cross_attention_block.attn_gate")
    tensors = load_file(weights)
    save_file(tensors | {"surplus.weight": torch.zeros(1)}, weights)
    refused("does not have: surplus.weight")
    fresh()
    tensors = load_file(weights)
    tensors["language_model.lm_head.weight"] = torch.zeros(VOCAB, 31)
    save_file(tensors, weights)
    refused("language_model.lm_head.weight of shape \\(96, 31\\).*expected \\(96, 32\\)")
    fresh()
    weights.write_bytes(weights.read_bytes()[:-1000])
    refused("truncated")
    weights.write_bytes(b"")
    refused("truncated")
    fresh("20KB")
    next(iter(sorted(source.glob("model-*.safetensors")))).unlink()
    refused("not complete: model-00001.*is missing")
    fresh("20KB")
    index = json.loads((source / "model.safetensors.index.json").read_text())
    lost, file = next(iter(index["weight_map"].items()))
    without(source / file, lost)
    refused(f"the index names {lost}, which is not in its file")
    for damaged in ("{", "[]", "{}", '{"weight_map": 3}'):
        (source / "model.safetensors.index.json").write_text(damaged)
        refused("index.json is damaged: expected")
    moved = {name: f"../{file}" for name, file in index["weight_map"].items()}
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": moved}))
    refused("index.json names '../model-.*', which is not a file in the folder")
    weights.unlink(missing_ok=True)
    fresh()
    (output).mkdir()
    (output / "something").write_text("")
    refused("not an empty folder")
    refused("parent folder does not exist", output=tmp_path / "no" / "where")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"model_type": "llama"}))
    refused("'llama' model, which cannot be imported", output=tmp_path / "new")
    (source / "config.json").unlink()
    refused("no config.json", output=tmp_path / "new")
    source = tmp_path / "nowhere"
    refused("no such folder", output=tmp_path / "new")


def test_interrupted_import_leaves_nothing(tmp_path, monkeypatch):
    """Half a folder after an error in the middle (a full disk)."""
    make_mllama().save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    calls = []

    def full_disk(*args, **kwargs):
        calls.append(1)
        if len(calls) == 3:
            raise OSError("No space left on device")
        return save_file(*args, **kwargs)

    monkeypatch.setattr("hf_xattn.importers.conversion.save_file", full_disk)
    with pytest.raises(OSError, match="No space left"):
        import_checkpoint(tmp_path / "theirs", tmp_path / "ours")
    assert [path.name for path in tmp_path.iterdir()] == ["theirs"]

    def full_disk_at_the_end(self, folder, *args, **kwargs):
        (folder / "half").write_text("")
        raise OSError("No space left on device")

    monkeypatch.setattr(PreTrainedModel, "save_pretrained", full_disk_at_the_end)
    with pytest.raises(OSError, match="No space left"):
        import_checkpoint(make_mllama(), tmp_path / "ours")
    assert [path.name for path in tmp_path.iterdir()] == ["theirs"]


def test_the_model_has_the_name_of_its_folder(tmp_path):
    """An adapter (PEFT) that records a hidden folder as its base, which is gone when the import ends."""
    model = import_checkpoint(make_mllama(), tmp_path / "ours")
    assert model.name_or_path == model.config.name_or_path == str(tmp_path / "ours")
    make_mllama().save_pretrained(tmp_path / "theirs")
    model = import_checkpoint(tmp_path / "theirs")
    assert model.name_or_path == model.config.name_or_path == ""
    model.save_pretrained(tmp_path / "later")
    assert model.name_or_path == str(tmp_path / "later")


@pytest.mark.parametrize("read", [import_checkpoint, retrofit])
def test_two_saves_in_one_folder(read, tmp_path):
    """Weights of the older save, or those of the newer one, by the way that the folder is read."""
    folder = tmp_path / "saved"
    (make_mllama() if read is import_checkpoint else make_text()).save_pretrained(folder)
    assert (folder / "model.safetensors").is_file()
    whole = load_file(folder / "model.safetensors")
    first = dict.fromkeys(list(whole)[: len(whole) // 2], "model-00001-of-00002.safetensors")
    index = {**dict.fromkeys(whole, "model-00002-of-00002.safetensors"), **first}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    read(folder)  # an index without shards is what transformers leaves
    for file in set(index.values()):
        save_file({name: whole[name] for name in whole if index[name] == file}, folder / file, {"format": "pt"})
    with pytest.raises(ValueError, match=r"weights twice, in model.safetensors and in model-0000\d-of-00002"):
        read(folder)
    (folder / "model.safetensors").unlink()
    read(folder)


@pytest.mark.skipif(
    not Path("/proc/self/status").exists(),
    reason="the memory of a process is in /proc/self/status, which only Linux has",
)
@pytest.mark.slow
def test_memory_of_one_file(tmp_path):
    """A conversion that holds more than one file of weights at a time, so that large checkpoints
    need large machines.
    """
    text = {"vocab_size": VOCAB, "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 9}
    make_mllama(**text, cross_attention_layers=[3, 6]).save_pretrained(tmp_path / "theirs", max_shard_size="30MB")
    sizes = [file.stat().st_size for file in (tmp_path / "theirs").glob("*.safetensors")]
    assert sum(sizes) > 400e6 and max(sizes) < 40e6
    script = """
import re, sys
from pathlib import Path
from hf_xattn.importers import convert_checkpoint
from transformers import MllamaForConditionalGeneration
peak = lambda: int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024
before = peak()
convert_checkpoint(sys.argv[1], sys.argv[2])
print(peak() - before)
"""
    command = [sys.executable, "-c", script, tmp_path / "theirs", tmp_path / "ours"]
    result = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=True)
    assert int(result.stdout.split()[-1]) < 100e6, result.stdout
