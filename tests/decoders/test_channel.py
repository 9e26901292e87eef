"""Decoders that hand no keyword arguments to their layers: images reach them as safely as the others."""

import copy
import pickle
import threading

import pytest
import torch

from helpers.models.tiny_decoders import CONTEXT_SIZE, make_tiny, retrofitted
from helpers.models.tiny_models import randomize
from helpers.references.gradient_checks import without_dropout
from hf_xattn.decoders.decoder import find_decoder
from hf_xattn.layers.context import carried_context


ARCHITECTURES = ["bloom", "falcon", "gptj", "mpt", "mamba2"]
IDS = torch.randint(4, 90, (2, 7), generator=torch.Generator().manual_seed(1))
STATES = torch.randn(2, 5, CONTEXT_SIZE, generator=torch.Generator().manual_seed(2))


def make(model_type):
    return randomize(retrofitted(make_tiny(model_type)))


def gradients(model):
    model.zero_grad()
    model(IDS, cross_attention_states=STATES, labels=IDS).loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("model_type", ARCHITECTURES[:-1])
def test_checkpointed_gradients_equal_plain_ones(model_type):
    """A recomputation that no longer finds the images: gradients of the blocks silently zero."""
    model = without_dropout(make(model_type))
    plain = gradients(model)
    model.gradient_checkpointing_enable()
    checkpointed = gradients(model)
    blocks = [name for name in plain if "cross_attention_block" in name]
    assert blocks and all(plain[name].abs().max() > 0 for name in blocks if "k_proj" in name or "gate" in name)
    assert all(torch.allclose(plain[name], checkpointed[name], atol=1e-6) for name in plain)


@torch.no_grad()
@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_copies_and_pickles_still_see_images(model_type):
    """A copy or an unpickled model that lost the way to its layers."""
    model = make(model_type)
    expected = model(IDS, cross_attention_states=STATES).logits
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(IDS, cross_attention_states=STATES).logits, expected)


@torch.no_grad()
def test_threads_do_not_mix():
    """Replicas in threads (DataParallel, a server) that see one another's images."""
    model = make("bloom")
    inputs = [torch.randn(2, 5, CONTEXT_SIZE, generator=torch.Generator().manual_seed(seed)) for seed in range(4)]
    expected = [model(IDS, cross_attention_states=states).logits for states in inputs]
    wrong = []

    def work(states, logits):
        for _ in range(10):
            if not torch.equal(model(IDS, cross_attention_states=states).logits, logits):
                wrong.append(1)

    threads = [threading.Thread(target=work, args=pair) for pair in zip(inputs, expected)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@torch.no_grad()
def test_nothing_stays_behind():
    """Images of one call that a later text-only call sees, also after an error."""
    model = make("bloom")
    alone = model(IDS).logits
    layer = find_decoder(model.model.text_model)[1][3]
    handle = layer.register_forward_pre_hook(lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(IDS, cross_attention_states=STATES)
    handle.remove()
    assert carried_context() is None
    assert torch.equal(model(IDS).logits, alone)


@torch.no_grad()
def test_compiles_to_one_graph():
    """A graph break at each layer."""
    model = make("gptj")
    expected = model(IDS, cross_attention_states=STATES, use_cache=False).logits
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    logits = compiled(IDS, cross_attention_states=STATES, use_cache=False).logits
    assert torch.allclose(logits, expected, atol=1e-5)


@torch.no_grad()
def test_beams_and_samples_see_their_own_images():
    """Generation modes that reorder or expand rows."""
    for model_type in ("bloom", "mamba2"):
        model = make(model_type)
        options = {
            "cross_attention_states": STATES,
            "max_new_tokens": 5,
            "eos_token_id": None,
            "pad_token_id": 0,
            "num_beams": 3,
        }
        cached, uncached = (model.generate(IDS, use_cache=use_cache, **options) for use_cache in (True, False))
        assert torch.equal(cached, uncached)
