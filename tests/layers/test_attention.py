"""The attention layer against a reference that shares no code with it: one loop over heads, float64, no folding."""

import itertools

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention
from transformers.models.t5.modeling_t5 import T5Attention

from helpers.inputs.attention_inputs import (
    BATCH,
    CONTEXT,
    HEAD_DIM,
    HIDDEN,
    KV_HEADS,
    NUM_TOKENS,
    TEXT_LEN,
    attend,
    inputs,
    make_layer,
    make_mask,
)
from hf_xattn import CrossAttentionConfig, GatedCrossAttention
from hf_xattn.layers import kernels
from hf_xattn.layers.context import EVERYTHING, fold_mask
from hf_xattn.layers.positions import Positions
from hf_xattn.parts.position_bias import relative_position_bucket


def reference(layer, hidden, states, mask=None, bias=None):
    """Cross-attention written out: `(output, weights)`. `bias` is `(heads, batch or 1, text_len, tokens)`."""
    config, weight = layer.config, dict(layer.named_parameters())
    heads, dim = config.num_attention_heads, config.head_dim

    def project(x, name, count):
        x = torch.einsum("bti,oi->bto", x, weight[f"{name}.weight"])
        x = x + weight[f"{name}.bias"] if f"{name}.bias" in weight else x
        return [x[..., i * dim : (i + 1) * dim] for i in range(count)]

    def norm(x, name):
        if f"{name}.weight" not in weight:
            return x
        return x / ((x * x).mean(-1, keepdim=True) + config.norm_eps).sqrt() * weight[f"{name}.weight"]

    queries = project(hidden, "q_proj", heads)
    keys = project(states, "k_proj", config.num_key_value_heads)
    values = project(states, "v_proj", config.num_key_value_heads)
    allowed = torch.ones(*hidden.shape[:2], states.shape[1], dtype=torch.bool)
    if mask is not None:
        allowed = allowed & (mask[:, None] if mask.dim() == 2 else mask)
    outputs, all_weights = [], []
    for head in range(heads):
        shared = head * config.num_key_value_heads // heads
        scores = torch.einsum("btd,bnd->btn", norm(queries[head], "q_norm"), norm(keys[shared], "k_norm")) / dim**0.5
        if bias is not None:
            scores = scores + bias[head]
        exp = torch.exp(scores) * allowed
        total = exp.sum(-1, keepdim=True) + (1.0 if config.quiet_softmax else 0.0)
        weights = exp / torch.where(total == 0, torch.ones_like(total), total)
        outputs.append(torch.einsum("btn,bnd->btd", weights, values[shared]))
        all_weights.append(weights)
    output = torch.einsum("bti,oi->bto", torch.cat(outputs, dim=-1), weight["o_proj.weight"])
    output = output + weight["o_proj.bias"] if "o_proj.bias" in weight else output
    return output, torch.stack(all_weights, dim=1)


def gradients(output, tensors):
    probe = torch.randn(output.shape, generator=torch.Generator().manual_seed(8), dtype=output.dtype)
    return torch.autograd.grad((output * probe).sum(), tensors)


CASES = list(itertools.product(KV_HEADS, ["none", "padding", "per token", "empty row"], ["eager", "sdpa"]))


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("quiet", [False, True], ids=["", "quiet"])
@pytest.mark.parametrize("qk_norm", [False, True], ids=["", "qk_norm"])
@pytest.mark.parametrize("heads, mask, implementation", CASES)
def test_equals_the_reference(heads, mask, implementation, bias, quiet, qk_norm):
    """Rules out wrong mathematics: a wrong scale, head order, mask, softmax or bias, forward or backward."""
    layer = make_layer(
        implementation,
        torch.float64,
        num_key_value_heads=KV_HEADS[heads],
        attention_bias=bias,
        quiet_softmax=quiet,
        qk_norm=qk_norm,
    )
    hidden, states = (tensor.requires_grad_() for tensor in inputs(torch.float64))
    mask = make_mask(mask)
    output, weights = layer(hidden, states, mask)
    expected, _ = reference(layer, hidden, states, mask)
    assert weights is None
    assert output.shape == (BATCH, TEXT_LEN, HIDDEN)
    torch.testing.assert_close(output, expected, rtol=1e-10, atol=1e-12)
    tensors = [hidden, states, *layer.parameters()]
    names = ["hidden_states", "cross_attention_states", *(name for name, _ in layer.named_parameters())]
    for name, got, want in zip(names, gradients(output, tensors), gradients(expected, tensors), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_the_backward_pass_is_the_derivative(implementation):
    """Rules out a backward pass that is not the derivative of the forward pass, also beside a row that sees nothing."""
    sizes = {"hidden_size": 3, "context_size": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 2}
    layer = make_layer(implementation, torch.float64, **sizes, quiet_softmax=True, qk_norm=True)
    hidden = torch.randn(1, 2, 3, dtype=torch.float64, requires_grad=True)
    states = torch.randn(1, 3, 2, dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[[1, 0, 1], [0, 0, 0]]], dtype=torch.bool)
    names, parameters = zip(*layer.named_parameters())

    def function(hidden, states, *parameters):
        arguments = (hidden, states, mask)
        return torch.func.functional_call(layer, dict(zip(names, parameters)), arguments)[0]

    assert torch.autograd.gradcheck(function, (hidden, states, *parameters))


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 4e-2), (torch.float16, 5e-3)])
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_low_precision_stays_near_the_reference(implementation, dtype, tolerance):
    """Rules out a softmax or a norm that runs in half precision, and casts at the wrong place."""
    layer = make_layer(implementation, dtype, num_key_value_heads=2, qk_norm=True)
    hidden, states = inputs(dtype)
    output = layer(hidden, states, make_mask("per token"))[0]
    assert output.dtype == dtype
    expected = reference(layer.double(), hidden.double(), states.double(), make_mask("per token"))[0]
    assert (output.double() - expected).abs().max() < tolerance * expected.abs().max()


@torch.no_grad()
@pytest.mark.parametrize("mask", [None, (2, 1, 1, 40), (2, 1, 5, 40), (2, 1, 10, 40)], ids=str)
def test_large_scores_in_float16(mask):
    """Products of queries and keys beyond float16's largest number, which overflow before they are scaled."""
    layer = make_layer(dtype=torch.float16, num_key_value_heads=2, head_dim=64)
    query, key, value = ((torch.randn(2, 2, n, 64) * size).half() for n, size in ((10, 100), (40, 100), (40, 1)))
    sees = None if mask is None else torch.rand(mask) > 0.5
    output = kernels.run_kernel(layer, query, key, value, sees, None, group=2)[0]
    scores = query.double() @ key.double().transpose(-1, -2)
    assert scores.abs().max() > torch.finfo(torch.float16).max
    scores = scores * layer.scaling
    if sees is not None:
        scores = scores.masked_fill(~(sees.repeat_interleave(2, dim=2) if mask[2] == 5 else sees), -torch.inf)
    expected = (scores.softmax(-1) @ value.double()).transpose(1, 2)
    torch.testing.assert_close(output.double(), expected, rtol=2**-10, atol=1e-3)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("quiet", [False, True])
def test_masking_equals_removing(implementation, quiet):
    """Rules out a mask that only weakens tokens, or one whose sense is turned round."""
    layer = make_layer(implementation, num_key_value_heads=2, quiet_softmax=quiet)
    hidden, states = inputs()
    keep = torch.tensor([True, False, True, True, False])
    masked = layer(hidden, states, keep.expand(BATCH, -1))[0]
    torch.testing.assert_close(masked, layer(hidden, states[:, keep])[0], rtol=1e-5, atol=1e-6)
    noise = torch.where(keep[:, None], states, 1e4)
    assert torch.equal(masked, layer(hidden, noise, keep.expand(BATCH, -1))[0])


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_a_masked_key_loses_against_any_score(implementation):
    """A mask that is a constant such as -10,000, which real scores may lie below: then masked images win."""
    layer = make_layer(implementation)
    hidden, states = inputs()
    with torch.no_grad():
        layer.q_proj.weight.mul_(1e4)
        layer.k_proj.weight.mul_(1e4)
        for seen in range(NUM_TOKENS):  # whatever the signs of the scores are: the visible token gets all the weight
            keep = (torch.arange(NUM_TOKENS) == seen).expand(BATCH, -1)
            torch.testing.assert_close(layer(hidden, states, keep)[0], layer(hidden, states[:, [seen]])[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("quiet", [False, True])
@pytest.mark.parametrize("fields", [{}, {"position_bias": True}], ids=["", "position_bias"])
@pytest.mark.parametrize("num_tokens", [1, NUM_TOKENS])
def test_seeing_nothing_is_zero(dtype, implementation, quiet, fields, num_tokens):
    """Rules out NaN, or an average over hidden tokens, where a softmax would be taken over nothing."""
    layer = make_layer(implementation, dtype, num_key_value_heads=2, quiet_softmax=quiet, **fields)
    hidden, states = inputs(dtype, num_tokens)
    per_row = torch.ones(BATCH, num_tokens, dtype=torch.bool)
    per_row[0] = False
    per_token = torch.ones(BATCH, TEXT_LEN, num_tokens, dtype=torch.bool)
    per_token[0] = False
    per_token[1, 1] = False
    nowhere = torch.zeros(BATCH, num_tokens, dtype=torch.bool)
    for mask in (per_row, per_token, nowhere):
        dark = ~mask.any(-1)
        dark = dark[:, None].expand(-1, TEXT_LEN) if mask.dim() == 2 else dark
        hidden.requires_grad_(), states.requires_grad_()
        output = layer(hidden, states, mask)[0]
        grads = torch.autograd.grad(output.float().pow(2).sum(), [hidden, states, *layer.parameters()])
        assert output.isfinite().all() and all(grad.isfinite().all() for grad in grads)
        assert not output[dark].any() and not grads[0][dark].any() and not grads[1][0].any()
        assert mask is nowhere or output[~dark].any()
        with torch.no_grad():
            assert not layer(hidden, states, mask)[0][dark].any()
        output, weights = layer(hidden, states, mask, output_attentions=True)
        assert not output[dark].any() and not weights.transpose(1, 2)[dark].any()


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("num_tokens", [1, NUM_TOKENS])
def test_seeing_nothing_of_what_is_no_number(implementation, num_tokens):
    """NaN in padding that reaches a position which sees none of it, because a product with the mask is NaN, too."""
    layer = make_layer(implementation)
    hidden, states = inputs(num_tokens=num_tokens)
    states[1] = float("nan")
    mask = torch.ones(BATCH, num_tokens, dtype=torch.bool)
    mask[1] = False
    with torch.no_grad():
        output, weights = layer(hidden, states, mask, output_attentions=num_tokens > 1)
    assert output[0].isfinite().all() and output[0].any() and not output[1].any()
    assert weights is None or not weights[1].any()


@pytest.mark.parametrize("heads", KV_HEADS)
@pytest.mark.parametrize("quiet", [False, True])
@pytest.mark.parametrize("mask", ["none", "padding", "per token"])
def test_returned_weights_are_those_of_the_reference(heads, quiet, mask):
    """Rules out weights of another head, row or token than their place says, and a null key that is handed out."""
    layer = make_layer("sdpa", torch.float64, num_key_value_heads=KV_HEADS[heads], quiet_softmax=quiet)
    hidden, states = inputs(torch.float64)
    mask = make_mask(mask)
    output, weights = layer(hidden, states, mask, output_attentions=True)
    expected, expected_weights = reference(layer, hidden, states, mask)
    assert weights.shape == (BATCH, 4, TEXT_LEN, NUM_TOKENS)
    torch.testing.assert_close(weights, expected_weights)
    torch.testing.assert_close(output, expected)
    total = weights.sum(-1)
    if mask is not None and mask.dim() == 3:
        total = total.transpose(1, 2)[mask.any(-1)]
    assert (total < 1).all() if quiet else torch.allclose(total, torch.ones_like(total))


@pytest.mark.parametrize("heads", KV_HEADS)
@pytest.mark.parametrize("fields", [{}, {"qk_norm": True, "attention_bias": True}, {"position_bias": True}])
@pytest.mark.parametrize("repeats", [1, 3])
def test_single_key_is_the_value(heads, fields, repeats):
    """Rules out a shortcut for one image token that differs from the general path, or ignores the mask."""
    layer = make_layer(num_key_value_heads=KV_HEADS[heads], **fields)
    hidden = torch.randn(BATCH * repeats, TEXT_LEN, HIDDEN)
    key, value = layer.project_key_value(torch.randn(BATCH, 1, CONTEXT))
    sees = torch.rand(BATCH * repeats, TEXT_LEN, 1) > 0.5
    for mask in (None, sees, torch.tensor([True, False])[:, None, None]):
        visibility = fold_mask(
            mask,
            image_rows=BATCH,
            text_rows=BATCH * repeats,
            text_len=TEXT_LEN,
            group=4 // KV_HEADS[heads],
        )
        general = attend(layer, hidden, key, value, visibility)[0]
        with torch.no_grad():
            assert torch.equal(attend(layer, hidden, key, value, visibility)[0], general)


def test_single_key_shortcut_skips_the_kernel(monkeypatch):
    """Rules out a shortcut that is never taken, or taken where a gradient, weights or a null key need the kernel."""
    calls = []
    original = kernels._interface
    monkeypatch.setattr(kernels, "_interface", lambda *args: calls.append(1) or original(*args))
    hidden, states = inputs(num_tokens=1)
    make_layer()(hidden, states)
    assert len(calls) == 1
    with torch.no_grad():
        make_layer()(hidden, states)
        assert len(calls) == 1
        make_layer(quiet_softmax=True)(hidden, states)
        make_layer()(hidden, states, output_attentions=True)
        make_layer(attention_dropout=0.5).train()(hidden, states)
        assert len(calls) == 4


@pytest.mark.parametrize("num_tokens", [1, NUM_TOKENS])
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_dropout_is_for_training(implementation, num_tokens):
    """Rules out dropout at inference, and dropout that never happens."""
    layer = make_layer(implementation, attention_dropout=0.5)
    plain = make_layer(implementation)
    hidden, states = inputs(num_tokens=num_tokens)
    assert torch.equal(layer(hidden, states)[0], plain(hidden, states)[0])
    layer.train(), plain.train()
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            assert not torch.equal(layer(hidden, states)[0], layer(hidden, states)[0])
            assert torch.equal(plain(hidden, states)[0], plain(hidden, states)[0])


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("mask", ["none", "padding", "per token", "empty row"])
@pytest.mark.parametrize("fields", [{}, {"quiet_softmax": True}, {"position_bias": True}])
def test_flex_attention_reads_masks_and_biases_rightly(monkeypatch, mask, fields):
    """Rules out a mask or a bias in a form that flex attention reads as something else.

    The kernel runs uncompiled: compiling it takes half a minute a case, and its result is torch's affair.
    """

    def uncompiled(query, key, value, training=False, **kwargs):
        return flex_attention(query, key, value, **kwargs)

    monkeypatch.setattr("transformers.integrations.flex_attention.compile_friendly_flex_attention", uncompiled)
    monkeypatch.setattr(kernels, "_flex_reads_masks", lambda device: True)
    hidden, states = inputs()
    with torch.no_grad():
        expected = make_layer("eager", num_key_value_heads=2, **fields)(hidden, states, make_mask(mask))[0]
        output = make_layer("flex_attention", num_key_value_heads=2, **fields)(hidden, states, make_mask(mask))[0]
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mask", ["padding", "per token", "empty row"])
def test_flex_attention_with_a_mask_on_cpu(monkeypatch, mask):
    """Rules out a crash of the whole process: torch's compiled CPU kernel does not survive mask tensors."""

    def refuse(*args, **kwargs):
        raise AssertionError("flex attention was called")

    monkeypatch.setattr("transformers.integrations.flex_attention.compile_friendly_flex_attention", refuse)
    hidden, states = inputs()
    expected = make_layer("sdpa", num_key_value_heads=2)(hidden, states, make_mask(mask))[0]
    output = make_layer("flex_attention", num_key_value_heads=2)(hidden, states, make_mask(mask))[0]
    assert torch.equal(output, expected)


@pytest.mark.parametrize("fields", [{}, {"position_bias": True}], ids=["fp32", "position_bias"])
def test_flash_attention_falls_back(fields):
    """Rules out a flash kernel that gets what it cannot read: a mask, a bias or float32."""
    hidden, states = inputs()
    for mask in ("none", "padding", "per token"):
        expected = make_layer("sdpa", **fields)(hidden, states, make_mask(mask))[0]
        assert torch.equal(make_layer("flash_attention_2", **fields)(hidden, states, make_mask(mask))[0], expected)


@pytest.mark.parametrize("num_buckets, max_distance", [(32, 128), (8, 20), (4, 2), (6, 9)])
def test_buckets_equal_t5(num_buckets, max_distance):
    """Rules out buckets that differ from those a T5-like checkpoint was trained with."""
    distance = torch.arange(-300, 301)
    expected = T5Attention._relative_position_bucket(
        distance, bidirectional=True, num_buckets=num_buckets, max_distance=max_distance
    )
    config = CrossAttentionConfig(position_bias_num_buckets=num_buckets, position_bias_max_distance=max_distance)
    buckets = relative_position_bucket(config, distance)
    assert torch.equal(buckets, expected)
    assert buckets.min() >= 0 and buckets.max() < num_buckets


@pytest.mark.parametrize("heads", KV_HEADS)
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("quiet", [False, True])
def test_position_bias_in_the_output(heads, implementation, quiet):
    """Rules out a bias that goes to another head or token, counts padding, has the sign of the distance wrong, or has
    no gradient.
    """
    layer = make_layer(
        implementation,
        torch.float64,
        num_key_value_heads=KV_HEADS[heads],
        quiet_softmax=quiet,
        position_bias=True,
        position_bias_num_buckets=8,
        position_bias_max_distance=6,
    )
    hidden, states = inputs(torch.float64)
    table = layer.relative_attention_bias.weight
    for kind in ("none", "padding", "per token"):
        mask = make_mask(kind)
        output, _ = layer(hidden, states, mask)
        places = torch.arange(NUM_TOKENS).expand(BATCH, -1)
        if kind == "padding":
            places = torch.tensor([[0, 1, 0, 2, 0], [0, 1, 2, 3, 4]])
        distance = places[:, None] - torch.arange(TEXT_LEN)[:, None]
        buckets = T5Attention._relative_position_bucket(distance, bidirectional=True, num_buckets=8, max_distance=6)
        expected, weights = reference(layer, hidden, states, mask, bias=table[buckets].permute(3, 0, 1, 2))
        torch.testing.assert_close(output, expected, rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(layer(hidden, states, mask, output_attentions=True)[1], weights)
        got, want = gradients(output, [table])[0], gradients(expected, [table])[0]
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)
        assert want.any()


def test_a_decode_step_keeps_the_position_of_its_token():
    """Rules out decode steps whose token counts as position 0."""
    layer = make_layer(num_key_value_heads=2, position_bias=True, position_bias_num_buckets=8)
    hidden, states = inputs()
    key, value = layer.project_key_value(states)
    whole = attend(layer, hidden, key, value, EVERYTHING)[0]
    for step in range(TEXT_LEN):
        positions = torch.tensor([[step]])
        one = attend(layer, hidden[:, step : step + 1], key, value, EVERYTHING, positions=Positions(positions, None))[0]
        torch.testing.assert_close(one[:, 0], whole[:, step])
    assert not torch.allclose(attend(layer, hidden[:, 2:], key, value, EVERYTHING)[0][:, 0], whole[:, 2])


def test_other_images_other_output():
    """Rules out a layer that ignores its context, its text, or mixes the rows of a batch."""
    layer = make_layer(num_key_value_heads=2)
    hidden, states = inputs()
    output = layer(hidden, states)[0]
    changed = states.clone()
    changed[0, 2] += 1
    other = layer(hidden, changed)[0]
    assert not torch.isclose(other[0], output[0]).all(-1).any()
    assert torch.equal(other[1], output[1])
    assert not torch.isclose(layer(hidden + 1, states)[0], output).all(-1).any()


def test_image_tokens_have_no_order():
    """Rules out a positional encoding or a causal mask on the image axis."""
    layer = make_layer(num_key_value_heads=2)
    hidden, states = inputs()
    torch.testing.assert_close(layer(hidden, states.flip(1))[0], layer(hidden, states)[0])


def test_context_dtype_follows_the_weights():
    """Rules out a vision tower in another precision that crashes the key projection."""
    layer = make_layer(dtype=torch.bfloat16)
    hidden, states = inputs()
    expected = layer(hidden.bfloat16(), states.bfloat16())[0]
    assert torch.equal(layer(hidden.bfloat16(), states)[0], expected)


def test_autocast_runs_the_layer_in_its_dtype():
    """Rules out weights in float32 that run in float32 under autocast, and mixed precisions in one kernel."""
    layer = make_layer(num_key_value_heads=2, qk_norm=True, position_bias=True, quiet_softmax=True)
    hidden, states = inputs()
    expected = layer(hidden, states, make_mask("per token"))[0]
    with torch.autocast("cpu", torch.bfloat16):
        output = layer(hidden, states, make_mask("per token"))[0]
    assert output.dtype == torch.bfloat16
    assert (output - expected).abs().max() < 0.05 * expected.abs().max()


@pytest.mark.parametrize(
    "hidden, states, words",
    [
        ((2, 3, 11), (2, 5, 7), ["`hidden_states`", "hidden_size=10", "(2, 3, 11)"]),
        ((3, 10), (2, 5, 7), ["`hidden_states`", "(3, 10)"]),
        ((2, 3, 10), (2, 5, 8), ["`cross_attention_states`", "context_size=7", "(2, 5, 8)"]),
        ((2, 3, 10), (2, 1, 5, 7), ["`cross_attention_states`", "(2, 1, 5, 7)"]),
        ((2, 3, 10), (2, 0, 7), ["no image token", "(2, 0, 7)"]),
        ((2, 3, 10), (1, 5, 7), ["`cross_attention_states`", "batch 1", "batch 2", "encode_images"]),
    ],
)
def test_wrong_shapes_are_refused_by_name(hidden, states, words):
    """Rules out tensors that broadcast to something nobody meant, and errors of a matrix product without names."""
    with pytest.raises(ValueError) as error:
        make_layer()(torch.zeros(hidden), torch.zeros(states))
    assert all(word in str(error.value) for word in words)


def test_wrong_dtypes_are_refused_by_name():
    """Rules out ids in place of features, and 0/1 masks that torch would read as numbers to add."""
    layer = make_layer()
    hidden, states = inputs()
    with pytest.raises(TypeError, match="`cross_attention_states`.*torch.int64"):
        layer(hidden, states.long())
    with pytest.raises(TypeError, match="`hidden_states`.*torch.int64"):
        layer(hidden.long(), states)
    for dtype in (torch.float32, torch.int64):
        with pytest.raises(TypeError, match=f"`cross_attention_mask`.*{dtype}"):
            layer(hidden, states, torch.ones(BATCH, NUM_TOKENS, dtype=dtype))
    with pytest.raises(ValueError, match=r"`cross_attention_mask`.*\(2, 3, 5\).*\(2, 3, 4\)"):
        layer(hidden, states, torch.ones(BATCH, TEXT_LEN, 4, dtype=torch.bool))


def test_a_fresh_layer_returns_zeros_only_with_zero_init():
    """Rules out a fresh layer that changes the text, and one that was asked not to be zero and is."""
    sizes = {"hidden_size": HIDDEN, "context_size": CONTEXT, "num_attention_heads": 4, "head_dim": HEAD_DIM}
    hidden, states = inputs()
    layer = GatedCrossAttention(CrossAttentionConfig(**sizes, attention_bias=True))
    assert not layer(hidden, states)[0].any() and layer.q_proj.weight.any()
    assert GatedCrossAttention(CrossAttentionConfig(**sizes, zero_init=False))(hidden, states)[0].all()
