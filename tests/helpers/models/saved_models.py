"""Small models over saved bases, for the tests of adapter-only folders."""

import torch
from transformers import AutoModel, AutoModelForImageTextToText

from helpers.models.tiny_models import make_text, pixels, randomize, token_ids, vision_config
from hf_xattn import XAttnForConditionalGeneration, remove_blocks, retrofit
from hf_xattn.checkpoints.adapters import SmallCheckpoint
from hf_xattn.checkpoints.folders import WEIGHTS


ADDED = f"{WEIGHTS}.safetensors"


def make_vision(folder):
    torch.manual_seed(7)
    AutoModel.from_config(vision_config()).save_pretrained(folder)
    return folder


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
    return set(SmallCheckpoint.find(folder, {}).added())


def same_model(model, loaded):
    mine, others = model.state_dict(), loaded.state_dict()
    assert mine.keys() == others.keys()
    assert [n for n in mine if mine[n].dtype != others[n].dtype or not torch.equal(mine[n], others[n])] == []
    assert torch.equal(logits_of(model), logits_of(loaded))


def load(auto_class, folder, **kwargs):
    """Loads, and makes sure that every key was found and used."""
    model, info = auto_class.from_pretrained(folder, output_loading_info=True, **kwargs)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    return model


def loaded(folder):
    return AutoModelForImageTextToText.from_pretrained(folder).eval()


def put_onto(model, folder):
    """The folder on the text model of a loaded model."""
    return XAttnForConditionalGeneration.from_pretrained(folder, text_base=remove_blocks(model))


def small(model, folder, seed=2):
    randomize(model, seed).eval().save_pretrained(folder, adapter_only=True)
    return model


def make_first(tmp_path):
    """A small checkpoint on two bases, loaded."""
    make_base(tmp_path / "text"), make_vision(tmp_path / "vision")
    small(retrofit(tmp_path / "text", tmp_path / "vision", every=2), tmp_path / "first", seed=1)
    return loaded(tmp_path / "first")
