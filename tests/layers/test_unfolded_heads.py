"""Attention of a decode step with the heads unfolded, as a GPU has it."""

import pytest
import torch
from transformers import DynamicCache

from helpers.models.compiled_models import compiled, counting_backend
from helpers.models.tiny_models import make_model, pixels, token_ids
from hf_xattn.layers import kernels


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    monkeypatch.setattr(kernels, "UNFOLDED_ON", "cpu")
    monkeypatch.setattr(kernels, "MASKS_UNFOLDED", True)


@pytest.fixture
def calls(as_on_a_gpu, monkeypatch):
    """Counts the calls with unfolded heads."""
    calls, original = [], kernels._attend_unfolded
    monkeypatch.setattr(kernels, "_attend_unfolded", lambda *args: calls.append(1) or original(*args))
    return calls


@torch.no_grad()
@pytest.mark.parametrize("options", [{}, {"quiet_softmax": True}], ids=["", "quiet softmax"])
@pytest.mark.parametrize("masked", [False, True], ids=["", "masked"])
def test_unfolded_heads_give_the_folded_result(calls, monkeypatch, masked, options):
    """Heads that read another group's keys, a mask that is dropped or read for other queries."""
    model = make_model(dtype=torch.bfloat16, cross_attention_config={"num_key_value_heads": 2, **options})
    images = {"pixel_values": pixels(2, 2).bfloat16()}
    if masked:
        images["image_mask"] = torch.tensor([[True, True], [True, False]])
        images["cross_attention_mask"] = torch.arange(32).repeat(2, 1) % 3 > 0
    ids = token_ids(2, 1)

    def step() -> torch.Tensor:
        return model(ids, cache=model.encode_images(**images)).logits

    unfolded = step()
    assert len(calls) == len(model.blocks)
    monkeypatch.setattr(kernels, "UNFOLDED_ON", "cuda")
    folded = step()
    assert len(calls) == len(model.blocks)
    assert (unfolded - folded).abs().max() < 0.02 * folded.abs().max()
    assert (folded - model(ids).logits).abs().max() > 0.05 * folded.abs().max(), "images count"


@torch.no_grad()
def test_heads_stay_folded_where_a_kernel_cannot_unfold_them(calls):
    """Several positions, or beams that share an image, which would read it once for each; float32, which repeats it;
    a mask for each head; heads that no kernel takes.
    """
    half = make_model(dtype=torch.bfloat16, cross_attention_config={"num_key_value_heads": 2})
    cache = half.encode_images(pixel_values=pixels(1).bfloat16())
    half(token_ids(1, 5), cache=cache.fork(DynamicCache()))
    half(token_ids(4, 1), cache=cache.fork(DynamicCache()))
    single = make_model(cross_attention_config={"num_key_value_heads": 2})
    single(token_ids(1, 1), cache=single.encode_images(pixel_values=pixels(1)))
    assert not calls
    query, key = torch.zeros(1, 2, 2, 16).bfloat16(), torch.zeros(1, 2, 9, 16).bfloat16()
    seen = torch.ones(1, 1, 2, 9, dtype=torch.bool)
    assert kernels.attends_unfolded(query, key, seen[:, :, :1], 2)
    assert not kernels.attends_unfolded(query, key, seen, 2)
    assert not kernels.attends_unfolded(query, key.expand(-1, -1, -1, 16).repeat(1, 1, 1, 20), None, 2)


def test_the_choice_of_heads_compiles(as_on_a_gpu):
    """A choice of kernel that breaks the graph of a decode step, or reads other heads there."""
    model = make_model(dtype=torch.bfloat16, cross_attention_config={"num_key_value_heads": 2})
    images = {"pixel_values": pixels(2).bfloat16()}
    expected = model.generate(token_ids(2, 6), **images, max_new_tokens=4, do_sample=False)
    backend, graphs = counting_backend()
    tokens = model.generate(token_ids(2, 6), **images, max_new_tokens=4, do_sample=False, **compiled(backend))
    assert torch.equal(tokens, expected) and len(graphs) == 1
