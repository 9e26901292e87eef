"""Checkpoints of added weights, adapters of PEFT and files of importers that a stranger may bring. See
`test_damaged_checkpoints.py`.
"""

import json
import os
import pickle

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel
from transformers.integrations.peft import MIN_PEFT_VERSION

from helpers.inputs.damaged_checkpoints import Runs, edit_json, fresh, setting
from helpers.models.tiny_mllama import make_mllama
from helpers.models.tiny_models import make_model, make_text, vision_config
from hf_xattn import XAttnForConditionalGeneration, retrofit
from hf_xattn.importers import convert_checkpoint
from hf_xattn.importers.blocks import read_state_dict
from hf_xattn.importers.kempnerforge import import_kempnerforge


MANIFEST, WEIGHTS = "cross_attention.json", "cross_attention.safetensors"


def refused(cases, source, work, run):
    """Each change of a copy of a folder is refused."""
    wrong = {}
    for name, change in cases.items():
        folder = fresh(source, work / "copy")
        change(folder)
        try:
            run(folder)
        except Exception:
            continue
        wrong[name] = "taken"
    assert not wrong, "\n".join(f"{name}: {why}" for name, why in wrong.items())


def manifest_cases():
    values = {
        ("format",): (99, "1", None, [1]),
        ("files",): (None, [], "x", {}, [3], ["none.safetensors"], ["../outside.safetensors"], [""], ["config.json"]),
        ("text_base",): (None, [], "x", {}),
        ("text_base", "name_or_path"): (None, 3, [], "/no/such/folder"),
        ("text_base", "prefix"): (None, 3),
        ("text_base", "dtype"): ("load", "float33", 3, None),
        ("text_base", "dtypes"): ([], {"model.norm.weight": "save"}, {"model.norm.weight": 3}),
        ("text_base", "absent"): (None, ["model.norm.weight"]),
        ("text_base", "subfolder"): ("../../other", "/etc", 3),
        ("text_base", "gguf_file"): ("../../other.gguf", 3),
        ("text_base", "fingerprint"): (None, "x"),
        ("quantization_config",): (3, "x", []),
    }
    cases = {
        f"{'.'.join(path)} = {str(value)[:30]}": edit_json(MANIFEST, setting(value, *path))
        for path, several in values.items()
        for value in several
    }
    for name in ("../outside.safetensors", "/etc/passwd.safetensors", "a/../../b.safetensors", ""):
        cases[f"file {name!r}"] = edit_json(MANIFEST, setting({name: {}}, "files"))  # of the first format
    for size in (0, 7, 100, 5000):
        cases[f"weights of {size} bytes"] = lambda folder, n=size: os.truncate(folder / WEIGHTS, n)

    def link(folder):
        (folder / WEIGHTS).rename(folder.parent / "elsewhere.safetensors")
        (folder / WEIGHTS).symlink_to(folder.parent / "elsewhere.safetensors")

    cases["a link"] = link
    return cases


def test_adapters_are_refused(tmp_path):
    """A manifest that names files elsewhere or functions of torch, or leaves weights out: then they are random."""
    make_text().save_pretrained(tmp_path / "text")
    model = retrofit(tmp_path / "text")
    model.save_pretrained(tmp_path / "added", adapter_only=True)
    cases = manifest_cases()
    assert len(cases) >= 40
    refused(cases, tmp_path / "added", tmp_path, XAttnForConditionalGeneration.from_pretrained)


def test_bases_are_refused(tmp_path):
    """A text model of a stranger or vision tower, which `retrofit` hands to transformers."""
    make_text().save_pretrained(tmp_path / "text")
    torch.manual_seed(0)
    AutoModel.from_config(vision_config()).save_pretrained(tmp_path / "vision")

    def pickled(folder):
        (folder / "model.safetensors").unlink()
        with (folder / "pytorch_model.bin").open("wb") as file:
            pickle.dump(Runs(tmp_path / "run"), file)

    def integers(folder):
        tensors = load_file(folder / "model.safetensors")
        save_file({name: tensor.int() for name, tensor in tensors.items()}, folder / "model.safetensors")

    def link(folder):
        (folder / "model.safetensors").rename(tmp_path / "elsewhere")
        (folder / "model.safetensors").symlink_to(tmp_path / "elsewhere")

    cases = {
        "pickled": pickled,
        "integers": integers,
        "a link": link,
        "cut off": lambda folder: os.truncate(folder / "model.safetensors", 5000),
        "no header": lambda folder: os.truncate(folder / "model.safetensors", 20),
    }
    sizes = {
        f"{name} = {value}": edit_json("config.json", setting(value, name))
        for name in ("hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads")
        for value in (10**9, 10**30, "32")
    }
    refused(cases | sizes, tmp_path / "text", tmp_path, retrofit)
    refused(cases | sizes, tmp_path / "vision", tmp_path, lambda folder: retrofit(tmp_path / "text", folder))
    assert not (tmp_path / "run").exists()


def test_imports_are_refused(tmp_path):
    """An error from inside of Python, integers for weights, and a copy of a file that a link points to."""
    source = tmp_path / "theirs"
    make_mllama().save_pretrained(source)
    text = lambda **fields: edit_json("config.json", lambda content: content["text_config"].update(fields))  # noqa: E731

    def integers(folder):
        tensors = load_file(folder / "model.safetensors")
        name = next(name for name in tensors if name.endswith("q_proj.weight"))
        save_file({**tensors, name: tensors[name].int()}, folder / "model.safetensors")

    def side_file(folder):
        (tmp_path / "secret").write_text("secret")
        (folder / "tokenizer.model").symlink_to(tmp_path / "secret")

    def link(folder):
        (folder / "model.safetensors").rename(tmp_path / "elsewhere")
        (folder / "model.safetensors").symlink_to(tmp_path / "elsewhere")

    cases = {
        "a layer out of range": text(cross_attention_layers=[1, 99]),
        "a negative layer": text(cross_attention_layers=[-1]),
        "10^9 layers": text(num_hidden_layers=10**9),
        "2000 layers": text(num_hidden_layers=2000),
        "integers": integers,
        "a side file that is a link": side_file,
        "weights that are a link": link,
        "cut off": lambda folder: os.truncate(folder / "model.safetensors", 5000),
    }
    sizes = {
        "layers of another kind": text(cross_attention_layers=["1"]),
        "no heads": text(num_attention_heads=0),
        "no text": edit_json("config.json", setting(3, "text_config")),
        "a width of 10^12": text(hidden_size=10**12),
        "a vocabulary of 10^12": text(vocab_size=10**12),
    }
    refused(cases | sizes, source, tmp_path, lambda folder: convert_checkpoint(folder, tmp_path / "ours"))
    assert not (tmp_path / "ours").exists() and not list(tmp_path.glob(".ours*"))


def test_state_dicts_are_refused(tmp_path):
    """A file of `torch.save` that runs code or is cut off, and weights of integers."""
    file = tmp_path / "state.pt"
    torch.save({"a": torch.zeros(4), "b": Runs(tmp_path / "run")}, file)
    with pytest.raises(pickle.UnpicklingError):
        read_state_dict(file)
    torch.save({"a": torch.zeros(1000)}, file)
    whole = file.read_bytes()
    for size in (0, 1, 100, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:size])
        with pytest.raises((RuntimeError, OSError, EOFError, pickle.UnpicklingError)):
            read_state_dict(file)
    assert not (tmp_path / "run").exists()
    weights = {"attn.q_proj.weight": torch.zeros(32, 32, dtype=torch.int32), "attn.k_proj.weight": torch.zeros(32, 32)}
    state = {f"cross_attention_layers.0.{name}": tensor for name, tensor in weights.items()}
    with pytest.raises(ValueError, match="`state_dict`"):
        import_kempnerforge(state, make_text(), num_attention_heads=4, every=4, hidden_act="gelu")


def test_adapters_of_peft_are_refused(tmp_path):
    """Pickled weights, a rank that takes all memory, and a base that is no name."""
    peft = pytest.importorskip("peft", minversion=MIN_PEFT_VERSION)
    base = make_model()
    base.save_pretrained(tmp_path / "base")
    model = XAttnForConditionalGeneration.from_pretrained(tmp_path / "base")
    model.add_adapter(peft.LoraConfig(r=4, target_modules=["q_proj"]))
    model.save_pretrained(tmp_path / "lora")
    config, weights = "adapter_config.json", "adapter_model.safetensors"

    def pickled(folder):
        (folder / weights).unlink()
        with (folder / "adapter_model.bin").open("wb") as file:
            pickle.dump(Runs(tmp_path / "run"), file)

    cases = {
        "pickled": pickled,
        "cut off": lambda folder: os.truncate(folder / weights, 500),
        **{f"r = {r}": edit_json(config, setting(r, "r")) for r in (10**9, -1, "4", 1.5)},
        "another rank for one": edit_json(config, setting({"q_proj": 10**9}, "rank_pattern")),
        **{f"base {name}": edit_json(config, setting(name, "base_model_name_or_path")) for name in (None, 3, "")},
        "a revision": edit_json(config, setting(3, "revision")),
        "no JSON": lambda folder: (folder / config).write_text("{"),
    }
    refused(cases, tmp_path / "lora", tmp_path, XAttnForConditionalGeneration.from_pretrained)
    assert not (tmp_path / "run").exists()
    plain = XAttnForConditionalGeneration.from_pretrained(tmp_path / "base")
    names = list(plain.state_dict())
    for case in ("pickled", "cut off", "r = 1000000000"):
        folder = fresh(tmp_path / "lora", tmp_path / "copy")
        cases[case](folder)
        with pytest.raises(ValueError):
            plain.load_adapter(str(folder))
        assert list(plain.state_dict()) == names, "half an adapter"
    assert json.loads((tmp_path / "lora" / config).read_text())["r"] == 4
    assert XAttnForConditionalGeneration.from_pretrained(tmp_path / "lora").active_adapters() == ["default"]
