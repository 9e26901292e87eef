"""Activation checkpointing: gradients of images, wherever it was switched on; what cannot give them is refused."""

import copy

import pytest
import torch
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

from helpers.models.tiny_decoders import CONTEXT_SIZE, make_tiny, retrofitted
from helpers.models.tiny_models import make_model, make_text, pixels, randomize, token_ids
from helpers.references.gradient_checks import assert_same_gradients, checkpoint_activations, gradients, without_dropout
from hf_xattn import XAttnConfig, XAttnForConditionalGeneration, freeze_base
from hf_xattn.utils.transformers_api import CACHE


IDS = torch.randint(4, 90, (2, 7), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("frozen", [False, True], ids=["full", "frozen_base"])
@pytest.mark.parametrize("inner", [False, True], ids=["whole_model", "text_model"])
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt_neox", "mixtral"])
def test_gradients_are_those_without_checkpointing(name, inner, frozen):
    """A connector behind several blocks: "backward through the graph a second time"; blocks without a gradient."""
    model = without_dropout(make_model(name))
    if frozen:
        freeze_base(model, vision=False)
    inputs = {"input_ids": token_ids(), "labels": token_ids(), "pixel_values": pixels()}
    expected = gradients(model, **inputs)
    assert any("connector" in key for key in expected) and any("vision_tower" in key for key in expected)
    checkpoint_activations(model.model.text_model if inner else model)
    assert_same_gradients(gradients(model, **inputs), expected)


@pytest.mark.parametrize("frozen", [False, True], ids=["full", "frozen_base"])
@pytest.mark.parametrize("model_type", ["bloom", "falcon", "gpt2", "mamba2"])
def test_images_that_are_learned_get_gradients(model_type, frozen):
    """Decoders whose layers fetch the images themselves, and images that are learned outside of the model."""
    model = without_dropout(randomize(retrofitted(make_tiny(model_type))))
    if frozen:
        freeze_base(model)
    found = []
    for checkpoints in (False, True):
        if checkpoints:
            checkpoint_activations(model)
        source = torch.randn(2, 5, CONTEXT_SIZE, generator=torch.Generator().manual_seed(2)).requires_grad_()
        torch.manual_seed(0)
        found.append(gradients(model, input_ids=IDS, labels=IDS, cross_attention_states=source.tanh()))
        found[-1]["source"] = source.grad
    assert found[0]["source"].any()
    assert_same_gradients(found[1], found[0])


def test_switched_on_before_the_blocks_go_in():
    """A base that is checkpointed already: its layers keep the function that they were given."""
    text = make_text()
    expected = without_dropout(make_model())
    checkpoint_activations(text)
    config = XAttnConfig(
        text_config=text.config, vision_config=expected.config.vision_config, cross_attention_layers=[1, 3]
    )
    model = XAttnForConditionalGeneration(config, text_model=text).train()
    model.load_state_dict(expected.state_dict())
    inputs = {"input_ids": token_ids(), "labels": token_ids(), "pixel_values": pixels()}
    assert_same_gradients(gradients(copy.deepcopy(model), **inputs), gradients(expected, **inputs))


def test_frozen_embeddings_that_are_given():
    """`inputs_embeds` that want no gradient."""
    model = freeze_base(without_dropout(randomize(retrofitted(make_tiny("llama")))))
    states = torch.randn(2, 5, CONTEXT_SIZE, generator=torch.Generator().manual_seed(2))
    embeddings = model.get_input_embeddings()(IDS).detach()
    inputs = {"inputs_embeds": embeddings, "labels": IDS, "cross_attention_states": states}
    expected = gradients(model, **inputs)
    checkpoint_activations(model)
    assert_same_gradients(gradients(model, **inputs), expected)


def test_encoded_images_get_gradients_under_checkpointing():
    """Keys and values of a cache, whose graphs meet in the connector."""
    model = freeze_base(without_dropout(make_model()), vision=False)
    found = []
    for checkpoints in (False, True):
        if checkpoints:
            checkpoint_activations(model)
        model.zero_grad()
        encoded = model.encode_images(pixel_values=pixels())
        model(token_ids(), labels=token_ids(), cache=encoded).loss.backward()
        found.append({name: weight.grad.clone() for name, weight in model.named_parameters() if weight.requires_grad})
    assert_same_gradients(found[1], found[0])


@pytest.mark.parametrize("where", ["model", "body", "text_model", "before", "peft"])
def test_reentrant_checkpointing_is_refused(where):
    """Gradients of images that are lost without a word."""
    reentrant, model, inputs = {"use_reentrant": True}, make_model().train(), {"labels": token_ids()}
    refused = pytest.raises(ValueError, match="Expected gradient checkpointing with `use_reentrant=False`.*kwargs")
    if where in ("model", "body", "peft"):
        if where == "peft":
            peft = pytest.importorskip("peft")
            model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))
        with refused:
            checkpoint_activations(model.model if where == "body" else model, reentrant)
        model(token_ids(), pixel_values=pixels(), **inputs).loss.backward()
        return
    if where == "text_model":
        checkpoint_activations(model.model.text_model, reentrant)
    else:
        text = make_text()
        checkpoint_activations(text, reentrant)
        model = XAttnForConditionalGeneration(model.config, text_model=text).train()
    with refused:
        model(token_ids(), pixel_values=pixels(), **inputs)
    with torch.no_grad():
        assert model(token_ids(), pixel_values=pixels()).logits.isfinite().all()


def test_layers_that_checkpoint_a_layer_give_gradients():
    """Layers that checkpoint a layer of their own."""
    model = without_dropout(retrofitted(make_tiny("zamba2")))
    checkpoint_activations(model)
    model(IDS, cross_attention_states=torch.randn(2, 5, CONTEXT_SIZE), labels=IDS).loss.backward()
    assert model.blocks[0].attn.o_proj.weight.grad.any()


@pytest.mark.parametrize("name", ["NO_REENTRANT", "REENTRANT"])
def test_wrappers_of_torch(name):
    """Encoded images whose gradients a reentrant wrapper drops: connector and projections stay as they are, without a
    word.
    """
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper

    model, ids = make_model().train(), token_ids()

    def gradients():
        model.zero_grad()
        model(ids, cache=model.encode_images(pixels()), labels=ids).loss.backward()
        found = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
        return {name.replace("_checkpoint_wrapped_module.", ""): gradient for name, gradient in found.items()}

    expected = gradients()
    layers = model.get_decoder().layers
    for index, layer in enumerate(layers):
        layers[index] = checkpoint_wrapper(layer, checkpoint_impl=CheckpointImpl[name])
    if name == "REENTRANT":
        with pytest.raises(ValueError, match="`CheckpointImpl.NO_REENTRANT`, got `REENTRANT`"):
            gradients()
        with torch.no_grad():
            assert model(ids, pixel_values=pixels()).logits.isfinite().all()
        return
    found = gradients()
    assert found.keys() == expected.keys() and any("connector" in name for name in found)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient)


@pytest.mark.parametrize("given", [False, True], ids=["asked_for", "callers"])
def test_no_cache_from_layers_that_run_twice(given):
    """A cache that comes back empty or with text twice, because its layers run again in the backward pass."""
    model = without_dropout(make_model())
    checkpoint_activations(model)
    cache = EncoderDecoderCache(DynamicCache(), DynamicCache()) if given else None
    inputs = {"labels": token_ids(), "pixel_values": pixels()}
    outputs = model(token_ids(), cache=cache, use_cache=True, **inputs)
    assert outputs.get(CACHE) is None
    outputs.loss.backward()
    found = {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}
    assert cache is None or (cache.get_seq_length() == 0 and not cache.cross_attention_cache.layers)
    assert_same_gradients(found, gradients(model, input_ids=token_ids(), **inputs))
    model.eval()  # then nothing runs twice
    assert model(token_ids(), use_cache=True, **inputs)[CACHE].get_seq_length() == 7


def test_a_model_marked_as_one_with_an_adapter():
    """`_hf_peft_config_loaded` without a `peft_config`, as tests of transformers set it: an AttributeError."""
    model = make_model().train()
    model._hf_peft_config_loaded = True
    checkpoint_activations(model)
    model(token_ids(), labels=token_ids(), pixel_values=pixels()).loss.backward()
