"""Image caches in int8: the numbers, and the layer that reads them. References round by hand, or know
nothing of int8.
"""

import itertools

import numpy as np
import pytest
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from helpers.inputs.attention_inputs import BATCH, HIDDEN, TEXT_LEN, inputs, make_layer, make_mask
from helpers.models.tiny_models import make_model, pixels, token_ids
from helpers.references.int8_rounding import both, by_hand
from hf_xattn.cache.cross_cache import CrossAttentionLayer, CrossCache
from hf_xattn.cache.image_cache import select_images
from hf_xattn.cache.image_layout import ImageLayout
from hf_xattn.cache.states import FORMS, StoredStates
from hf_xattn.layers.context import EVERYTHING, CrossAttentionContext, Recorder, fold_mask
from hf_xattn.layers.kernels import eager_attention_forward
from hf_xattn.storage import int8_states
from hf_xattn.storage.image_files import combine_images
from hf_xattn.storage.int8_states import Int8States


quantize = Int8States.quantize
HALVES = {torch.float32: 0.0, torch.bfloat16: 2**-8, torch.float16: 2**-11}  # relative error of a value


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_rounding_by_hand(dtype):
    """A scale of all tokens or heads together, steps of another size, a value that is rounded twice."""
    generator = torch.Generator().manual_seed(0)
    sizes = torch.tensor([1e-3, 1.0, 50.0])[:, None] * torch.tensor([1.0, 20.0])[:, None, None, None]
    states = (torch.randn(2, 4, 3, 16, generator=generator) * sizes).to(dtype)
    rounded = quantize(states)
    steps, scales, values = by_hand(states)
    assert rounded.steps.dtype == torch.int8 and rounded.scales.dtype == torch.float32
    assert rounded.steps.shape == (2, 4, 3, 16) and rounded.scales.shape == (2, 4, 3, 1)
    assert np.array_equal(rounded.steps.numpy(), steps) and np.array_equal(rounded.scales.numpy(), scales)
    assert torch.equal(rounded.dequantized(), torch.tensor(values).to(dtype))
    error = (rounded.dequantized().double() - states.double()).abs()
    assert (error <= rounded.scales * (0.5 + 1e-4) + HALVES[dtype] * states.double().abs()).all()
    assert rounded.nbytes == 2 * 4 * 3 * (16 + 4)


def test_extreme_values_are_rounded_without_overflow():
    """A division by zero, a scale that underflows or overflows, and a fault that finite steps hide."""
    zero = torch.zeros(1, 1, 2, 8)
    for dtype in HALVES:
        most = torch.finfo(dtype).max
        states = torch.cat([zero, zero + most, -zero - most, zero + torch.finfo(dtype).tiny, zero + 1e-44], dim=2).to(
            dtype
        )
        found = quantize(states).dequantized()
        assert torch.equal(found[:, :, :2], zero.to(dtype)) and found.isfinite().all()
        assert torch.allclose(found.double(), states.double(), rtol=0.005, atol=2e-36)
    for fault in (torch.nan, torch.inf, -torch.inf):
        for dtype in HALVES:
            states = torch.ones(1, 2, 3, 8, dtype=dtype)
            states[0, 1, 2, 3] = fault
            found = quantize(states).dequantized()
            assert found[0, 1, 2].isnan().all() and torch.equal(found[0, 0], states[0, 0]), (fault, dtype)
            assert found[0, 1, :2].isfinite().all()
    assert int(quantize(torch.randn(1, 1, 500, 8)).steps.min()) == -127, "-128 would have no positive partner"


FIELDS = {
    "plain": {},
    "one K/V head": {"num_key_value_heads": 1},
    "all K/V heads": {"num_key_value_heads": 4},
    "quiet": {"quiet_softmax": True},
    "qk_norm": {"qk_norm": True},
    "position_bias": {"position_bias": True, "position_bias_num_buckets": 8},
}


def answer(layer, hidden, pairs, mask=None, repeats=1, output_attentions=False):
    """The layer's answer for keys and values of a cache. `mask` is for a row of text; each image row has `repeats` of
    them.
    """
    cache = CrossCache()
    cache.fill(ImageLayout.of((pairs[0].shape[2] - layer.quiet_softmax,), hidden.device), [pairs])
    folded = EVERYTHING
    if mask is not None:
        group = layer.config.num_attention_heads // layer.config.num_key_value_heads
        sees = mask[:, None] if mask.dim() == 2 else mask
        if sees.shape[1] > 1:
            sees = sees.repeat_interleave(repeats, dim=0)
        null = layer.config.quiet_softmax
        text_rows = BATCH * repeats if sees.shape[1] > 1 else BATCH
        folded = fold_mask(
            sees, image_rows=BATCH, text_rows=text_rows, text_len=hidden.shape[1], group=group, null_key=null
        )
    visible = folded.visible
    if visible is not None and visible.shape[0] != hidden.shape[0]:
        visible = visible.repeat_interleave(repeats, dim=0)
    recorder = Recorder(wants_weights=True) if output_attentions else None
    context = CrossAttentionContext(cache=cache, mask=folded.mask, visible=visible, recorder=recorder)
    return layer(hidden, cross_attention=context)


@torch.no_grad()
@pytest.mark.parametrize("way", ["attend", "dequantised"])
@pytest.mark.parametrize("fields", FIELDS)
def test_layer_equals_one_that_reads_rounded_floats(fields, way, monkeypatch):
    """A scale at the wrong token, head or side of a product; masked tokens, null keys and biases that the products in
    int8 forget.
    """
    monkeypatch.setattr(Int8States, "multiplies_few", staticmethod(lambda query: way == "attend"))
    for implementation, repeats, text_len, wants in itertools.product(
        ("sdpa", "eager"), (1, 2), (1, TEXT_LEN), (None, True)
    ):
        layer = make_layer(implementation, **FIELDS[fields])
        hidden, states = inputs()
        hidden = hidden[:, :text_len].repeat_interleave(repeats, dim=0)
        hidden = hidden + torch.arange(len(hidden))[:, None, None] / 10  # rows that differ
        pair = layer.project_key_value(states * torch.tensor([1, 30, 0.1, 5, 0])[:, None], layer.quiet_softmax)
        floats = tuple(torch.tensor(by_hand(each)[2]) for each in pair)
        for kind in ("none", "padding", "text"):
            mask = make_mask(kind)
            if mask is not None and mask.dim() == 3:
                mask = mask[:, :text_len]
            found = answer(layer, hidden, tuple(map(quantize, pair)), mask, repeats, output_attentions=wants)
            expected = answer(layer, hidden, floats, mask, repeats, output_attentions=wants)
            assert torch.allclose(found[0], expected[0], atol=1e-5), (implementation, repeats, text_len, kind)
            assert (found[1] is None) == (wants is None)
            if wants:
                assert torch.allclose(found[1], expected[1], atol=1e-5)


def attention_in_float64(query, key, value, scaling, mask=None, bias=None):
    """Scores, softmax and sum by numpy. Sees `by_hand`'s rounded values."""
    key, value = (by_hand(each)[2].astype(np.float64) for each in (key, value))
    scores = np.einsum("rkqd,rknd->rkqn", query.double().numpy(), key) * scaling
    scores = scores if bias is None else scores + bias.double().numpy()
    scores = scores if mask is None else np.where(mask.numpy(), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("rkqn,rknd->rqkd", weights, value), weights


@torch.no_grad()
@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_products_against_float64(dtype, native, monkeypatch):
    """Parts of the tokens that are left out or counted twice; sums of steps that overflow float16."""
    monkeypatch.setattr(int8_states, "multiplies_natively", lambda dtype: native)
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(2, 3, 4, 32, generator=generator).to(dtype)
    key, value = (torch.randn(2, 3, 700, 32, generator=generator).to(dtype) for _ in range(2))
    key[:, :, 5] *= 40
    value[:, :, 7] *= 300
    mask = torch.rand(2, 1, 4, 700, generator=generator) < 0.8
    bias = torch.randn(2, 3, 4, 700, generator=generator).to(dtype)
    for many, (given_mask, given_bias) in itertools.product((2**22, 1), ((None, None), (mask, None), (mask, bias))):
        monkeypatch.setattr(int8_states, "BYTES_AT_ONCE", many)  # all tokens at once; 256, 256 and 188
        output, weights = quantize(key).attend(query, quantize(value), given_mask, 0.2, given_bias)
        expected, expected_weights = attention_in_float64(query, key, value, 0.2, given_mask, given_bias)
        assert output.dtype == weights.dtype == dtype and output.shape == (2, 4, 3, 32)
        rounds = 1e-5 if dtype == torch.float32 else 0.02
        assert np.allclose(output.double().numpy(), expected, atol=rounds, rtol=rounds), many
        assert np.allclose(weights.double().numpy(), expected_weights, atol=rounds, rtol=rounds)


@torch.no_grad()
def test_every_token_is_converted_in_parts(monkeypatch):
    """Tokens of half-precision states that no part converts."""
    states = torch.randn(2, 3, 700, 16).to(torch.bfloat16)
    monkeypatch.setattr(int8_states, "BYTES_AT_ONCE", 1)
    rounded = quantize(states)
    assert torch.equal(rounded.dequantized(), torch.tensor(by_hand(states)[2]).to(torch.bfloat16))


@torch.no_grad()
def test_which_calls_multiply_in_int8(monkeypatch):
    """Kernels that a user chose and that are not asked; scores of a long text that take more memory than keys and
    values.
    """
    calls, kernels = [], []
    attend = Int8States.attend
    monkeypatch.setattr(Int8States, "attend", lambda *args: calls.append(1) or attend(*args))
    hidden, states = inputs()

    def users_kernel(module, query, key, value, *args, **kwargs):
        kernels.append(key.dtype)
        return eager_attention_forward(module, query, key, value, *args, **kwargs)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "users", users_kernel)
    for kernel, text_len, expected in (("sdpa", 1, 1), ("eager", 1, 1), ("sdpa", 4, 0), ("users", 1, 0)):
        layer = make_layer("sdpa", num_key_value_heads=2)
        layer.config._attn_implementation = kernel
        pair = tuple(map(quantize, layer.project_key_value(states)))
        answer(layer, hidden[:, :1].expand(-1, text_len, -1), pair)
        assert len(calls) == expected, (kernel, text_len)
        calls.clear()
    assert kernels == [torch.float32]
    with torch.enable_grad():
        answer(make_layer(), hidden[:, :1], pair)
    assert not calls


@torch.no_grad()
def test_a_single_image_token_keeps_its_scale():
    """The value of a single token that is used without its scale."""
    for fields in ({}, {"qk_norm": True}):
        layer = make_layer(**fields)
        hidden, states = inputs(num_tokens=1)
        pair = layer.project_key_value(states)
        found = answer(layer, hidden, tuple(map(quantize, pair)))[0]
        floats = tuple(torch.tensor(by_hand(each)[2]) for each in pair)
        assert torch.allclose(found, answer(layer, hidden, floats)[0], atol=1e-6)


@torch.no_grad()
def test_gradients_of_a_text():
    """A gradient for the text that differs, because a buffer of the products is used twice."""
    layer, (hidden, states) = make_layer(), inputs()
    pair = layer.project_key_value(states)
    gradients = []
    for each_pair in (tuple(map(quantize, pair)), tuple(torch.tensor(by_hand(each)[2]) for each in pair)):
        given = hidden.clone().requires_grad_()
        with torch.enable_grad():
            answer(layer, given, each_pair)[0].square().sum().backward()
        gradients.append(given.grad)
    assert gradients[0].shape == (BATCH, TEXT_LEN, HIDDEN) and torch.allclose(*gradients, atol=1e-5)


def test_a_layer_moves_all_its_tensors():
    """Scales that stay on the device when keys and values are offloaded; a selected row that forgets its device."""
    layer = CrossAttentionLayer(*(quantize(torch.randn(3, 2, 5, 8)) for _ in range(2)))
    layer.device = torch.device("meta")  # stands for the device of the block
    offloaded = layer.select(torch.tensor([2, 0]))
    assert [tensor.shape[0] for tensor in offloaded.tensors] == [2, 2, 2, 2] and offloaded.device == layer.device
    for states in offloaded.read():
        assert isinstance(states, Int8States) and states.steps.is_meta and states.scales.is_meta
    assert not any(tensor.is_meta for tensor in offloaded.tensors), "they stay offloaded"
    offloaded.prefetch()
    assert all(tensor.is_meta for tensor in offloaded.tensors)
    plain = CrossAttentionLayer(torch.randn(3, 2, 5, 8), torch.randn(3, 2, 5, 8))
    plain.device = torch.device("meta")
    assert all(states.is_meta for states in plain.select(torch.tensor([1])).read())


@torch.no_grad()
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_an_int8_cache_counts_the_bytes_that_it_holds(dtype):
    """A cache that holds floats beside the steps, or float32 in a half-precision model."""
    model = make_model(dtype=dtype, cross_attention_config={"head_dim": 128, "num_key_value_heads": 2})
    images = pixels(2, 3)
    plain, small = model.encode_images(images), model.encode_images(images, cache_dtype="int8")
    tokens = 2 * 3 * 16 * 2 * 2  # rows, images, tokens, heads, blocks
    assert plain.nbytes == 2 * tokens * 128 * dtype.itemsize and small.nbytes == 2 * tokens * (128 + 4)
    assert small.nbytes / plain.nbytes == (128 + 4) / (128 * dtype.itemsize)  # 0.516 or 0.258
    assert (plain.cache_dtype, small.cache_dtype) == (None, "int8")
    assert sum(tensor.untyped_storage().nbytes() for tensor in tensors_of(small)) == small.nbytes


def tensors_of(cache):
    return [tensor for layer in cache.cross_attention_cache.layers for tensor in layer.tensors]


@torch.no_grad()
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_a_cache_holds_what_was_rounded_by_hand(dtype):
    """Keys that are rounded before their norm, values with the scales of keys, the layers of each other."""
    model, reference = both(dtype=dtype, cross_attention_config={"qk_norm": True})
    cache, floats = model.encode_images(pixels(2), cache_dtype="int8"), reference.encode_images(pixels(2))
    plain = model.encode_images(pixels(2))
    for layer, expected, before in zip(*(each.cross_attention_cache.layers for each in (cache, floats, plain))):
        for states, rounded, given in zip(layer.read(), expected.read(), before.read()):
            assert torch.equal(states.dequantized(), rounded) and states.dtype == given.dtype == dtype
            assert np.array_equal(states.steps.numpy(), by_hand(given)[0])
            assert not torch.equal(rounded, given), "the model does round"


class HalfStates(StoredStates):
    """Every value as half a step."""

    form = "halves"

    @classmethod
    def quantize(cls, states):
        return cls(states / 2, torch.full_like(states[..., :1], 2), states.dtype)

    def dequantized(self):
        return self.steps * self.scales


@torch.no_grad()
def test_another_form_takes_the_same_way(monkeypatch):
    """A core that knows int8 by its name."""
    monkeypatch.setitem(FORMS, "halves", HalfStates)
    model, ids = make_model(), token_ids(2)
    plain, halves = (model.encode_images(pixels(2, 2), cache_dtype=name) for name in (None, "halves"))
    assert halves.cache_dtype == "halves" and halves.nbytes > plain.nbytes
    expected = model(ids, cache=plain).logits
    chosen = select_images(combine_images([halves, halves]), [2, 1])
    assert chosen.cache_dtype == "halves"
    assert torch.equal(model(ids, cache=chosen).logits, expected)
    with pytest.raises(ValueError, match='to be "int8" or "halves" or None .*, got \'quarters\''):
        model.encode_images(pixels(2, 2), cache_dtype="quarters")
