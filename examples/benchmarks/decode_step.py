"""Where the time of a decode step goes, beside the text model without blocks.

python examples/benchmarks/decode_step.py [--intermediate 2048] [--compile] [--generate]

A Llama of hidden size 2048 with 8 layers, and the same with 2 blocks and an image in the cache. `--intermediate` sets
the width of the blocks' MLPs. `--compile` adds a row with static caches and `torch.compile`, and the seconds that
compiling takes. `--generate` adds a step inside `generate`, with a dynamic and with a static cache. On a GPU it
compiles one with a static cache, and replays it as CUDA graphs.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time

import torch
from bench import machine
from peers import our_model
from timing import DEVICE, seconds
from torch import nn
from transformers.cache_utils import DynamicCache, EncoderDecoderCache, StaticCache

import hf_xattn
from hf_xattn import GatedCrossAttentionBlock
from hf_xattn.utils.transformers_api import CACHE


HIDDEN, LAYERS, BLOCKS = 2048, 8, [3, 7]
HEADS, KV_HEADS, INNER = 32, 8, 8192
STEPS = 64  # of a run of `generate`


def parts_of(step, model: nn.Module, repeats: int) -> dict[str, float]:
    """Median milliseconds of a step in the parts of all blocks."""
    times: dict[str, list[float]] = {}

    def watch(module: nn.Module, name: str) -> list:
        starts: list[float] = []

        def stop(*_) -> None:
            times[name][-1] += (time.perf_counter() - starts.pop()) * 1e3

        return [
            module.register_forward_pre_hook(lambda *_: starts.append(time.perf_counter())),
            module.register_forward_hook(stop),
        ]

    handles = []
    for block in (module for module in model.modules() if isinstance(module, GatedCrossAttentionBlock)):
        handles += [*watch(block, "block"), *watch(block.attn, "attention"), *watch(block.mlp, "mlp")]
        handles += [*watch(block.attn.q_proj, "projections"), *watch(block.attn.o_proj, "projections")]
    for _ in range(repeats):
        for name in ("block", "attention", "mlp", "projections"):
            times.setdefault(name, []).append(0.0)
        step()
    for handle in handles:
        handle.remove()
    return {name: statistics.median(values) for name, values in times.items()}


def eager(base: nn.Module, ours: nn.Module, states: torch.Tensor, rows: int, repeats: int) -> dict:
    ids = torch.randint(3, 1000, (rows, 16), device=DEVICE)
    cached = ours(ids, cache=ours.encode_images(cross_attention_states=states))[CACHE]
    plain = base(ids, use_cache=True)[CACHE]

    def step(model: nn.Module, cache) -> None:
        model(ids[:, :1], **{CACHE: cache})
        cache.crop(-1)

    times = seconds({"ours": lambda: step(ours, cached), "base": lambda: step(base, plain)}, repeats)
    parts = parts_of(lambda: step(ours, cached), ours, repeats)
    return {
        "rows": rows,
        "base": times["base"] * 1e3,
        "ours": times["ours"] * 1e3,
        "ratio": times["ours"] / times["base"],
        "attention kernel": parts["attention"] - parts["projections"],
        "projections": parts["projections"],
        "MLP": parts["mlp"],
        "rest of blocks": parts["block"] - parts["attention"] - parts["mlp"],
    }


def compiled(base: nn.Module, ours: nn.Module, states: torch.Tensor, repeats: int) -> dict:
    ids = torch.randint(3, 1000, (1, 16), device=DEVICE)
    caches, steps, compile_seconds = {}, {}, {}
    for name, model in (("base", base), ("ours", ours)):
        cache = StaticCache(base.config, max_cache_len=16 + 4 * repeats)
        images = {}
        if name == "ours":
            cache, images = EncoderDecoderCache(cache, DynamicCache()), {"cross_attention_states": states}
        caches[name] = model(ids, **{CACHE: cache}, **images)[CACHE]
        forward = torch.compile(model.forward, dynamic=False)

        def step(forward=forward, name=name):
            return forward(ids[:, :1], **{CACHE: caches[name]})

        start = time.perf_counter()
        step(), step()
        compile_seconds[name] = time.perf_counter() - start
        steps[name] = step
    times = seconds(steps, repeats)
    return {
        "base": times["base"] * 1e3,
        "ours": times["ours"] * 1e3,
        "ratio": times["ours"] / times["base"],
        "compile seconds": compile_seconds,
    }


def in_generate(base: nn.Module, ours: nn.Module, states: torch.Tensor, repeats: int) -> dict:
    """Milliseconds of a step: those of many tokens, less those of one, over the steps between."""
    ids = torch.randint(3, 1000, (1, 16), device=DEVICE)
    images = {"base": {}, "ours": {"cross_attention_states": states}}
    figures: dict[str, dict] = {}
    for cache in ("dynamic", "static"):

        def run(model: nn.Module, name: str, tokens: int, cache=cache) -> None:
            length = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False}
            model.generate(ids, **images[name], **length, cache_implementation=cache)

        runs = {
            (name, tokens): (lambda model=model, name=name, tokens=tokens: run(model, name, tokens))
            for name, model in (("base", base), ("ours", ours))
            for tokens in (1, 1 + STEPS)
        }
        start = time.perf_counter()
        for each in runs.values():  # compiles
            each()
        warm = time.perf_counter() - start
        times = seconds(runs, repeats)
        steps = {name: (times[name, 1 + STEPS] - times[name, 1]) / STEPS * 1e3 for name in images}
        figures[cache] = {**steps, "ratio": steps["ours"] / steps["base"], "seconds of the first runs": warm}
    return figures


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--tokens", type=int, default=6404)
    parser.add_argument("--intermediate", type=int, default=INNER)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--generate", action="store_true")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    dtype = getattr(torch, arguments.dtype)
    base = our_model(HIDDEN, LAYERS, None, heads=HEADS, kv_heads=KV_HEADS, inner=INNER)
    options = {"qk_norm": True, "intermediate_size": arguments.intermediate}
    ours = hf_xattn.retrofit(copy.deepcopy(base), cross_attention_layers=BLOCKS, cross_attention=options)
    base, ours = (model.to(DEVICE, dtype).eval() for model in (base, ours))
    for block in (module for module in ours.modules() if isinstance(module, GatedCrossAttentionBlock)):
        nn.init.normal_(block.attn.o_proj.weight, std=0.02)
    states = torch.randn(1, arguments.tokens, HIDDEN, device=DEVICE, dtype=dtype)

    embeddings = base.get_input_embeddings().weight.numel()
    read = [sum(weight.numel() for weight in model.parameters()) - embeddings for model in (base, ours)]
    key_value = 2 * len(BLOCKS) * KV_HEADS * (HIDDEN // HEADS) * arguments.tokens
    print(f"numbers read in a step, over the text model's: {(read[1] + key_value) / read[0]:.3f}")
    for rows in (1, 4):
        print(
            json.dumps(
                {name: round(value, 3) for name, value in eager(base, ours, states, rows, arguments.repeats).items()}
            ),
            flush=True,
        )
    if arguments.compile:
        print(json.dumps({"compiled": compiled(base, ours, states, arguments.repeats)}))
    if arguments.generate:
        print(json.dumps({"in generate": in_generate(base, ours, states, arguments.repeats)}))
    print(json.dumps(machine()))


if __name__ == "__main__":
    main()
