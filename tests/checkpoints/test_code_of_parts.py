"""Folders that bring the code of a connector and a gate along."""

import importlib
import sys

import pytest
import torch
from transformers import AutoModelForImageTextToText

from helpers.models.tiny_models import make_model, pixels, randomize, token_ids
from hf_xattn import XAttnForConditionalGeneration, register_connector, register_gate, retrofit
from hf_xattn.utils.parts import CONNECTORS, GATES


IMAGES = {"pixel_values": pixels()}


CODE = """\
import torch


class Half(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.width = config.cross_attention_config.context_size
        self.scale = torch.nn.Parameter(torch.full((1,), {scale}))

    def forward(self, features):
        return torch.nn.functional.pad(features, (0, self.width - features.shape[-1])) * self.scale * {scale}


class Fixed(torch.nn.Module):
    def __init__(self, config):
        super().__init__()

    def forward(self, update, hidden_states):
        return update / 2
"""
REGISTERS = """

import hf_xattn

hf_xattn.register_connector("half", Half)
hf_xattn.register_gate("fixed", Fixed)
"""


@pytest.fixture(autouse=True)
def forgotten(monkeypatch):
    """Registers for a test alone. Calling it forgets all: as in a process that has not registered the parts."""
    ours = {parts: dict(parts._makers) for parts in (CONNECTORS, GATES)}

    def forget():
        for parts, makers in ours.items():
            monkeypatch.setattr(parts, "_makers", dict(makers))

    forget()
    return forget


@pytest.fixture(params=["", REGISTERS], ids=["registered by the caller", "by the file"])
def code(request):
    return CODE + request.param


@pytest.fixture
def model(tmp_path, monkeypatch, code):
    (tmp_path / "source").mkdir()
    (tmp_path / "source/sight_parts.py").write_text(code.format(scale=2.0))
    monkeypatch.syspath_prepend(tmp_path / "source")
    module = importlib.import_module("sight_parts")
    if code == CODE:
        register_connector("half", module.Half)
        register_gate("fixed", module.Fixed)
    yield make_model(connector_type="half", cross_attention_config={"gate": "fixed"})
    del sys.modules["sight_parts"]


@torch.no_grad()
def logits(model):
    return model(token_ids(), pixel_values=pixels()).logits


@pytest.mark.parametrize("auto_class", [AutoModelForImageTextToText, XAttnForConditionalGeneration])
def test_code_comes_along(model, code, tmp_path, forgotten, auto_class):
    """Code that is not saved, not run, run without being allowed, or lost in the second save."""
    expected = logits(model)
    model.save_pretrained(tmp_path / "first", with_code=True)
    assert (tmp_path / "first/sight_parts.py").read_text() == code.format(scale=2.0)
    forgotten()
    with pytest.raises(ValueError, match=r"register_gate\('fixed', ITS_CLASS\)"):
        auto_class.from_pretrained(tmp_path / "first")
    loaded = auto_class.from_pretrained(tmp_path / "first", trust_remote_code=True)
    assert torch.equal(logits(loaded), expected)
    loaded.save_pretrained(tmp_path / "second")
    forgotten()
    again = auto_class.from_pretrained(tmp_path / "second", trust_remote_code=True)
    assert torch.equal(logits(again), expected)


def test_two_folders_with_one_name(model, code, tmp_path, forgotten):
    """The class of the first folder, taken for that of the second: the weights fit, and the answers are wrong."""
    model.save_pretrained(tmp_path / "first", with_code=True)
    model.save_pretrained(tmp_path / "copy", with_code=True)
    model.save_pretrained(tmp_path / "other", with_code=True)
    (tmp_path / "other/sight_parts.py").write_text(code.format(scale=3.0))
    forgotten()
    first = XAttnForConditionalGeneration.from_pretrained(tmp_path / "first", trust_remote_code=True)
    copy = XAttnForConditionalGeneration.from_pretrained(tmp_path / "copy", trust_remote_code=True)
    assert torch.equal(logits(first), logits(copy))
    with pytest.raises(ValueError, match="new `name` for a connector, got 'half'"):
        XAttnForConditionalGeneration.from_pretrained(tmp_path / "other", trust_remote_code=True)


def test_a_registered_class_comes_first(model, tmp_path):
    """As in transformers: what the caller has registered is theirs, and no code of a folder runs."""
    expected = logits(model)
    model.save_pretrained(tmp_path / "first", with_code=True)
    (tmp_path / "first/sight_parts.py").write_text("raise SystemExit")
    loaded = XAttnForConditionalGeneration.from_pretrained(tmp_path / "first", trust_remote_code=True)
    assert torch.equal(logits(loaded), expected)
    loaded.save_pretrained(tmp_path / "second")
    assert not (tmp_path / "second/sight_parts.py").exists()
    assert "XAttnConnector" not in loaded.config.auto_map


def test_a_class_without_a_file(tmp_path):
    """A folder that says nothing of what it lacks."""
    made = type("Made", (torch.nn.Module,), {"__init__": lambda self, config: torch.nn.Module.__init__(self)})
    made.forward = lambda self, update, hidden_states: update
    made.__module__ = "__main__"
    register_gate("made", made)
    model = make_model(cross_attention_config={"gate": "made"})
    with pytest.raises(ValueError, match="the class of the gate 'made' in a file of its own"):
        model.save_pretrained(tmp_path / "saved", with_code=True)
    assert not (tmp_path / "saved/config.json").exists()


@torch.no_grad()
def logits_of(model):
    return model(token_ids(), **IMAGES).logits


def small(model, folder, seed=2):
    randomize(model, seed).eval().save_pretrained(folder, adapter_only=True)
    return model


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
