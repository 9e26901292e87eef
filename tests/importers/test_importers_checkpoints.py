"""From folder to folder: what is refused, what is left behind, and how much memory it takes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, MllamaForConditionalGeneration, PreTrainedModel

from helpers.models.foreign_blocks import HEADS, kempner_block_state
from helpers.models.tiny_architectures import tiny_config
from helpers.models.tiny_mllama import VOCAB, make_mllama
from helpers.models.tiny_models import make_text
from hf_xattn import retrofit
from hf_xattn.commands.main import main
from hf_xattn.importers import export_checkpoint, import_checkpoint
from hf_xattn.importers.blocks import language_weights
from hf_xattn.importers.kempnerforge import import_kempnerforge


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
    refused("expected shape \\(96, 32\\) for language_model.lm_head.weight, got \\(96, 31\\)")
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
    refused("is not complete: no tensor for")
    for damaged in ("{", "[]", "{}", '{"weight_map": 3}'):
        (source / "model.safetensors.index.json").write_text(damaged)
        refused("index.json is damaged: expected")
    moved = {name: f"../{file}" for name, file in index["weight_map"].items()}
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": moved}))
    refused("index.json names '../model-.*': expected a ..safetensors file in its folder")
    weights.unlink(missing_ok=True)
    fresh()
    (output).mkdir()
    (output / "something").write_text("")
    refused("not an empty folder")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"model_type": "llama"}))
    refused("'llama' model, which cannot be imported", output=tmp_path / "new")
    (source / "config.json").unlink()
    refused("config.json", output=tmp_path / "new")
    source = tmp_path / "nowhere"
    refused("nowhere", output=tmp_path / "new")


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


def kempner(hidden_act):
    blocks = {index: kempner_block_state(index, hidden_act, HEADS) for index in (0, 1)}
    return {
        f"cross_attention_layers.{k}.{name}": tensor for k, block in blocks.items() for name, tensor in block.items()
    }


def test_options_of_the_command(tmp_path, capsys):
    """An activation that the command cannot name; options of another kind of source that are dropped."""
    make_text().save_pretrained(tmp_path / "text")
    torch.save(kempner("gelu"), tmp_path / "blocks.pt")
    make_mllama().save_pretrained(tmp_path / "theirs")
    file = ["import", tmp_path / "blocks.pt", "--text", tmp_path / "text", "--heads", HEADS, "--every", 2]
    wrong = {
        "--hidden-act": file,
        "because SOURCE is a state dict of KempnerForge, got 3": [*file, "--image-token-id", 3],
        "because SOURCE is a whole checkpoint, got 7": ["import", tmp_path / "theirs", "--heads", 7],
    }
    for words, command in wrong.items():
        assert main([str(word) for word in [*command, "--output", tmp_path / "out"]]) == 2
        assert words in capsys.readouterr().err and not (tmp_path / "out").exists()
    assert main([str(word) for word in [*file, "--hidden-act", "gelu", "--output", tmp_path / "out"]]) == 0


def test_a_quantized_folder_is_not_exported(tmp_path):
    """Integers of 8 bits that become weights."""
    import_checkpoint(make_mllama()).save_pretrained(tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    state = load_file(file)
    name = next(name for name in state if name.endswith("q_proj.weight") and "text_model" in name)
    scale = state[name].abs().amax(1)
    state[name] = (state[name] / scale[:, None] * 127).round().to(torch.int8)
    state[name.removesuffix("weight") + "SCB"] = scale
    save_file(state, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match="floating-point weights, got .*q_proj.weight, which is quantized"):
        export_checkpoint(tmp_path / "model", tmp_path / "out")


def test_what_has_changed_since_the_import(tmp_path):
    """The configuration and the dtype of the source, beside weights that were trained with others."""
    model = import_checkpoint(make_mllama())
    text = model.config.text_config
    text.rope_parameters, text.eos_token_id = {"rope_type": "default", "rope_theta": 1e4}, 7
    export_checkpoint(model, tmp_path / "out")
    found = MllamaForConditionalGeneration.from_pretrained(tmp_path / "out").config.text_config
    assert found.rope_parameters["rope_type"] == "default" and found.eos_token_id == 7
    model.config.image_visibility = "all"
    with pytest.raises(ValueError, match="`image_visibility`: expected 'latest_group', found 'all'"):
        export_checkpoint(model, tmp_path / "other")
    make_mllama(torch.bfloat16).save_pretrained(tmp_path / "half")
    whole = import_checkpoint(tmp_path / "half").float()
    export_checkpoint(whole, tmp_path / "whole")
    assert json.loads((tmp_path / "whole/config.json").read_text())["dtype"] == "float32"
    assert MllamaForConditionalGeneration.from_pretrained(tmp_path / "whole").dtype == torch.float32


def test_dropout_of_the_text_model():
    """Layers that train without the dropout of the source."""
    assert import_checkpoint(make_mllama(dropout=0.5)).config.text_config.attention_dropout == 0.5


def test_a_head_that_the_text_ties():
    """A head of the state dict that is lost, because the text model ties its own."""
    text = make_text("llama_tied")
    state = dict(text.state_dict())
    language_weights(text, state)
    with pytest.raises(ValueError, match="lm_head.weight with other values than model.embed_tokens.weight"):
        language_weights(text, {**state, "lm_head.weight": state["lm_head.weight"] + 1})


@pytest.mark.parametrize("source", ["model", "folder"])
def test_a_head_that_is_no_longer_tied_is_exported(source, tmp_path):
    """The embedding in place of a head that was trained by itself."""
    model = import_checkpoint(make_mllama())
    model.config.text_config.tie_word_embeddings = True
    head = model.get_output_embeddings()
    assert not torch.equal(head.weight, model.get_input_embeddings().weight[: len(head.weight)])
    if source == "folder":
        model.save_pretrained(tmp_path / "ours")
    export_checkpoint(model if source == "model" else tmp_path / "ours", tmp_path / "theirs")
    assert torch.equal(MllamaForConditionalGeneration.from_pretrained(tmp_path / "theirs").lm_head.weight, head.weight)


def test_two_tensors_of_one_place(tmp_path):
    """One of two tensors that is lost: averaged blocks beside those of the model, or an old name beside a new one."""
    state = kempner("silu")
    twice = {f"model.{name}": tensor for name, tensor in state.items()}
    twice |= {f"ema.{name}": tensor.clone() for name, tensor in state.items()}
    options = {"num_attention_heads": HEADS, "every": 2}
    import_kempnerforge(twice, make_text(), **options)
    twice["ema.cross_attention_layers.1.attn.q_proj.weight"] += 1
    with pytest.raises(ValueError, match="ema.cross_attention_layers.1.attn.q_proj.weight and a tensor of the same"):
        import_kempnerforge(twice, make_text(), **options)
    make_mllama().save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["language_model.lm_head.weight"] + 1
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="two tensors for model.text_model.lm_head.weight"):
        import_checkpoint(tmp_path)


def test_the_second_name_of_tied_weights_alone():
    """Trained embeddings that are dropped, because the file names them as the head (`safetensors.torch.save_model`)."""
    text = make_text("llama_tied")
    table = torch.randn(len(text.get_input_embeddings().weight) + 3, text.config.hidden_size)
    taken, config = language_weights(text, {"lm_head.weight": table})
    assert torch.equal(taken["lm_head.weight"], table) and config.vocab_size == len(table)


def test_numbers_that_are_learned_without_a_gradient():
    """The balance of experts, a buffer, which stays that of the base."""
    with torch.no_grad():
        text = AutoModelForCausalLM.from_config(tiny_config("deepseek_v3"))
    name = next(name for name in text.state_dict() if name.endswith("e_score_correction_bias"))
    balance = torch.arange(len(text.state_dict()[name]), dtype=torch.float32)
    assert torch.equal(language_weights(text, {name: balance})[0][name], balance)
    with pytest.raises(ValueError, match=f"holds {name} of shape"):
        language_weights(text, {name: balance[:-1]})
