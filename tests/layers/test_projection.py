"""Linear layers over image tokens, where half precision goes through float32."""

import pytest
import torch
from torch.nn.functional import linear

from helpers.models.tiny_models import make_model
from hf_xattn.utils import projection
from hf_xattn.utils.projection import ImageLinear


@pytest.fixture(params=[False, True], ids=["widened", "native"])
def native(request, monkeypatch):
    """A CPU without, and one with arithmetic in half precision."""
    monkeypatch.setattr(projection, "multiplies_natively", lambda dtype: request.param)
    monkeypatch.setattr(projection, "ROWS_AT_ONCE", 50)
    return request.param


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [True, False])
def test_a_widened_projection_is_rounded_once(dtype, bias, native):
    """Rows that are lost or mixed between parts, a bias that is left out, a result that is rounded twice."""
    layer = ImageLinear(24, 10, bias=bias).to(dtype)
    states = torch.randn(3, 2, 27, 24).to(dtype)
    output = layer(states)
    assert output.dtype == dtype and output.shape == (3, 2, 27, 10)
    exact = linear(states.double(), layer.weight.double(), layer.bias.double() if bias else None)
    assert torch.allclose(output.double(), exact, rtol=torch.finfo(dtype).eps, atol=torch.finfo(dtype).eps)
    if not native:
        wide = linear(states.float(), layer.weight.float(), layer.bias.float() if bias else None)
        assert torch.equal(output, wide.to(dtype))


def test_a_widened_projection_gives_gradients(native):
    """A projection that trains on a detached copy."""
    layer = ImageLinear(24, 10).bfloat16()
    states = torch.randn(40, 24).bfloat16().requires_grad_()
    layer(states).float().sum().backward()
    assert states.grad is not None and layer.weight.grad is not None and layer.bias.grad is not None


@torch.no_grad()
def test_every_projection_of_image_tokens(monkeypatch):
    """A layer that still multiplies row by row."""
    model = make_model().to(torch.bfloat16)
    rows = []
    original = torch.nn.Linear.forward

    def forward(self, states):
        rows.append(states.shape[:-1].numel())
        return original(self, states)

    monkeypatch.setattr(projection, "multiplies_natively", lambda dtype: False)
    monkeypatch.setattr(torch.nn.Linear, "forward", forward)
    features = torch.randn(4, 16, 24).bfloat16()
    model.encode_images(cross_attention_states=model.model.connector(features))
    assert not rows
    monkeypatch.setattr(projection, "multiplies_natively", lambda dtype: True)
    model.encode_images(cross_attention_states=model.model.connector(features))
    assert rows == [64] * 6  # two layers of the connector, keys and values of two blocks


@pytest.mark.parametrize(
    ("found", "natively"),
    [
        ({"_is_avx512_supported": True, "_is_avx512_bf16_supported": False, "_is_amx_tile_supported": False}, False),
        ({"_is_avx512_supported": True, "_is_avx512_bf16_supported": True, "_is_amx_tile_supported": False}, True),
        ({"_is_avx512_supported": True, "_is_avx512_bf16_supported": False, "_is_amx_tile_supported": True}, True),
    ],
)
def test_a_cpu_with_avx512_alone_does_not_multiply_bfloat16(monkeypatch, found, natively):
    for name, value in found.items():
        monkeypatch.setattr(torch.cpu, name, lambda value=value: value)
    assert projection.multiplies_natively.__wrapped__(torch.bfloat16) is natively
