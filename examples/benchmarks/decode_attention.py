"""Ways to compute the attention of one decode step, over shapes and dtypes: what the choice of kernel rests on.

python examples/benchmarks/decode_attention.py [--dtypes bfloat16 ...] [--tokens 1601 ...] [--output FILE]

Each cell is bytes of the keys and values over the median time, as a share of the read bandwidth that a plain sum
reaches, or of the bandwidth of a copy on a GPU (bytes read and written). All ways take turns, on enough copies of the
keys and values that no copy is still in the processor's cache. On a GPU there are more ways: each backend of SDPA by
name, flex attention, and an image axis that is split, because K/V heads times rows are few thread blocks; and a run is
a CUDA graph of several calls, so that it is the kernels that are timed, not their launches.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from bench import machine, read_bandwidth
from timing import DEVICE, recorded, seconds
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import flex_attention

from hf_xattn.layers.kernels import attends_unfolded


GROUP, KV_HEADS, HEAD_DIM = 4, 8, 128
COLD_BYTES = 150e6
CALLS = 16  # of a run on a GPU
TABLE = [  # image rows, questions for each
    (1, 1),
    (1, 8),
    (4, 1),
    (32, 1),
]


def package(query, key, value, key_t, value_t, mask):
    if attends_unfolded(query, key, mask, GROUP):
        return gqa(query, key, value, key_t, value_t, mask)
    return sdpa(query, key, value, key_t, value_t, mask)


def sdpa(query, key, value, key_t, value_t, mask):
    return nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)


def gqa(query, key, value, key_t, value_t, mask):
    """Not folded: each query head beside its K/V head, and the image once more for each question."""
    rows, kv_heads, _, width = query.shape
    heads = query.view(rows, kv_heads, -1, GROUP, width).transpose(2, 3).flatten(1, 2)
    output = nn.functional.scaled_dot_product_attention(heads, key, value, attn_mask=mask, enable_gqa=True)
    return output.view(rows, kv_heads, GROUP, -1, width).transpose(2, 3).reshape(query.shape)


def _softmax(scores, mask, dtype, dim):
    scores = scores.float()
    if mask is not None:
        scores = scores.masked_fill(~(mask if dim == -1 else mask.transpose(-1, -2)), torch.finfo(scores.dtype).min)
    return scores.softmax(dim).to(dtype)


def two_products(query, key, value, key_t, value_t, mask):
    scores = torch.matmul(query * HEAD_DIM**-0.5, key.transpose(-1, -2))
    return torch.matmul(_softmax(scores, mask, query.dtype, -1), value)


def keys_first(query, key, value, key_t, value_t, mask):
    scores = torch.matmul(key, (query * HEAD_DIM**-0.5).transpose(-1, -2))
    return torch.matmul(_softmax(scores, mask, query.dtype, -2).transpose(-1, -2), value)


def transposed_cache(query, key, value, key_t, value_t, mask):
    """Keys and values as `(head_dim, tokens)`, as a cache could store them."""
    scores = torch.matmul(query * HEAD_DIM**-0.5, key_t)
    return torch.matmul(_softmax(scores, mask, query.dtype, -1), value_t.transpose(-1, -2))


def in_float32(query, key, value, key_t, value_t, mask):
    return sdpa(query.float(), key.float(), value.float(), None, None, mask).to(query.dtype)


def split(query, key, value, key_t, value_t, mask):
    """The image axis in parts, each with its own softmax, put together by the logarithms of their sums
    (FlashDecoding's way).
    """
    rows, heads, queries, width = query.shape
    size = -(-key.shape[2] // PARTS)
    starts = [(0, key.shape[2] // size, size), (key.shape[2] // size * size, 1, key.shape[2] % size)]
    outputs, sums = [], []
    for start, parts, length in (each for each in starts if each[2]):
        states = [
            part[:, :, start : start + parts * length].unflatten(2, (parts, length)).flatten(1, 2)
            for part in (key, value)
        ]
        each = query.repeat_interleave(parts, dim=1)
        seen = None
        if mask is not None:
            seen = mask[..., start : start + parts * length].unflatten(3, (parts, length)).squeeze(2).transpose(1, 2)
            seen = seen.transpose(1, 2).expand(rows, heads, parts, length).flatten(1, 2).unsqueeze(2)
            seen = torch.where(seen, 0.0, torch.finfo(query.dtype).min).to(query.dtype).expand(-1, -1, queries, -1)
        output, total = _attend_with_sums(each, *states, seen)
        outputs.append(output.unflatten(1, (heads, parts)))
        sums.append(total.unflatten(1, (heads, parts)))
    weights = torch.cat(sums, dim=2).softmax(dim=2).unsqueeze(-1)
    return (torch.cat(outputs, dim=2).float() * weights).sum(dim=2).to(query.dtype)


def _attend_with_sums(query, key, value, mask):
    """Attention, and the logarithm of each query's sum of exponentials. torch has no public function that returns
    both.
    """
    if DEVICE == "cuda":
        aten = torch.ops.aten._scaled_dot_product_efficient_attention
        if mask is not None:  # the kernel wants rows of a multiple of 16 bytes
            room = -(-mask.shape[-1] // 16) * 16
            mask = nn.functional.pad(mask, (0, room - mask.shape[-1]))[..., : mask.shape[-1]]
        output, total = aten(query, key, value, mask, compute_log_sumexp=True)[:2]
        return output, total[..., : query.shape[2]]
    aten = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return aten(query, key, value, attn_mask=mask)[:2]


def backend(kind: SDPBackend):
    def way(query, key, value, key_t, value_t, mask):
        with sdpa_kernel(kind):
            return sdpa(query, key, value, None, None, mask)

    return way


_flex = torch.compile(flex_attention, dynamic=False)


def flex(query, key, value, key_t, value_t, mask):
    """Flex attention, which splits the tokens of a decode step itself. The mask is added to the scores, as
    transformers does.
    """
    if mask is None:
        return _flex(query, key, value)
    bias = torch.where(mask, 0.0, torch.finfo(torch.float32).min)
    return _flex(query, key, value, score_mod=lambda score, row, head, q, k: score + bias[row, 0, 0, k])


PARTS = 16
WAYS: dict[str, Callable[..., torch.Tensor]] = {
    "package": package,
    "folded SDPA": sdpa,
    "enable_gqa": gqa,
    "two products": two_products,
    "keys first": keys_first,
    "K, V transposed": transposed_cache,
    "float32 copies": in_float32,
    "split": split,
}
if DEVICE == "cuda":
    for kind in ("FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION"):
        WAYS[kind.lower()] = backend(getattr(SDPBackend, kind))
    WAYS["flex_attention"] = flex


def row(dtype: torch.dtype, tokens: int, rows: int, questions: int, masked: bool, repeats: int) -> dict[str, float]:
    """Bytes a second of each way."""
    size = 2 * rows * KV_HEADS * tokens * HEAD_DIM * dtype.itemsize
    copies = max(1, math.ceil(COLD_BYTES / size))
    images = []
    for _ in range(copies):
        key, value = (torch.randn(rows, KV_HEADS, tokens, HEAD_DIM, device=DEVICE, dtype=dtype) for _ in range(2))
        images.append((key, value, key.transpose(-1, -2).contiguous(), value.transpose(-1, -2).contiguous()))
    query = torch.randn(rows, KV_HEADS, questions * GROUP, HEAD_DIM, device=DEVICE, dtype=dtype)
    mask = torch.rand(rows, 1, 1, tokens, device=DEVICE) < 0.7 if masked else None
    reference = sdpa(query.float(), images[0][0].float(), images[0][1].float(), None, None, mask)
    left_out = {"float32 copies"} if dtype == torch.float32 else set()
    if (rows, questions) != (1, 1):  # it compiles anew for each shape
        left_out.add("flex_attention")
    torch.compiler.reset()  # as often as it takes: beyond a limit it runs uncompiled
    ways = {name: way for name, way in WAYS.items() if name not in left_out}
    for name, way in list(ways.items()):
        try:
            output = way(query, *images[0], mask)
        except RuntimeError as error:  # what does not take this dtype, mask or size has an empty cell
            print(f"{name}, {dtype}, N {tokens}: {str(error).partition(chr(10))[0]}", file=sys.stderr)
            del ways[name]
            continue
        difference = (output.float() - reference).abs().max().item()
        assert difference < 0.03, (name, difference)
    calls = max(copies, CALLS) if DEVICE == "cuda" else 1
    copy_of_turn = itertools.cycle(images)  # for all ways together: none reads what the last one has left in the cache

    def run(name: str) -> torch.Tensor:
        return ways[name](query, *next(copy_of_turn), mask)

    times = seconds({name: recorded([functools.partial(run, name)] * calls) for name in ways}, repeats)
    return {name: size * calls / time for name, time in times.items()}


def copy_bandwidth() -> float:
    """Bytes a second of a copy of a tensor larger than the caches, counting what is read and what is written."""
    data = torch.ones(2**28, device=DEVICE)
    copied = torch.empty_like(data)
    return 2 * data.nbytes / seconds({"copy": lambda: copied.copy_(data)}, 9)["copy"]


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16", "float16"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[256, 1601, 6404, 25600])
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--max-gb", type=float, default=1.0, help="leave out rows with more bytes of keys and values")
    parser.add_argument("--output", type=Path, help="JSON file for the figures")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    bandwidth = copy_bandwidth() if DEVICE == "cuda" else read_bandwidth()
    print(f"{'copy' if DEVICE == 'cuda' else 'read'} bandwidth {bandwidth / 1e9:.1f} GB/s")
    names = list(WAYS)
    print("| dtype | N | image rows | questions | mask | " + " | ".join(names) + " |")
    print("|---" * (5 + len(names)) + "|")
    figures = []
    for dtype in arguments.dtypes:
        kind = getattr(torch, dtype)
        for tokens in arguments.tokens:
            for rows, questions in TABLE:
                for masked in (False, True):
                    if 2 * rows * KV_HEADS * tokens * HEAD_DIM * kind.itemsize > arguments.max_gb * 1e9:
                        continue
                    if masked and (rows, questions) != (1, 1):
                        continue
                    speeds = row(kind, tokens, rows, questions, masked, arguments.repeats)
                    shares = {name: speed / bandwidth for name, speed in speeds.items()}
                    cells = " | ".join(f"{shares[name]:.2f}" if name in shares else "" for name in names)
                    print(
                        f"| {dtype} | {tokens} | {rows} | {questions} | {'yes' if masked else ''} | {cells} |",
                        flush=True,
                    )
                    figures.append(
                        {"dtype": dtype, "tokens": tokens, "rows": rows, "questions": questions, "masked": masked}
                        | shares
                    )
    if arguments.output:
        arguments.output.write_text(json.dumps({"machine": machine(), "shares": figures}, indent=2) + "\n")
    print(json.dumps(machine()))


if __name__ == "__main__":
    main()
