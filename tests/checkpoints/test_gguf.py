"""GGUF files as text models: the base's logits, tokenizer and chat template, and nothing left behind that hinders
saving.
"""

import json
import os
import shutil

import gguf
import numpy as np
import pytest
import torch
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
    GgufConfig,
    SiglipImageProcessorPil,
    Trainer,
    TrainingArguments,
)

import hf_xattn
from helpers.models import tiny_gguf
from helpers.models.foreign_blocks import kempner_block_state
from helpers.models.tiny_gguf import CHAT_TEMPLATE, write_gguf
from helpers.models.tiny_models import make_text, needs_part, pixels, randomize, vision_config
from hf_xattn import XAttnForConditionalGeneration, freeze_base, retrofit
from hf_xattn.checkpoints.bases import load_text, load_vision
from hf_xattn.commands.main import main
from hf_xattn.utils import transformers_api


QKV = (("q", 32), ("k", 16), ("v", 16))  # number of biases of each projection


IDS = torch.tensor([[1, 70, 80, 200, 90]])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf")
    write_gguf(
        path / "tiny.gguf", layers=2
    )  # transformers looks names up for each layer and module: 4 take four times as long
    AutoModel.from_config(vision_config()).save_pretrained(path / "vision")
    SiglipImageProcessorPil(size={"height": 32, "width": 32}).save_pretrained(path / "vision")
    return path


@torch.no_grad()
def logits(model, **images):
    return model(IDS, **images).logits


def theirs(folder, **load_kwargs):
    return AutoModelForCausalLM.from_pretrained(folder, gguf_file="tiny.gguf", **load_kwargs)


@pytest.mark.parametrize(
    ("how", "dtype"),
    [(how, None) for how in ("path", "string", "keyword", "subfolder", "loaded")]
    + [("path", "auto"), ("path", torch.bfloat16), ("loaded", torch.bfloat16)],
)
def test_fresh_logits_are_the_base_s(folder, how, dtype, monkeypatch):
    """Weights of another dtype, of another file of the same name, or in another order; marks of a quantizer that only
    reads files.
    """
    options = {} if dtype is None else {"dtype": dtype}
    base = theirs(folder, **options)
    monkeypatch.chdir(folder.parent)
    model = {
        "path": lambda: retrofit(folder / "tiny.gguf", every=2, **options),
        "string": lambda: retrofit(f"{folder.name}/tiny.gguf", every=2, **options),
        "keyword": lambda: retrofit(str(folder), every=2, gguf_file="tiny.gguf", **options),
        "subfolder": lambda: retrofit(folder.parent, gguf_file="tiny.gguf", subfolder=folder.name, every=2, **options),
        "loaded": lambda: retrofit(theirs(folder, **options), every=2),
    }[how]()
    assert model.dtype == base.dtype and torch.equal(logits(model), logits(base))
    for part in (model, model.model, model.model.text_model):
        assert getattr(part, "hf_quantizer", None) is None and not getattr(part, "is_quantized", False)
        assert "quantization_config" not in json.dumps(part.config.to_dict())
        assert not getattr(part.config, "_is_quantized", False)


def test_a_file_of_the_same_name_in_the_current_folder(folder, tmp_path, monkeypatch):
    """transformers takes the weights of a file in the current folder before those of the folder that was named."""
    write_gguf(tmp_path / "tiny.gguf", seed=5, layers=2)
    expected = logits(theirs(folder))
    monkeypatch.chdir(tmp_path)
    assert torch.equal(logits(load_text(folder, gguf_file="tiny.gguf")), expected)


@pytest.mark.parametrize("loaded", [False, True])
def test_whole_model_is_saved_and_trains(folder, tmp_path, loaded):
    """`save_pretrained` or `Trainer` that refuses a quantized model, where nothing is quantized."""
    model = retrofit(theirs(folder) if loaded else folder / "tiny.gguf", folder / "vision", every=2)
    model.save_pretrained(tmp_path / "fresh")
    again = AutoModelForImageTextToText.from_pretrained(tmp_path / "fresh")
    assert torch.equal(logits(again), logits(theirs(folder)))
    freeze_base(model)
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    row = {"input_ids": IDS[0], "labels": IDS[0], "pixel_values": pixels(1)[0]}
    arguments = TrainingArguments(tmp_path, max_steps=2, report_to="none", use_cpu=True, learning_rate=0.1)
    Trainer(model, arguments, train_dataset=[row] * 4).train()
    model.save_pretrained(tmp_path / "trained")
    again = AutoModelForImageTextToText.from_pretrained(tmp_path / "trained")
    image = {"pixel_values": pixels(1)}
    assert torch.equal(logits(again, **image), logits(model.eval(), **image))
    moved = {name for name, weight in again.named_parameters() if not torch.equal(weight, before[name])}
    assert moved and not any(name.startswith("model.text_model") and "cross_att" not in name for name in moved)


@pytest.mark.parametrize("how", ["path", "keyword", "loaded", "bfloat16"])
def test_adapter_only_on_a_gguf_base(folder, tmp_path, how):
    """A folder that looks for safetensors beside the GGUF file; weights that are unpacked into another dtype; a copy
    of the base.
    """
    model = {
        "path": lambda: retrofit(folder / "tiny.gguf", every=2),
        "keyword": lambda: retrofit(folder, every=2, gguf_file="tiny.gguf"),
        "loaded": lambda: retrofit(theirs(folder), every=2),
        "bfloat16": lambda: retrofit(folder / "tiny.gguf", every=2, dtype=torch.bfloat16),
    }[how]()
    randomize(model)
    model.save_pretrained(tmp_path / "added", adapter_only=True)
    record = json.loads((tmp_path / "added" / "cross_attention.json").read_text())["text_base"]
    assert (record["name_or_path"], record["gguf_file"]) == (str(folder), "tiny.gguf")
    states = {"cross_attention_states": torch.randn(1, 3, 32, dtype=model.dtype)}
    again = XAttnForConditionalGeneration.from_pretrained(tmp_path / "added")
    assert again.dtype == model.dtype and torch.equal(logits(again, **states), logits(model, **states))
    again.save_pretrained(tmp_path / "more", adapter_only=True)
    again = XAttnForConditionalGeneration.from_pretrained(tmp_path / "more")
    assert torch.equal(logits(again, **states), logits(model, **states))
    weights = sum(file.stat().st_size for file in (tmp_path / "more").glob("*.safetensors"))
    assert weights < 0.9 * sum(p.nbytes for p in model.parameters())


def test_adapter_only_on_a_gguf_base_that_moved(folder, tmp_path, caplog):
    """An error about safetensors; a base that is another and not worth a word; a base whose file is gone and not
    named.
    """
    shutil.copy(folder / "tiny.gguf", tmp_path / "here.gguf")
    model = randomize(retrofit(tmp_path / "here.gguf", every=2))
    model.save_pretrained(tmp_path / "added", adapter_only=True)
    os.rename(tmp_path / "here.gguf", tmp_path / "there.gguf")
    with pytest.raises(ValueError, match=r"base .*here\.gguf, where there is no file now. Pass `text_base=`"):
        XAttnForConditionalGeneration.from_pretrained(tmp_path / "added")
    with pytest.raises(ValueError, match=r"base .*here\.gguf, where there is no file now. Pass `text_base=`"):
        model.save_pretrained(tmp_path / "again", adapter_only=True)
    load_text(tmp_path / "there.gguf").save_pretrained(tmp_path / "converted")
    expected = logits(model, cross_attention_states=torch.ones(1, 3, 32))
    caplog.clear()
    for base in (tmp_path / "there.gguf", tmp_path / "converted"):
        again = XAttnForConditionalGeneration.from_pretrained(tmp_path / "added", text_base=base)
        assert torch.equal(logits(again, cross_attention_states=torch.ones(1, 3, 32)), expected)
        again.save_pretrained(tmp_path / f"on {base.name}", adapter_only=True)
        XAttnForConditionalGeneration.from_pretrained(tmp_path / f"on {base.name}")
        model.save_pretrained(tmp_path / f"named {base.name}", adapter_only=True, text_base=base)
    assert not caplog.records
    # A folder's configuration says nothing of the file that it was converted from.
    assert "gguf" not in (tmp_path / "converted" / "config.json").read_text()
    randomize(retrofit(tmp_path / "converted", every=2)).save_pretrained(tmp_path / "on", adapter_only=True)
    assert "gguf_file" not in (tmp_path / "on" / "cross_attention.json").read_text()


def test_a_file_of_the_hub(folder, tmp_path):
    """A file that is fetched without its commit; an adapter-only folder that names a repository and no file in it."""
    commit = "0" * 40
    repository = tmp_path / "models--someone--tiny-GGUF"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    (repository / "snapshots" / commit).mkdir(parents=True)
    shutil.copy(folder / "tiny.gguf", repository / "snapshots" / commit)
    hub = {"cache_dir": str(tmp_path)}
    model = randomize(retrofit("someone/tiny-GGUF", gguf_file="tiny.gguf", every=2, **hub))
    assert torch.equal(logits(model), logits(theirs(folder)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
        model.save_pretrained(tmp_path / "added", adapter_only=True)
    record = json.loads((tmp_path / "added" / "cross_attention.json").read_text())["text_base"]
    assert [record[key] for key in ("name_or_path", "revision", "gguf_file")] == [
        "someone/tiny-GGUF",
        None if transformers_api.is_before("5.18.0") else commit,  # before, a configuration beside the file told it
        "tiny.gguf",
    ]
    again = XAttnForConditionalGeneration.from_pretrained(tmp_path / "added", **hub)
    states = torch.ones(1, 3, 32)
    assert torch.equal(logits(again, cross_attention_states=states), logits(model, cross_attention_states=states))
    with pytest.raises(OSError, match="missing.gguf|load the files"):
        retrofit("someone/tiny-GGUF", gguf_file="missing.gguf", **hub)


def test_packed_weights_are_not_saved(folder, tmp_path):
    """A folder of bytes that nothing can load; advice that ends in another error."""
    from transformers.integrations.gguf.utils import GgufLinear
    from transformers.quantizers.quantizer_gguf import GgufHfQuantizer

    text = theirs(folder)
    text.model.layers[0].self_attn.q_proj = GgufLinear(32, 32, ggml_type=8)  # as where transformers has kernels
    assert isinstance(text.hf_quantizer, GgufHfQuantizer)
    model = retrofit(text, every=2)
    with pytest.raises(ValueError, match="packed weights of a GGUF file.*GgufConfig\\(dequantize=True\\)"):
        model.save_pretrained(tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_the_tokenizer_in_an_old_transformers(folder, tmp_path, capsys, monkeypatch):
    """A tokenizer whose text ends with the token that begins it."""
    monkeypatch.setattr(transformers_api.transformers, "__version__", "5.17.0")
    assert main(["retrofit", str(folder / "tiny.gguf"), "--output", str(tmp_path / "out")]) == 2
    assert "The tokenizer of tiny.gguf needs transformers 5.18.0 or newer, got 5.17.0." in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@needs_part("special tokens of a GGUF file")
def test_retrofit_of_a_gguf_file_keeps_tokenizer_and_template(folder, tmp_path, capsys):
    """A model without its tokenizer, or a tokenizer without chat template, special tokens or images."""
    for index, source in enumerate(([folder / "tiny.gguf"], [folder, "--gguf-file", "tiny.gguf"])):
        out = tmp_path / str(index)
        given = [*source, "--vision", folder / "vision", "--every", 2, "--output", out]
        assert main(["retrofit", *map(str, given)]) == 0, capsys.readouterr().err
        model, processor = AutoModelForImageTextToText.from_pretrained(out), AutoProcessor.from_pretrained(out)
        assert torch.equal(logits(model), logits(theirs(folder)))
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file="tiny.gguf")
        assert processor.tokenizer.special_tokens_map == tokenizer.special_tokens_map
        assert tokenizer.pad_token == "<|endoftext|>" and tokenizer.eos_token == "<|im_end|>"
        assert processor.tokenizer.chat_template == tokenizer.chat_template == CHAT_TEMPLATE
        chat = [{"role": "user", "content": [{"type": "image", "image": None}, {"type": "text", "text": "hello"}]}]
        assert "hello<|im_end|>\n" in processor.apply_chat_template(chat, tokenize=False)
        assert model.generation_config.eos_token_id == 2 and model.generation_config.pad_token_id == 0
    assert main(["generate", str(folder / "tiny.gguf"), "--prompt", "hello"]) == 2
    assert "hf-xattn retrofit" in capsys.readouterr().err
    file = write_gguf(tmp_path / "mute.gguf", tokenizer=False)
    assert main(["retrofit", str(file), "--output", str(tmp_path / "mute")]) == 0
    assert "No processor saved" in capsys.readouterr().out


@needs_part("special tokens of a GGUF file")
def test_import_onto_a_gguf_file(folder, tmp_path, capsys):
    """Blocks for a language model that is a file: an error, or a folder without tokenizer."""
    state = {f"cross_attention_layers.0.{name}": tensor for name, tensor in kempner_block_state(hidden=32).items()}
    torch.save(state, tmp_path / "blocks.pt")
    given = ["import", tmp_path / "blocks.pt", "--text", folder / "tiny.gguf", "--heads", 2, "--every", 2]
    assert main([*map(str, given), "--output", str(tmp_path / "ours")]) == 0, capsys.readouterr().err
    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "ours")
    assert torch.equal(logits(model), logits(theirs(folder)))
    assert AutoTokenizer.from_pretrained(tmp_path / "ours").chat_template == CHAT_TEMPLATE


def test_files_that_are_none(folder, tmp_path):
    """Weights that stay random; a file that is silently not read."""
    whole = (folder / "tiny.gguf").read_bytes()
    broken = {
        "none.gguf": (b"PK\x03\x04" + whole[4:], "starts with b'PK"),
        "empty.gguf": (b"", "cut off"),
        "head.gguf": (whole[:100], "cut off"),
        "data.gguf": (whole[:-2000], ""),
    }
    for name, (content, words) in broken.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=rf"(?s){name}.*{words}" if words else ""):
            retrofit(tmp_path / name)
    write_gguf(tmp_path / "new.gguf", architecture="bitterllama")
    with pytest.raises(ValueError, match="bitterllama"):
        retrofit(tmp_path / "new.gguf")
    for source, options in ((tmp_path / "missing.gguf", {}), (folder, {"gguf_file": "missing.gguf"})):
        with pytest.raises(FileNotFoundError, match=r"missing\.gguf"):
            retrofit(source, **options)
    with pytest.raises(OSError, match="nowhere"):
        retrofit(tmp_path / "nowhere", gguf_file="tiny.gguf")
    with pytest.raises(ValueError, match="`gguf_file` .*`text` is loaded already"):
        retrofit(make_text(), folder / "vision", gguf_file="tiny.gguf")
    with pytest.raises(ValueError, match="`gguf_file` is for text models"):
        load_vision(folder, gguf_file="tiny.gguf")
    with pytest.raises((ValueError, OSError)):
        retrofit(make_text(), folder / "tiny.gguf")


def test_files_with_a_part_of_a_model(tmp_path):
    """Random weights in place of those that are in another file, with a warning among many lines."""
    write_gguf(tmp_path / "lacks.gguf", leave_out="blk.1.", layers=2)
    with pytest.raises(ValueError, match="no whole model: 9 weights are missing.*model.layers.1.*--merge"):
        retrofit(tmp_path / "lacks.gguf")


def test_packed_on_request(folder):
    """A `quantization_config` that is overruled. Without kernels transformers unpacks what it was told
    to keep packed.
    """
    assert torch.equal(logits(retrofit(folder / "tiny.gguf", quantization_config=GgufConfig())), logits(theirs(folder)))
    assert hf_xattn.retrofit is retrofit


@pytest.mark.parametrize(
    "more, words",
    [
        ({"more": {"rope_freqs.weight": np.full(4, 2, np.float32)}}, r"scales its rotary positions \(rope_freqs"),
        ({"rope_scaling": gguf.RopeScalingType.LINEAR}, r"scales its rotary positions \(linear\)"),
        ({"more": {"blk.0.attn_q.bias": np.ones(32, np.float32)}}, r"holds 1 biases \(blk\.\*\.attn_q\.bias\) with 32"),
    ],
)
def test_what_transformers_leaves_out_is_refused(more, words, tmp_path):
    """Positions or biases of a file that the model lacks: it would compute something else, and say nothing."""
    path = write_gguf(tmp_path / "text.gguf", **more)
    with pytest.raises(ValueError, match=words):
        retrofit(path, cross_attention_layers=[1])


def test_more_biases_than_the_class_reads(tmp_path):
    """A bias that is left out, because the class has biases elsewhere."""
    more = {f"blk.{layer}.attn_{name}.bias": np.ones(size, np.float32) for layer in range(4) for name, size in QKV}
    whole = write_gguf(tmp_path / "whole.gguf", architecture="qwen2", more=more)
    assert retrofit(whole, cross_attention_layers=[1]).config.text_config.model_type == "qwen2"
    more["blk.0.attn_output.bias"] = np.ones(32, np.float32)
    path = write_gguf(tmp_path / "text.gguf", architecture="qwen2", more=more)
    with pytest.raises(ValueError, match=r"holds 13 biases .*attn_output.* with 288 values, .*Qwen2.* reads 256 of"):
        retrofit(path, cross_attention_layers=[1])


def test_unscaled_positions_are_no_reason_to_refuse(tmp_path):
    """A file that says that nothing is scaled."""
    path = write_gguf(tmp_path / "text.gguf", rope_scaling=gguf.RopeScalingType.NONE)
    assert len(retrofit(path, cross_attention_layers=[1]).blocks) == 1


def test_the_subfolder_of_a_tower_beside_a_gguf_file(tmp_path):
    """Another tower than the one that is named."""
    tiny_gguf.write_gguf(tmp_path / "text.gguf")
    for seed, folder in enumerate((tmp_path / "vision", tmp_path / "vision" / "tower")):
        torch.manual_seed(seed)
        AutoModel.from_config(vision_config()).save_pretrained(folder)
    model = retrofit(tmp_path / "text.gguf", tmp_path / "vision", subfolder="tower")
    expected = AutoModel.from_pretrained(tmp_path / "vision" / "tower").state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in model.model.vision_tower.state_dict().items())
