"""Idefics, brought over, against transformers' own model."""

import argparse

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

from helpers.models.tiny_idefics import MARKER, VOCAB, make_idefics, make_idefics_processor, stop_idefics
from hf_xattn.commands.shared import load_model_and_images
from hf_xattn.importers import convert_checkpoint, export_checkpoint, import_checkpoint
from hf_xattn.serving.chat_session import question


RESAMPLER = {
    "use_resampler": True,
    "resampler_n_latents": 3,
    "resampler_depth": 2,
    "resampler_n_heads": 2,
    "resampler_head_dim": 8,
    "qk_layer_norms_perceiver": True,
}
VARIANTS = {
    "plain": {},
    "resampler": {"use_resampler": True, "perceiver_config": RESAMPLER},
    "norms_and_vectors": {"qk_layer_norms": True, "alpha_type": "vector", "cross_layer_interval": 1},
    "nothing_added": {"additional_vocab_size": 0},
    "tied": {"tie_word_embeddings": True},
}


def make_inputs(marked=True):
    ids = torch.tensor([[1, 5, MARKER, 6, 7, MARKER, 8, 9], [1, MARKER, 10, 11, 12, 13, 14, 15]])
    seen = (ids == MARKER).cumsum(dim=1)
    mask = torch.stack([seen == 1, seen == 2], dim=-1).long()
    pixels = torch.randn(2, 2, 3, 16, 16, generator=torch.Generator().manual_seed(2))
    pixels[1, 1] = 0  # a padding image
    return {
        "input_ids": ids if marked else ids.clamp(max=VOCAB - 1),
        "pixel_values": pixels,
        "image_attention_mask": mask,
        "attention_mask": torch.ones_like(ids),
    }


@torch.no_grad()
@pytest.mark.parametrize("variant", VARIANTS)
def test_an_imported_idefics_gives_the_same_logits(variant):
    """A weight in the wrong place, an added token without its row, latents or gates of another shape."""
    theirs = make_idefics(**VARIANTS[variant])
    ours = import_checkpoint(theirs)
    given = make_inputs(marked=variant != "nothing_added")
    leaking = theirs(**given).logits
    expected = stop_idefics(theirs)(**given).logits
    logits = ours(**given).logits
    assert logits.shape == expected.shape
    assert torch.allclose(logits, expected, atol=2e-5)
    assert not torch.allclose(logits[0, :2], leaking[0, :2], atol=1e-3)
    assert torch.equal(logits[0, :2], ours(given["input_ids"]).logits[0, :2])
    if variant != "nothing_added":
        by_ids = {name: value for name, value in given.items() if name != "image_attention_mask"}
        images = torch.tensor([[True, True], [True, False]])
        assert torch.allclose(ours(**by_ids, image_mask=images).logits, expected, atol=2e-5)


@torch.no_grad()
@pytest.mark.parametrize("variant", ["plain", "resampler"])
def test_an_imported_idefics_generates_the_same_tokens(variant):
    """Images or masks that go missing after the first step; keys and values projected at every step, as there."""
    theirs = stop_idefics(make_idefics(**VARIANTS[variant]))
    ours = import_checkpoint(theirs)
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "use_cache": True}
    given = make_inputs()
    expected = theirs.generate(**given, **options)
    calls = []
    ours.blocks[0].attn.k_proj.register_forward_hook(lambda *args: calls.append(1))
    assert torch.equal(ours.generate(**given, **options), expected)
    assert len(calls) == 1


@torch.no_grad()
def test_writes_added_tokens():
    """A head without the added rows, or a loss that does not know them."""
    theirs = make_idefics()
    ours = import_checkpoint(theirs)
    given = make_inputs()
    labels = given["input_ids"].clone()
    labels[:, -1] = VOCAB + 3
    logits = stop_idefics(theirs)(**given).logits[:, :-1].flatten(0, 1)  # transformers' own loss fails on added tokens
    expected = torch.nn.functional.cross_entropy(logits, labels.masked_fill(labels == MARKER, -100)[:, 1:].flatten())
    assert torch.allclose(ours(**given, labels=labels).loss, expected, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_folder_is_converted_into_a_folder(variant, tmp_path):
    """A tensor lost or misplaced on the way through files."""
    theirs = make_idefics(torch.bfloat16, **VARIANTS[variant])
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="30KB")
    ours = import_checkpoint(tmp_path / "theirs", tmp_path / "ours")
    direct = import_checkpoint(theirs).state_dict()
    loaded = AutoModelForImageTextToText.from_pretrained(tmp_path / "ours", dtype="auto").state_dict()
    assert direct.keys() == loaded.keys() == ours.state_dict().keys()
    assert all(torch.equal(direct[name], tensor) for name, tensor in loaded.items())
    with pytest.raises(ValueError, match="found 'clip_vision_model'"):
        export_checkpoint(tmp_path / "ours", tmp_path / "back")
    assert sum(len(load_file(path)) for path in (tmp_path / "ours").glob("*.safetensors")) > 0


def test_the_prompt_of_idefics(tmp_path):
    """Images without the tokens around them, a text without its start."""
    make_idefics().save_pretrained(tmp_path / "theirs")
    theirs = make_idefics_processor()
    theirs.save_pretrained(tmp_path / "theirs")
    convert_checkpoint(tmp_path / "theirs", tmp_path / "ours")
    Image.fromarray(np.zeros((16, 16, 3), np.uint8)).save(tmp_path / "p.png")
    images = [str(tmp_path / "p.png")] * 2
    given = {"model": str(tmp_path / "ours"), "image": images, "device": "cpu", "dtype": "auto"}
    _, processor, images = load_model_and_images(argparse.Namespace(**given, trust_remote_code=False))
    asked = processor.apply_chat_template(
        [question("w1 w2", images)], add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
    )
    made = [asked, theirs(text=[[*images, "w1 w2"]], return_tensors="pt")]
    ours, expected = (processor.tokenizer.convert_ids_to_tokens(each["input_ids"][0]) for each in made)
    assert [token for token in ours if token != "<unk>"] == expected
