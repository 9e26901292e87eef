"""Attention in float16 on a CPU that does not compute in it: a few heads at a time, in float32."""

import pytest
import torch
from tiny_models import make_model, pixels, token_ids
from torch.nn.functional import scaled_dot_product_attention

from hf_xattn.layers import kernels
from hf_xattn.layers.kernels import attend_in_float32, attends_in_float32


@pytest.fixture(params=[False, True], ids=["without float16 arithmetic", "with it"])
def native(request, monkeypatch):
    monkeypatch.setattr(kernels, "multiplies_natively", lambda dtype: request.param)
    return request.param


@torch.no_grad()
@pytest.mark.parametrize("masked", ["", "for all queries", "for each query"])
@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("kv_heads", [1, 3, 4])
def test_equals_float32(kv_heads, group, masked):
    """Heads, rows or masks that are mixed up between parts, a last part that is left out, a result that is rounded
    twice.
    """
    query = torch.randn(2, kv_heads * group, 5, 16).half()
    key, value = (torch.randn(2, kv_heads, 40, 16).half() for _ in range(2))
    mask = None
    if masked:
        mask = torch.rand(2, 1, 1 if masked == "for all queries" else 5, 40) < 0.6
    output = attend_in_float32(query, key, value, mask, 0.3)
    wide = scaled_dot_product_attention(
        query.float(),
        key.float().repeat_interleave(group, dim=1),
        value.float().repeat_interleave(group, dim=1),
        attn_mask=mask,
        scale=0.3,
    )
    assert output.dtype == torch.float16 and output.shape == query.shape
    torch.testing.assert_close(output.float(), wide, rtol=2**-10, atol=1e-6)


def test_when(native):
    """Another dtype that pays for copies; training, whose backward would keep them; dropout that is dropped."""
    half = torch.zeros(1, 1, 1, 1, dtype=torch.float16)
    with torch.no_grad():
        assert attends_in_float32(half, 0.0) == (not native)
        assert not attends_in_float32(half.bfloat16(), 0.0) and not attends_in_float32(half.float(), 0.0)
        assert not attends_in_float32(half, 0.1)
    assert not attends_in_float32(half, 0.0)


@torch.no_grad()
@pytest.mark.parametrize("long", [False, True], ids=["short text", "a mask shared among heads"])
@pytest.mark.parametrize("masked", [False, True], ids=["", "masked"])
def test_in_a_model(native, monkeypatch, long, masked):
    """A layer that skips it, or whose logits differ from the fused kernel's by more than float16 rounds."""
    model = make_model().half()
    ids = token_ids(1, 300).remainder(90) + 4 if long else token_ids(1, 6)
    images = {"pixel_values": pixels(1, 2).half()}
    if masked:
        images["cross_attention_mask"] = torch.ones(1, ids.shape[1], 32, dtype=torch.bool)
        images["cross_attention_mask"][:, : ids.shape[1] // 2, 16:] = False
    calls = []
    original = kernels.attend_in_float32
    monkeypatch.setattr(kernels, "attend_in_float32", lambda *args: calls.append(1) or original(*args))
    output = model(ids, **images).logits
    assert len(calls) == (0 if native else 2), "one for each of two blocks"
    monkeypatch.setattr(kernels, "attends_in_float32", lambda *_: False)
    fused = model(ids, **images).logits
    assert (output - fused).abs().max() < 0.01 * fused.abs().max()
    assert not torch.equal(fused, model(ids).logits), "images count"
