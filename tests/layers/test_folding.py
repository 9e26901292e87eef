"""Folding: every query that shares keys and values stands in one query axis."""

import pytest
import torch

from helpers.inputs.attention_inputs import (
    BATCH,
    HEAD_DIM,
    HIDDEN,
    KV_HEADS,
    NUM_TOKENS,
    TEXT_LEN,
    attend,
    cached,
    inputs,
    make_layer,
    make_mask,
)
from hf_xattn.layers import kernels
from hf_xattn.layers.context import fold_mask
from hf_xattn.layers.positions import Positions, token_positions


@pytest.mark.parametrize("heads", KV_HEADS)
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("mask", ["none", "padding", "per token"])
@pytest.mark.parametrize(
    "fields", [{}, {"quiet_softmax": True}, {"position_bias": True}], ids=["", "quiet", "position"]
)
def test_folding_equals_repeating(heads, implementation, mask, fields):
    """Rules out text rows that share an image and get another row's answer, mask or weights."""
    repeats, text_rows = 3, 3 * BATCH
    layer = make_layer(implementation, torch.float64, num_key_value_heads=KV_HEADS[heads], **fields)
    hidden = torch.randn(text_rows, TEXT_LEN, HIDDEN, dtype=torch.float64)
    states = inputs(torch.float64)[1]
    repeated = states.repeat_interleave(repeats, dim=0)
    if mask == "none":
        sees = full = None
    elif mask == "padding":
        full = make_mask(mask).repeat_interleave(repeats, dim=0)
        sees = make_mask(mask)[:, None]
    else:
        sees = full = torch.rand(text_rows, TEXT_LEN, NUM_TOKENS) > 0.6
    visibility = fold_mask(
        sees,
        image_rows=BATCH,
        text_rows=text_rows,
        text_len=TEXT_LEN,
        group=4 // KV_HEADS[heads],
        null_key=layer.quiet_softmax,
    )
    key, value = layer.project_key_value(states, null_key=layer.quiet_softmax)
    assert key.shape == (BATCH, KV_HEADS[heads], NUM_TOKENS + layer.quiet_softmax, HEAD_DIM)
    expected, expected_weights = layer(hidden, repeated, full, output_attentions=True)
    # Positions count no padding.
    places = {"positions": Positions(None, token_positions(make_mask(mask)))} if mask == "padding" else {}
    torch.testing.assert_close(attend(layer, hidden, key, value, visibility, **places)[0], expected)
    weights = attend(layer, hidden, key, value, visibility, output_attentions=True, **places)[1]
    torch.testing.assert_close(weights, expected_weights)


@pytest.mark.parametrize("heads", KV_HEADS)
@pytest.mark.parametrize("repeats", [1, 4])
def test_keys_and_values_are_never_repeated(monkeypatch, heads, repeats):
    """Rules out copies of K/V for query heads or beams: the speed of a decode step is that of reading K/V once."""
    layer = make_layer(num_key_value_heads=KV_HEADS[heads])
    key, value = layer.project_key_value(inputs()[1])
    seen = []

    def kernel(module, query, key, value, mask, **kwargs):
        seen.append((query, key, value, kwargs))
        return kernels.eager_attention_forward(module, query, key, value, mask, scaling=kwargs["scaling"])

    monkeypatch.setitem(kernels.ALL_ATTENTION_FUNCTIONS, "sdpa", kernel)
    hidden = torch.randn(BATCH * repeats, TEXT_LEN, HIDDEN)

    context = cached(key, value)

    def refuse(*args, **kwargs):
        raise AssertionError("K/V were repeated")

    for name in ("repeat_interleave", "repeat", "tile"):
        monkeypatch.setattr(torch.Tensor, name, refuse)
    monkeypatch.setattr(torch, "repeat_interleave", refuse)
    layer(hidden, cross_attention=context)
    ((query, used_key, used_value, kwargs),) = seen
    assert used_key is key and used_value is value
    assert key.is_contiguous() and value.is_contiguous()
    assert query.shape == (BATCH, KV_HEADS[heads], repeats * TEXT_LEN * 4 // KV_HEADS[heads], HEAD_DIM)
    assert kwargs["is_causal"] is False and layer.num_key_value_groups == 1
