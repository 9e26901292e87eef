"""The digits of the demo, learned with four trainers: the examples in `examples/digits`."""

import importlib
import json
import re
import shutil
from collections import Counter

import pytest
import torch
from safetensors.torch import load_file
from task import Recipe, make_bases, make_model
from torch.distributed.fsdp import FSDPModule
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

from helpers.checkout import EXAMPLES
from helpers.models.tiny_models import needs_part
from helpers.processes.warm_processes import run_ranks
from hf_xattn import sharding_units


DIGITS = EXAMPLES / "digits"
pytestmark = needs_part("AutoImageProcessor without torchvision")
DEMO = 0.95  # of the digits; the card of the demo says 97.9 % for seed 0, and 95.7 % for the lowest of three seeds


def run_script(name, output, *options, ranks=1):
    return run_ranks(ranks, [DIGITS / f"{name}.py", "--output", output, *options], timeout=1500)


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    """Makes a folder with the text model and the tower, after a few steps of training."""
    first = Recipe.quick(tmp_path_factory.mktemp("digits"))
    make_bases(first)

    def make(name):
        folder = tmp_path_factory.mktemp(name) / "out"
        shutil.copytree(first.folder, folder)
        return Recipe.quick(folder)

    return make


@pytest.fixture(scope="module")
def of_trainer(quick):
    """What `Trainer` gives, which the others must give too."""
    recipe = quick("trainer")
    return importlib.import_module("with_trainer").train(recipe), recipe.folder / "model"


def check_trained(folder):
    """The text model as it was, and blocks that have moved and that images go through."""
    model = AutoModelForImageTextToText.from_pretrained(folder / "model")
    base, tokenizer = (
        AutoModelForCausalLM.from_pretrained(folder / "text"),
        AutoTokenizer.from_pretrained(folder / "text"),
    )
    batch = tokenizer(["digits : first seven second two", "digits :"], padding=True, return_tensors="pt")
    with torch.no_grad():
        assert torch.equal(model(**batch).logits, base(**batch).logits)
        seen = [model(**batch, pixel_values=torch.full((2, 1, 3, 20, 60), shade)).logits for shade in (-1.0, 1.0)]
    assert all(block.attn.o_proj.weight.any() and block.mlp.down_proj.weight.any() for block in model.blocks)
    assert not torch.equal(*seen)


def test_each_trainer_moves_the_blocks_alone(of_trainer):
    """A base that moves, blocks that do not, a model that does not load."""
    losses, folder = of_trainer
    assert len(losses) == 6
    check_trained(folder.parent)


@pytest.mark.parametrize("name", ["with_trl", "with_accelerate", "with_fsdp2"])
def test_the_others_give_the_same_losses(name, quick, of_trainer):
    """Other labels, other rows, gradients that are a mean of means, norms over one rank's part, weights that are not
    whole.
    """
    if name == "with_trl":
        pytest.importorskip("trl")
    recipe = quick(name)
    if name == "with_fsdp2":
        printed = run_script(name, recipe.folder, "--quick", ranks=2)
        assert printed.count("held-out digits right") == 1 and printed.count("step 6: loss") == 1
        assert "this means nothing" in printed
        losses = json.loads((recipe.folder / "losses.json").read_text())
    else:
        losses = importlib.import_module(name).train(recipe)
    expected, folder = of_trainer
    assert losses == pytest.approx(expected, rel=1e-3)
    check_trained(recipe.folder)
    reference = load_file(folder / "model.safetensors")
    for weight_name, weight in load_file(recipe.folder / "model" / "model.safetensors").items():
        # On average: Adam makes a whole step of a gradient near zero, whose sign is a matter of rounding.
        assert (weight - reference[weight_name]).abs().mean() < 1e-5, weight_name


def test_a_sharding_unit_is_a_layer_with_its_block(quick):
    """A layer without its block, a block that is a unit of its own, a unit that comes after one which holds it."""
    model, _ = make_model(quick("units"))
    units = sharding_units(model)
    kinds = Counter(type(unit).__name__ for unit in units)
    assert kinds["CrossAttendingLlamaDecoderLayer"] == 4 and kinds["ViTLayer"] == 3
    assert kinds["ViTModel"] == kinds["XAttnConnector"] == 1 and not kinds["GatedCrossAttentionBlock"]
    layers = [unit for unit in units if type(unit).__name__ == "CrossAttendingLlamaDecoderLayer"]
    assert sum(hasattr(layer, "cross_attention_block") for layer in layers) == 3
    assert sharding_units(model.model) == units and not any(isinstance(unit, FSDPModule) for unit in units)
    for place, unit in enumerate(units):
        inside = {id(module) for module in unit.modules()}
        assert not any(id(later) in inside for later in units[place + 1 :])
    inside = {id(weight) for unit in units for weight in unit.parameters()}
    assert len({id(weight) for weight in model.parameters()} - inside) < 16


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bases")
    make_bases(Recipe(folder))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, ranks",
    [("with_trl", 1), ("with_trainer", 1), ("with_accelerate", 1)]
    + [("with_trainer", 2), ("with_accelerate", 2), ("with_fsdp2", 2)],
)
def test_reaches_the_accuracy_of_the_demo(name, ranks, bases, tmp_path):
    """A trainer that runs and teaches little, in one process or in two."""
    if name == "with_trl":
        pytest.importorskip("trl")
    shutil.copytree(bases, tmp_path / "out")
    printed = run_script(name, tmp_path / "out", ranks=ranks)
    found = re.findall(r"held-out digits right: ([\d.]+)%", printed)
    assert len(found) == 1 and float(found[0]) / 100 >= DEMO
    check_trained(tmp_path / "out")
