"""Folders that a killed process left between two states, and whoever comes next: a load by another way, or another save."""

import json
import os
import shutil
import threading

import pytest
import torch
from tiny_models import make_model
from transformers import AutoModelForImageTextToText

from hf_xattn import XAttnForConditionalGeneration
from hf_xattn.utils.whole_folder import WholeFolder, finish_interrupted


HIDDEN = ".hf_xattn-save-0123456789abcdef"


def interrupt(folder, new, first, stale=(), **journal):
    """Leaves `folder` as a process does that is killed when the first file of the folder `new` has its place."""
    waiting = folder / HIDDEN / "model"
    shutil.copytree(new, waiting)
    (waiting / first).replace(folder / first)
    entries = {"folder": "model", "first": first, "stale": list(stale), **journal}
    (folder / HIDDEN / "journal.json").write_text(json.dumps(entries))


def query_of(model):
    layer = model.blocks[0].attn.q_proj
    return getattr(layer, "base_layer", layer).weight


@pytest.mark.parametrize("load_class", [XAttnForConditionalGeneration, AutoModelForImageTextToText])
def test_the_base_of_an_adapter(load_class, tmp_path):
    """Old weights under the new configuration, because the folder that was interrupted is the base of the one that is loaded."""
    peft = pytest.importorskip("peft")
    model = make_model()
    model.save_pretrained(tmp_path / "base")
    model.add_adapter(peft.LoraConfig(r=2, target_modules=["q_proj"]))
    model.save_pretrained(tmp_path / "lora")
    newer = make_model()
    newer.blocks[0].attn.q_proj.weight.data.add_(1)
    newer.save_pretrained(tmp_path / "newer")
    interrupt(tmp_path / "base", tmp_path / "newer", "config.json")
    assert torch.equal(query_of(load_class.from_pretrained(tmp_path / "lora")), query_of(newer))
    assert not (tmp_path / "base" / HIDDEN).exists()


@pytest.mark.parametrize("way", ["load_adapter", "auto", "from_pretrained"])
def test_an_adapter(way, tmp_path):
    """The rank and scale of a new adapter (PEFT) with the weights of the old one."""
    peft = pytest.importorskip("peft")
    make_model().save_pretrained(tmp_path / "base")
    for seed, name in enumerate(("old", "new")):
        torch.manual_seed(seed)
        model = XAttnForConditionalGeneration.from_pretrained(tmp_path / "base")
        options = {"target_modules": ["q_proj"], "init_lora_weights": False}
        model.add_adapter(peft.LoraConfig(r=2, lora_alpha=2 + seed, **options))
        model.save_pretrained(tmp_path / name)
    interrupt(tmp_path / "old", tmp_path / "new", "adapter_config.json")
    if way == "load_adapter":
        loaded = XAttnForConditionalGeneration.from_pretrained(tmp_path / "base")
        loaded.load_adapter(tmp_path / "old")
    else:
        load_class = AutoModelForImageTextToText if way == "auto" else XAttnForConditionalGeneration
        loaded = load_class.from_pretrained(tmp_path / "old")
    assert loaded.peft_config["default"].lora_alpha == 3
    found, expected = (each.blocks[0].attn.q_proj.lora_A["default"].weight for each in (loaded, model))
    assert torch.equal(found, expected)


def test_a_save_after_one_that_was_killed(tmp_path):
    """Files of the killed save, which is the older one, that later replace those of the newer one."""
    old, new = tmp_path / "old", tmp_path / "new"
    for folder in (old, new):
        folder.mkdir()
        for name in ("config.json", "weights"):
            (folder / name).write_text(folder.name)
    with WholeFolder(tmp_path / "model") as fresh:
        (fresh / "config.json").write_text("oldest")
    with WholeFolder(tmp_path / "model") as fresh:
        interrupt(tmp_path / "model", old, "config.json")  # by a process that began earlier
        for path in new.iterdir():
            shutil.copy(path, fresh)
    finish_interrupted(tmp_path / "model")
    assert {path.name: path.read_text() for path in (tmp_path / "model").iterdir()} == {
        "config.json": "new",
        "weights": "new",
    }


@pytest.mark.skipif(not hasattr(os, "fork"), reason="folders are locked on POSIX alone")
def test_files_move_in_turns(tmp_path, monkeypatch):
    """The configuration of one save with the weights of another one that ended at the same time."""
    replace, moved, done = os.replace, threading.Event(), threading.Event()
    (tmp_path / "model").mkdir()

    def slowly(source, target):
        replace(source, target)
        if threading.current_thread() is not threading.main_thread() and not moved.is_set():
            moved.set()
            done.wait(0.5)  # the main thread waits for its turn, and cannot be done

    def write(folder, text):
        for name in ("config.json", "weights"):
            (folder / name).write_text(text)

    def save():
        with WholeFolder(tmp_path / "model") as fresh:
            write(fresh, "first")

    monkeypatch.setattr(os, "replace", slowly)
    thread = threading.Thread(target=save)
    with WholeFolder(tmp_path / "model") as fresh:
        write(fresh, "second")
        thread.start()
        moved.wait()
    done.set()
    thread.join()
    files = {path.name: path.read_text() for path in (tmp_path / "model").iterdir()}
    assert files == {"config.json": "second", "weights": "second"}


def test_a_save_of_a_later_version(tmp_path):
    """Files that wait for their places, passed over or removed by a version that cannot read what is left to do."""
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
        for file in ("config.json", "weights"):
            (tmp_path / name / file).write_text(name)
    interrupt(tmp_path / "old", tmp_path / "new", "config.json", format=2, moves=[["weights", "weights"]])
    with pytest.raises(ValueError, match="by a later version of hf_xattn. Load the folder once with that version"):
        finish_interrupted(tmp_path / "old")
    with pytest.raises(ValueError, match="by a later version"), WholeFolder(tmp_path / "old"):
        pass
    assert (tmp_path / "old" / HIDDEN / "model" / "weights").read_text() == "new"
