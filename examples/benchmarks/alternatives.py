"""Other ways to compute the same attention, measured beside the folded one: what the choice of folding rests on."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from peers import repeated_attention, repeated_on_gqa
from torch import nn

from hf_xattn.layers.attention import fold_queries, unfold_output


HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
Timer = Callable[[dict[str, Callable[[], object]], int], dict[str, float]]


def folded(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """As the package does it: `(B, T, H, D)` queries, `(R, K, N, D)` keys and values."""
    output = nn.functional.scaled_dot_product_attention(fold_queries(query, *key.shape[:2]), key, value)
    return unfold_output(output.transpose(1, 2), query.shape[0] // key.shape[0], query.shape[1])


def group_by_group(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """One call for each query head of a group, K/V not repeated."""
    rows, text_len, heads, head_dim = query.shape
    query = query.view(rows, text_len, key.shape[1], -1, head_dim)
    outputs = [
        nn.functional.scaled_dot_product_attention(query[:, :, :, group].transpose(1, 2), key, value)
        for group in range(query.shape[3])
    ]
    return torch.stack(outputs, dim=3).permute(0, 2, 1, 3, 4).flatten(2)


def two_products(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Folded, with two matrix products and a softmax in place of the fused kernel."""
    scores = fold_queries(query, *key.shape[:2]) @ key.transpose(-1, -2) * query.shape[-1] ** -0.5
    output = scores.float().softmax(dim=-1).to(value.dtype) @ value
    return unfold_output(output.transpose(1, 2), 1, query.shape[1])


@torch.compile(dynamic=False)
def generated(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """One text token by products and sums that inductor fuses: K/V are widened as they are read."""
    queries = query.view(1, key.shape[1], -1, 1, query.shape[-1]).float().unbind(dim=2)
    scores = torch.stack([(key.float() * one).sum(-1) for one in queries], dim=-1) * query.shape[-1] ** -0.5
    weights = scores.softmax(dim=2).unsqueeze(-2).unbind(dim=-1)
    output = torch.stack([(weight * value.float()).sum(2) for weight in weights], dim=2)
    return output.to(value.dtype).view(1, 1, -1)


WAYS = {
    "group by group": group_by_group,
    "enable_gqa": repeated_on_gqa,
    "repeat_interleave": repeated_attention,
}


def prefill(seconds: Timer, device: str, repeats: int) -> dict[str, dict]:
    """The fastest of the other ways over folding, for long queries and in training."""
    figures = {}
    for training, dtype in itertools.product((False, True), (torch.float32, torch.bfloat16)):
        for text_len in (16, 32, 128, 512):
            tensors = [
                torch.randn(shape, device=device, dtype=dtype, requires_grad=training)
                for shape in ((1, text_len, HEADS, HEAD_DIM), *[(1, KV_HEADS, 1601, HEAD_DIM)] * 2)
            ]

            def run(way, tensors=tensors, training=training):
                with torch.set_grad_enabled(training):
                    output = way(*tensors)
                if training:
                    output.sum().backward()

            ways = {"folded": folded, **WAYS}
            times = seconds(
                {name: (lambda way=way, run=run: run(way)) for name, way in ways.items()}, max(3, repeats // 3)
            )
            best = min(WAYS, key=lambda name: times[name])
            name = (
                f"{'training' if training else 'prefill'}, {str(dtype)[6:]}, {text_len} text tokens, N 1601: next best"
            )
            figures[name] = {
                "value": times[best] / times["folded"],
                "detail": f"folded {times['folded'] * 1e3:.1f} ms, {best} {times[best] * 1e3:.1f} ms",
                "measured": times,
            }
    return figures


def decode(seconds: Timer, device: str, repeats: int) -> dict[str, dict]:
    """Other ways for one decode step at N 6404, over folding."""
    shape = (1, KV_HEADS, 6404, HEAD_DIM)
    key, value = (torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(2))
    query = torch.randn(1, 1, HEADS, HEAD_DIM, device=device, dtype=torch.bfloat16)
    wide = [tensor.float() for tensor in (query, key, value)]
    ways = {
        "folded": lambda: folded(query, key, value),
        "two matrix products": lambda: two_products(query, key, value),
        "K/V kept in float32": lambda: folded(*wide),
        "code made by inductor": lambda: generated(query, key, value),
    }
    for name, way in ways.items():
        assert torch.allclose(way().float().flatten(), ways["folded"]().float().flatten(), atol=0.01), name
    times = seconds(ways, repeats)
    return {
        f"decode attention, N 6404: {name}": {
            "value": times[name] / times["folded"],
            "detail": f"folded {times['folded'] * 1e3:.2f} ms, {name} {times[name] * 1e3:.2f} ms",
        }
        for name in list(times)[1:]
    }
