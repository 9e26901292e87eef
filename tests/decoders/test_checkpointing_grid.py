"""Activation checkpointing: the gradients of a run without it, whatever trains, and less memory."""

import copy
import functools
import pickle

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from helpers.models.tiny_models import SIZES, make_model, pixels, randomize, token_ids, vision_config
from helpers.references.gradient_checks import assert_same_gradients, checkpoint_activations, gradients, without_dropout
from hf_xattn import XAttnConfig, XAttnForConditionalGeneration, freeze


IDS, PIXELS = token_ids(), pixels()
INPUTS = {"input_ids": IDS, "labels": IDS, "pixel_values": PIXELS}


def make_small():
    """One layer with a block in front and one behind, and a tower of one layer: quick to compile."""
    torch.manual_seed(0)
    text = AutoModelForCausalLM.from_config(LlamaConfig(**(SIZES | {"num_hidden_layers": 1})))
    tower = vision_config()
    tower.num_hidden_layers = 1
    config = XAttnConfig(text_config=text.config, vision_config=tower, cross_attention_layers=[0, 1])
    return randomize(XAttnForConditionalGeneration(config, text_model=text))


@functools.cache
def plain_gradients(make, **frozen):
    return gradients(freeze(without_dropout(make()), **frozen), **INPUTS)


@pytest.mark.parametrize("blocks", [False, True], ids=["blocks_train", "blocks_frozen"])
@pytest.mark.parametrize("connector", [False, True], ids=["connector_trains", "connector_frozen"])
@pytest.mark.parametrize("vision", [False, True], ids=["tower_trains", "tower_frozen"])
@pytest.mark.parametrize("text", [False, True], ids=["text_trains", "text_frozen"])
def test_gradients_are_those_of_a_run_without_checkpointing(text, vision, connector, blocks):
    """A part that trains alone and gets no gradient, one that is frozen and gets some, a graph that is used twice."""
    frozen = {"text": text, "vision": vision, "connector": connector, "blocks": blocks}
    if all(frozen.values()):
        return
    expected = plain_gradients(make_model, **frozen)
    model = freeze(without_dropout(make_model()), **frozen)
    checkpoint_activations(model)
    found = gradients(model, **INPUTS)
    assert found.keys() == {name for name, weight in model.named_parameters() if weight.requires_grad}
    assert_same_gradients(found, expected)


@pytest.mark.parametrize(
    "frozen",
    [
        pytest.param({"text": False, "vision": False}, marks=pytest.mark.slow),
        pytest.param({"vision": False}, marks=pytest.mark.slow),
        pytest.param({"vision": True}, marks=pytest.mark.slow),
        {"vision": True, "connector": True},
    ],
    ids=["all_train", "tower_trains", "tower_frozen", "blocks_train"],
)
def test_compiled_checkpointing_gives_the_same_gradients(frozen):
    """Blocks or a connector that compiled code recomputes without their images, or leaves out of its one graph."""
    torch._dynamo.reset()
    expected = plain_gradients(make_small, **frozen)
    model = freeze(without_dropout(make_small()), **frozen)
    checkpoint_activations(model)
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return torch._dynamo.backends.debugging.aot_eager(graph, inputs)

    compiled = torch.compile(model.forward, backend=backend, fullgraph=True)
    compiled(use_cache=False, **INPUTS).loss.backward()
    found = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    assert_same_gradients(found, expected)
    assert len(graphs) == 1 and "checkpoint" in graphs[0].print_readable(print_output=False)
    torch._dynamo.reset()


@pytest.mark.slow
def test_compiled_with_graph_breaks():
    """A graph that breaks inside of a layer: the layer then runs as it is, and may lose the images."""
    torch._dynamo.reset()
    expected = plain_gradients(make_small)
    model = freeze(without_dropout(make_small()))
    checkpoint_activations(model)
    for block in model.blocks:
        block.mlp.act_fn.register_forward_hook(lambda *_: torch._dynamo.graph_break())
    torch.compile(model.forward, backend="aot_eager")(use_cache=False, **INPUTS).loss.backward()
    assert_same_gradients({name: w.grad for name, w in model.named_parameters() if w.grad is not None}, expected)
    torch._dynamo.reset()


def test_tower_that_trains_in_part():
    """The upper layer of a tower that trains behind a frozen embedding: without a gradient, and with a warning only."""
    frozen = {"connector": True, "names": {"*vision_tower.*layers.1.*": False}}
    expected = gradients(freeze(without_dropout(make_model()), **frozen), **INPUTS)
    assert any("vision_tower" in name for name in expected)
    model = without_dropout(make_model())
    checkpoint_activations(model)  # before the parts are chosen
    assert_same_gradients(gradients(freeze(model, **frozen), **INPUTS), expected)


def test_frozen_tower_costs_nothing():
    """A frozen tower that keeps all its activations, for gradients of its embedding that nothing uses."""
    model = freeze(make_model()).train()
    features = model.model.vision_tower(PIXELS[:, 0]).last_hidden_state
    assert not features.requires_grad
    checkpoint_activations(model)
    for each in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert not each.model.vision_tower(PIXELS[:, 0]).last_hidden_state.requires_grad
        freeze(each, vision=False)
        assert each.model.vision_tower(PIXELS[:, 0]).last_hidden_state.requires_grad
    freeze(model, names={"*vision_tower.*layers.1.*": False})
    embedding = model.model.vision_tower.get_input_embeddings()
    assert embedding(PIXELS[:, 0]).requires_grad
    model.disable_input_require_grads()
    assert not embedding(PIXELS[:, 0]).requires_grad
    assert not model.get_input_embeddings()(IDS).requires_grad
    model.model.enable_input_require_grads()
    model.model.enable_input_require_grads()  # no hook is left over from the first call
    assert model.get_input_embeddings()(IDS).requires_grad
    model.model.disable_input_require_grads()
    assert not model.get_input_embeddings()(IDS).requires_grad


@pytest.mark.parametrize("vision", [False, True], ids=["tower_trains", "tower_frozen"])
def test_checkpointing_keeps_less_than_half_of_the_memory(vision):
    """Checkpointing that is on in name: all activations are kept."""
    ids, images = token_ids(4, 64), pixels(4, 2)
    kept = {}
    for checkpoints in (False, True):
        model = freeze(make_model(), vision=vision).train()
        if checkpoints:
            checkpoint_activations(model)
        weights = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
        saved = {}

        def keep(tensor, saved=saved):
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = model(ids, labels=ids, pixel_values=images, use_cache=False).loss
        kept[checkpoints] = sum(size for place, size in saved.items() if place not in weights)
        loss.backward()
    assert 0 < kept[True] < 0.5 * kept[False]
