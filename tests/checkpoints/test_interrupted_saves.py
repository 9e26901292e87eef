"""Folders in which a save was cut off while its files took their places: every way of loading refuses them."""

import pytest
from transformers import AutoModelForImageTextToText
from transformers.integrations.peft import MIN_PEFT_VERSION

from helpers.models.saved_models import make_base
from helpers.models.tiny_models import make_model
from hf_xattn import XAttnForConditionalGeneration, XAttnProcessor, remove_blocks, retrofit
from hf_xattn.importers.conversion import read_headers
from hf_xattn.utils.whole_folder import MARKER


LOADS = [XAttnForConditionalGeneration, AutoModelForImageTextToText]


def cut_off(folder):
    (folder / MARKER).write_text("config.json")
    return pytest.raises(ValueError, match=rf"A save into {folder} was cut off .*Save again into it")


@pytest.mark.parametrize("load_class", LOADS)
def test_a_model_and_the_base_of_an_adapter(load_class, tmp_path):
    """Old weights under the new configuration, also where the folder is the base of the one that is loaded."""
    peft = pytest.importorskip("peft", minversion=MIN_PEFT_VERSION)
    model = make_model()
    model.save_pretrained(tmp_path / "base")
    model.add_adapter(peft.LoraConfig(r=2, target_modules=["q_proj"]))
    model.save_pretrained(tmp_path / "lora")
    for name in ("base", "lora"):
        with cut_off(tmp_path / "base"):
            load_class.from_pretrained(tmp_path / name)


@pytest.mark.parametrize("way", ["load_adapter", *LOADS])
def test_a_half_saved_peft_adapter_is_refused(way, tmp_path):
    """The rank and scale of a new adapter (PEFT) with the weights of the old one."""
    peft = pytest.importorskip("peft", minversion=MIN_PEFT_VERSION)
    model = make_model()
    model.save_pretrained(tmp_path / "base")
    model.add_adapter(peft.LoraConfig(r=2, target_modules=["q_proj"]))
    model.save_pretrained(tmp_path / "lora")
    model = XAttnForConditionalGeneration.from_pretrained(tmp_path / "base")
    with cut_off(tmp_path / "lora"):
        (model.load_adapter if way == "load_adapter" else way.from_pretrained)(tmp_path / "lora")


def test_half_saved_added_weights_are_refused(tmp_path):
    """Blocks of one save with the manifest of another; weights of a base that nobody looked at."""
    model = retrofit(make_base(tmp_path / "text"), cross_attention={"context_size": 32})
    model.save_pretrained(tmp_path / "added", adapter_only=True)
    with cut_off(tmp_path / "added"):
        XAttnForConditionalGeneration.from_pretrained(tmp_path / "added", text_base=remove_blocks(model))
    with cut_off(tmp_path / "added"):
        AutoModelForImageTextToText.from_pretrained(tmp_path / "added")
    with cut_off(tmp_path / "text"):
        retrofit(tmp_path / "text", cross_attention={"context_size": 32})


def test_processors_and_foreign_checkpoints(tmp_path):
    """A tokenizer with the settings of another one; weights of two saves that are imported."""
    with cut_off(tmp_path):
        XAttnProcessor.from_pretrained(tmp_path)
    with cut_off(tmp_path):
        read_headers(tmp_path)
