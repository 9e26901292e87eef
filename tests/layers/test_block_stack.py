"""Several blocks at one place of a decoder: everything that one block does, in their order, under names that one block
keeps.
"""

import copy

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForImageTextToText

from helpers.models.tiny_models import make_model, make_text, pixels, randomize, token_ids, vision_config
from helpers.references.gradient_checks import assert_same_gradients, checkpoint_activations, gradients, without_dropout
from hf_xattn import (
    XAttnForConditionalGeneration,
    added_modules,
    attention_maps,
    freeze,
    lora_targets,
    remove_blocks,
    retrofit,
)
from hf_xattn.checkpoints.model_card import describe


PLACES = {
    "in front of a layer": [1, 1],
    "of the first layer": [0, 0, 2],
    "after the last layer": [3, 4, 4, 4],
}
at_every_place = pytest.mark.parametrize("layers", PLACES.values(), ids=PLACES)
GREEDY = {"max_new_tokens": 5, "do_sample": False}


def given():
    return {"input_ids": token_ids(), "pixel_values": pixels()}


@torch.no_grad()
@at_every_place
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_fresh_blocks_add_nothing(name, layers):
    """A block of several that gets weights of the decoder's rule, which knows no zeros; an order other than that of
    the list.
    """
    text = make_text(name)
    expected = text(token_ids()).logits
    model = retrofit(copy.deepcopy(text), AutoModel.from_config(vision_config()), cross_attention_layers=layers)
    assert model.config.cross_attention_layers == layers
    assert [block.layer_idx for block in model.blocks] == list(range(len(layers)))
    assert torch.equal(model(**given()).logits, expected)
    assert not torch.equal(randomize(model)(**given()).logits, expected)
    assert torch.equal(model(token_ids()).logits, expected)


@torch.no_grad()
@at_every_place
def test_blocks_run_one_after_the_other(layers):
    """Blocks of one place that run side by side, twice, or in another order."""
    model = make_model(cross_attention_layers=layers)
    seen = []
    for block in model.blocks:
        block.register_forward_hook(
            lambda block, args, output: seen.append((block.layer_idx, args[0].clone(), output.clone()))
        )
    model(**given())
    assert [index for index, _, _ in seen] == list(range(len(layers)))
    for (one, _, output), (other, entered, _) in zip(seen, seen[1:]):
        assert torch.equal(output, entered) == (layers[one] == layers[other])


def test_single_blocks_keep_their_names():
    """A saved folder of today whose single blocks get other names; weights of several blocks under one name."""
    names = {name.split(".attn_gate")[0] for name in make_model(cross_attention_layers=[0, 2, 2, 4]).state_dict()}
    stem = "model.text_model.model.layers."
    assert {name for name in names if "block" in name and name.rpartition(".")[2] not in ("weight", "mlp_gate")} == {
        f"{stem}0.cross_attention_block",
        f"{stem}2.cross_attention_block.0",
        f"{stem}2.cross_attention_block.1",
        f"{stem}3.cross_attention_block_after",
    }


@torch.no_grad()
@at_every_place
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_several_blocks_at_a_place_survive_saving(layers, dtype, tmp_path):
    """A gate or a norm of the second block that is rounded, or a block that a folder loses."""
    bases = tmp_path / "text", tmp_path / "vision"
    make_text(dtype=dtype).save_pretrained(bases[0])
    AutoModel.from_config(vision_config(), dtype=dtype).save_pretrained(bases[1])
    model = randomize(retrofit(*bases, cross_attention_layers=layers))
    precise = {name for name, weight in model.named_parameters() if weight.dtype == torch.float32}
    found = {name for name in precise if "cross_attention_block" in name}
    assert len({name.rpartition(".")[0] for name in found if "_gate." in name}) == 2 * len(layers)
    kept = model._keep_in_fp32_modules_strict
    assert dtype == torch.float32 or all(any(f".{each}." in f".{name}." for each in kept) for name in found)
    images = {**given(), "pixel_values": pixels().to(dtype)}
    expected = model(**images).logits
    for folder, options in (("whole", {}), ("added", {"adapter_only": True})):
        model.save_pretrained(tmp_path / folder, **options)
        again = AutoModelForImageTextToText.from_pretrained(tmp_path / folder, dtype=dtype)
        assert again.config.cross_attention_layers == layers
        assert {name for name, weight in again.named_parameters() if weight.dtype == torch.float32} == precise
        ours, theirs = model.state_dict(), again.state_dict()
        assert ours.keys() == theirs.keys() and all(torch.equal(theirs[name], ours[name]) for name in ours)
        torch.testing.assert_close(again(**images).logits, expected)


def test_a_lost_block_is_missed(tmp_path):
    """A folder without the second block of a place, whose model answers with a block of random weights."""
    make_model(cross_attention_layers=[1, 1]).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    kept = {name: weight for name, weight in weights.items() if ".cross_attention_block.1." not in name}
    assert 0 < len(kept) < len(weights)
    save_file(kept, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"not complete: 11 weights are missing, .*cross_attention_block\.1\."):
        AutoModelForImageTextToText.from_pretrained(tmp_path)


@torch.no_grad()
@at_every_place
def test_each_block_of_a_place_has_its_own_keys_and_values(layers, tmp_path):
    """Keys and values that a block of several takes from its neighbour, with the cache or on the way to a disk."""
    model = make_model(cross_attention_layers=layers)
    expected = model.generate(**given(), **GREEDY, use_cache=False)
    assert torch.equal(model.generate(**given(), **GREEDY), expected)
    assert torch.equal(model.generate(**given(), **GREEDY, cache_implementation="static"), expected)
    images = model.encode_images(pixels())
    assert len(images.cross_attention_cache.layers) == len(layers)
    assert torch.equal(model.generate(token_ids(), cache=images, **GREEDY), expected)
    model.save_pretrained(tmp_path / "model")
    size = sum(weight.nbytes for weight in model.state_dict().values())
    split = AutoModelForImageTextToText.from_pretrained(
        tmp_path / "model", device_map="auto", max_memory={"cpu": size // 2}, offload_folder=tmp_path / "offload"
    )
    assert "disk" in split.hf_device_map.values()
    assert torch.equal(split.generate(**given(), **GREEDY), expected)


@at_every_place
def test_each_block_of_a_place_gets_gradients(layers):
    """A block of several without a gradient, or images whose graph is freed by the first of them."""
    model = without_dropout(make_model(cross_attention_layers=layers))
    inputs = {**given(), "labels": token_ids()}
    expected = gradients(model, **inputs)
    blocks = {name for name, _ in model.named_parameters() if "cross_attention_block" in name}
    assert blocks <= expected.keys() and all(bool(expected[name].any()) for name in blocks if "gate" in name)
    checkpoint_activations(model)
    assert_same_gradients(gradients(model, **inputs), expected)


def test_frozen_block_of_a_place_stays_in_evaluation():
    """Dropout in a frozen block beside one that learns."""
    model = make_model(cross_attention_layers=[1, 1])
    freeze(model, blocks=False)
    model.blocks[0].requires_grad_(False)
    model.train()
    assert [block.attn.training for block in model.blocks] == [False, True]


def test_adapters_find_every_block(tmp_path):
    """LoRA on one block of a place, or blocks beside the copies that train."""
    model = make_model(cross_attention_layers=[1, 1, 4, 4])
    targets = lora_targets(model, "blocks")
    assert len(targets) == 4 * 7 and len({*targets}) == 4 * 7
    assert not any("cross_attention_block" in name for name in lora_targets(model, "text"))
    assert added_modules(model)[:2] == [
        "model.text_model.model.layers.1.cross_attention_block",
        "model.text_model.model.layers.3.cross_attention_block_after",
    ]
    model.save_pretrained(tmp_path / "base")
    base = AutoModelForImageTextToText.from_pretrained(tmp_path / "base")
    config = peft.LoraConfig(target_modules=lora_targets(model, "text"), modules_to_save=added_modules(model))
    tuned = peft.get_peft_model(base, config)
    blocks = tuned.get_base_model().blocks
    assert len(blocks) == 4 and all(weight.requires_grad for block in blocks for weight in block.parameters())
    with torch.no_grad():
        blocks[1].attn_gate.add_(1.0)
        expected = tuned.eval()(**given()).logits
        tuned.save_pretrained(tmp_path / "adapter")
        again = peft.PeftModel.from_pretrained(
            AutoModelForImageTextToText.from_pretrained(tmp_path / "base"), tmp_path / "adapter"
        ).eval()
        assert torch.equal(again(**given()).logits, expected)
        assert not torch.allclose(expected, model(**given()).logits, atol=1e-3)


@torch.no_grad()
def test_several_blocks_of_a_folder(tmp_path):
    """Several blocks at a place that stay there, or are lost, where another folder has one."""
    make_text().save_pretrained(tmp_path / "text")
    AutoModel.from_config(vision_config()).save_pretrained(tmp_path / "vision")
    logits = {}
    for seed, (name, layers) in enumerate({"one": [1, 3], "several": [1, 1, 4, 4]}.items()):
        model = retrofit(tmp_path / "text", tmp_path / "vision", cross_attention_layers=layers)
        randomize(model, seed).save_pretrained(tmp_path / name, adapter_only=True)
        logits[name] = model(**given()).logits
    text = AutoModelForCausalLM.from_pretrained(tmp_path / "text")
    for name in ("one", "several", "one", "several"):
        model = XAttnForConditionalGeneration.from_pretrained(tmp_path / name, text_base=text)
        assert torch.equal(model(**given()).logits, logits[name])
        text = remove_blocks(model)


@torch.no_grad()
def test_the_map_of_a_place_is_the_mean_of_its_blocks():
    """The map of the first block of a place, shown as that of the place."""
    model = make_model(cross_attention_layers=[1, 1, 3])
    maps = attention_maps(model, given())
    assert maps.layers == [1, 1, 3] and len(maps.weights) == 3
    each = maps.grid(head="mean", token=-1)
    assert torch.allclose(maps.grid(layer=1, head="mean", token=-1), each[:2].mean(dim=0))
    assert not torch.allclose(each[0], each[1], atol=1e-3)
    assert torch.allclose(maps.grid(layer=3, head="mean", token=-1), each[2])


def test_several_blocks_at_a_place_compile():
    """A graph that breaks between the blocks of a place."""
    model = make_model(cross_attention_layers=[1, 1], cross_attention_config={"num_attention_heads": 2})
    states = torch.randn(2, 5, model.config.cross_attention_config.context_size)
    with torch.no_grad():
        expected = model(token_ids(), cross_attention_states=states, use_cache=False).logits
        compiled = torch.compile(model, fullgraph=True, backend="eager")
        found = compiled(token_ids(), cross_attention_states=states, use_cache=False).logits
    torch.testing.assert_close(found, expected)


def test_figures_and_identity():
    """A report that counts places in place of blocks; images of one model that another one takes for its own."""
    model = make_model(cross_attention_layers=[1, 1])
    one = make_model(cross_attention_layers=[1])
    assert describe(model)["blocks in front of layers"] == "1, 1"
    for name in ("parameters added (blocks)", "K/V bytes an image"):
        count, single = (int(describe(each)[name].replace(",", "")) for each in (model, one))
        assert count == 2 * single
    with pytest.raises(ValueError, match="blocks|layers"):
        model(token_ids(), cache=one.encode_images(pixels()))
