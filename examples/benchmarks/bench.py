"""Speed and memory of folded cross-attention, beside its peers in the same process.

python examples/benchmarks/bench.py [--quick] [--only NAME ...] [--output FILE]

Every figure is a ratio of medians of interleaved runs, so that a slow minute of the machine falls on both sides. The
table goes to the terminal and, with the machine and the versions, to a JSON file.
"""

from __future__ import annotations

import argparse
import copy
import functools
import json
import os
import platform
from collections.abc import Callable
from pathlib import Path

import alternatives
import features_once
import torch
import transformers
from alternatives import HEAD_DIM, HEADS, KV_HEADS, folded
from memory import Records
from peers import (
    MllamaWithFeatures,
    idefics_attention,
    idefics_model,
    mllama_attention,
    mllama_config,
    our_model,
    repeated_attention,
    repeated_on_gqa,
    small_tower,
)
from timing import DEVICE, seconds
from torch import nn
from transformers.cache_utils import DynamicCache

import hf_xattn
from hf_xattn import CrossAttentionConfig, GatedCrossAttention
from hf_xattn.cache.cross_cache import CrossCache
from hf_xattn.cache.image_layout import ImageLayout
from hf_xattn.importers import import_checkpoint
from hf_xattn.layers.context import CrossAttentionContext
from hf_xattn.utils.projection import ImageLinear
from hf_xattn.utils.transformers_api import CACHE


def beside_cache(key: torch.Tensor, value: torch.Tensor) -> CrossAttentionContext:
    """What a model hands to a layer whose images are cached."""
    cache = CrossCache()
    cache.fill(ImageLayout.of((key.shape[2],), key.device), [(key, value)])
    return CrossAttentionContext(cache=cache)


def read_bandwidth() -> float:
    """Bytes a second of a plain reduction over a tensor larger than the caches."""
    data = torch.ones(2**27, device=DEVICE)
    return data.numel() * data.element_size() / seconds({"sum": lambda: data.sum()}, 9)["sum"]


def _key_value(tokens: int, rows: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (rows, KV_HEADS, tokens, HEAD_DIM)
    return tuple(torch.randn(shape, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))


def attention(repeats: int) -> dict[str, dict]:
    figures = {}
    for beams, tokens in ((1, 6404), (4, 1601)):
        key, value = _key_value(tokens)
        query = torch.randn(beams, 1, HEADS, HEAD_DIM, device=DEVICE, dtype=torch.bfloat16)
        many_key, many_value = (states.repeat_interleave(beams, dim=0) for states in (key, value))
        reference = repeated_attention(query, many_key, many_value)
        difference = (folded(query, key, value) - reference).abs().max().item()
        assert difference < 0.02, difference
        times = seconds(
            {
                "folded": lambda: folded(query, key, value),
                "repeat": lambda: repeated_attention(query, many_key, many_value),
                "gqa": lambda: repeated_on_gqa(query, many_key, many_value),
            },
            repeats,
        )
        name = f"decode attention, {beams} beam(s), N {tokens}"
        figures[f"{name}, against repeat_interleave"] = _ratio(times, "repeat", "folded", 20 if beams == 1 else 40)
        figures[f"{name}, against enable_gqa"] = _ratio(times, "gqa", "folded", 7 if beams == 1 else 16)
        if beams == 1:
            bandwidth = read_bandwidth()
            achieved = 2 * key.numel() * key.element_size() / times["folded"]
            figures["fraction of read bandwidth, N 6404"] = {
                "value": achieved / bandwidth,
                "floor": 0.5,
                "detail": f"{achieved / 1e9:.1f} of {bandwidth / 1e9:.1f} GB/s",
            }
    return figures


def growth(repeats: int) -> dict[str, dict]:
    query = torch.randn(1, 1, HEADS, HEAD_DIM, device=DEVICE, dtype=torch.bfloat16)
    states = {tokens: _key_value(tokens) for tokens in (1601, 25616)}
    times = seconds({str(n): (lambda kv=kv: folded(query, *kv)) for n, kv in states.items()}, repeats)
    ratio = times["25616"] / times["1601"]
    return {
        "growth of a decode step, N 1601 to 25616, over linear": {
            "value": ratio / 16,
            "ceiling": 1.0,
            "detail": f"{times['1601'] * 1e3:.2f} ms to {times['25616'] * 1e3:.2f} ms, 16 times the tokens",
        }
    }


@torch.no_grad()
def layer(repeats: int) -> dict[str, dict]:
    hidden = HEADS * HEAD_DIM
    config = CrossAttentionConfig(
        hidden_size=hidden,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        qk_norm=True,
        norm_eps=1e-5,
        intermediate_size=1,
    )
    ours = GatedCrossAttention(config).to(DEVICE, torch.bfloat16).eval()
    theirs = mllama_attention(hidden, HEADS, KV_HEADS).to(DEVICE, torch.bfloat16).eval()
    nn.init.normal_(ours.o_proj.weight, std=0.02)
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        getattr(theirs, name).weight.copy_(getattr(ours, name).weight)
    figures = {}
    for beams, floor in ((1, 4), (4, 10)):
        states = torch.randn(1, 6404, hidden, device=DEVICE, dtype=torch.bfloat16)
        context = beside_cache(*ours.project_key_value(states))
        cache = DynamicCache()
        theirs(torch.zeros(beams, 1, hidden, device=DEVICE, dtype=torch.bfloat16), states.repeat(beams, 1, 1), cache)
        text = torch.randn(beams, 1, hidden, device=DEVICE, dtype=torch.bfloat16)
        difference = (ours(text, cross_attention=context)[0] - theirs(text, None, cache)[0]).abs().max().item()
        assert difference < 0.05, difference
        times = seconds(
            {
                "ours": lambda: ours(text, cross_attention=context),
                "mllama": lambda: theirs(text, None, cache),
                "projections": lambda: ours.o_proj(ours.q_proj(text)),
            },
            repeats,
        )
        name = f"cross-attention with projections, {beams} row(s), N 6404, against Mllama's"
        figures[name] = _ratio(times, "mllama", "ours", floor)
        figures[f"the same, {beams} row(s), were attention free: two linear layers alone"] = {
            "value": times["mllama"] / times["projections"],
            "detail": f"{times['projections'] * 1e3:.2f} ms of {times['ours'] * 1e3:.2f} ms are q_proj and o_proj",
        }

    peer = idefics_attention(hidden, HEADS).to(DEVICE, torch.bfloat16).eval()
    states = torch.randn(1, 1601, hidden, device=DEVICE, dtype=torch.bfloat16)
    text = torch.randn(1, 1, hidden, device=DEVICE, dtype=torch.bfloat16)
    context = beside_cache(*ours.project_key_value(states))
    times = seconds(
        {
            "ours": lambda: ours(text, cross_attention=context),
            "idefics": lambda: peer(text, key_value_states=states),
        },
        max(3, repeats // 3),
    )
    figures["decode step, N 1601, against Idefics (projects K/V again)"] = _ratio(times, "idefics", "ours", 50)
    return figures


@torch.no_grad()
def projection(repeats: int) -> dict[str, dict]:
    """Keys of an image in bfloat16, against a plain linear layer."""
    ours = ImageLinear(2048, 1024, bias=False).to(DEVICE, torch.bfloat16)
    states = torch.randn(1, 6404, 2048, device=DEVICE, dtype=torch.bfloat16)
    times = seconds(
        {"ours": lambda: ours(states), "linear": lambda: nn.functional.linear(states, ours.weight)},
        max(3, repeats // 3),
    )
    return {
        "projection of 6404 image tokens, 2048 to 1024, bfloat16, against `nn.Linear`": _ratio(times, "linear", "ours")
    }


@torch.no_grad()
def generate(repeats: int) -> dict[str, dict]:
    """64 tokens of a decoder of 8 layers with 2 blocks, hidden 2048, N 6404."""
    ours = our_model(2048, 8, [3, 7], heads=32, kv_heads=8, inner=8192).to(DEVICE, torch.bfloat16).eval()
    base = our_model(2048, 8, None, heads=32, kv_heads=8, inner=8192).to(DEVICE, torch.bfloat16).eval()
    config = mllama_config(2048, 10, [3, 8], heads=32, kv_heads=8, inner=8192)
    theirs = MllamaWithFeatures(config).to(DEVICE, torch.bfloat16).eval()
    states = torch.randn(1, 6404, 2048, device=DEVICE, dtype=torch.bfloat16)
    ids = torch.randint(3, 1000, (1, 16), device=DEVICE)
    figures = {}
    for beams, floor in ((1, 1.3), (4, 2.5)):
        options = {"max_new_tokens": 64, "min_new_tokens": 64, "num_beams": beams, "do_sample": False}
        times = seconds(
            {
                "ours": lambda: ours.generate(ids, cross_attention_states=states, **options),
                "mllama": lambda: theirs.generate(ids, cross_attention_states=states, **options),
                "text": lambda: base.generate(ids, **options),
            },
            max(2, repeats // 5),
        )
        name = f"generate 64 tokens, hidden 2048, 8 + 2 layers, N 6404, {beams} beam(s), against Mllama"
        figures[name] = _ratio(times, "mllama", "ours", floor)
        figures[f"the same, {beams} beam(s), were image and blocks free: the text decoder alone"] = {
            "value": times["mllama"] / times["text"],
            "detail": f"{times['text']:.1f} s of {times['ours']:.1f} s are the decoder's own",
        }
    return figures


@torch.no_grad()
def idefics(repeats: int) -> dict[str, dict]:
    """64 tokens of an Idefics of 8 layers, hidden 512, N 1601, against the same model brought over."""
    theirs = idefics_model().to(DEVICE).eval()
    ours = import_checkpoint(theirs)
    ids = torch.cat([torch.tensor([[theirs.config.vocab_size + 1]]), torch.randint(3, 1000, (1, 15))], dim=1).to(DEVICE)
    features = torch.randn(1, 1, 1601, 512, device=DEVICE)
    seen = torch.ones(1, 16, 1, dtype=torch.long, device=DEVICE)
    options = {"max_new_tokens": 64, "min_new_tokens": 64, "do_sample": False}
    runs = {
        "ours": lambda: ours.generate(ids, cross_attention_states=features, **options),
        "idefics": lambda: theirs.generate(
            ids, image_encoder_embeddings=features, image_attention_mask=seen, **options
        ),
    }
    assert torch.equal(runs["ours"](), runs["idefics"]())
    times = seconds(runs, max(3, repeats // 3))
    return {"generate 64 tokens, hidden 512, 8 + 2 layers, N 1601, against Idefics": _ratio(times, "idefics", "ours")}


@torch.no_grad()
def questions(repeats: int) -> dict[str, dict]:
    """32 questions on one image, against the image 32 times."""
    model = our_model(512, 8, [3, 7], heads=8, kv_heads=4, inner=1024, vision=small_tower()).to(DEVICE).eval()
    pixels = torch.randn(1, 1, 3, 560, 560, device=DEVICE)
    features = model.get_image_features(pixels).pooler_output
    ids = torch.randint(3, 1000, (32, 8), device=DEVICE)
    options = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "return_dict_in_generate": True}

    def size(output) -> int:
        layers = output[CACHE].cross_attention_cache.layers
        return sum(tensor.numel() * tensor.element_size() for layer in layers for tensor in (layer.keys, layer.values))

    figures = {}
    for what, name, image in (
        ("pixels", "pixel_values", pixels),
        ("features, no vision tower", "cross_attention_states", features),
    ):

        def once(name=name, image=image):
            return model.generate(ids, cache=model.encode_images(**{name: image}), **options)

        def every(name=name, image=image):
            return model.generate(ids, **{name: image.repeat(32, *[1] * (image.dim() - 1))}, **options)

        one, many = once(), every()
        assert torch.equal(one.sequences, many.sequences)
        times = seconds({"once": once, "every": every}, max(3, repeats // 5))
        figures[f"32 questions on one image ({what}), time, against 32 times"] = _ratio(times, "every", "once", 3)
        figures[f"32 questions on one image ({what}), cross-cache bytes"] = {
            "value": size(one) / size(many),
            "ceiling": 1 / 32,
            "detail": f"{size(one):,} of {size(many):,} bytes",
        }
    return figures


@torch.no_grad()
def store(repeats: int) -> dict[str, dict]:
    """A second question about an image in a new conversation: with an image store, against the image once more."""
    model = our_model(512, 8, [3, 7], heads=8, kv_heads=4, inner=1024, vision=small_tower()).to(DEVICE).eval()
    keeps = copy.deepcopy(model)
    keeps.enable_image_store()
    pixels = torch.randn(1, 1, 3, 560, 560, device=DEVICE)
    ids = torch.randint(3, 1000, (1, 8), device=DEVICE)

    def ask(asked):
        return asked.generate(ids, pixel_values=pixels, max_new_tokens=1, do_sample=False)

    assert torch.equal(ask(model), ask(keeps)) and torch.equal(ask(model), ask(keeps))
    times = seconds({"again": lambda: ask(model), "stored": lambda: ask(keeps)}, max(3, repeats // 3))
    assert keeps.image_store.misses == 1
    return {
        "first token of a second question about an image, image store against none": _ratio(times, "again", "stored")
    }


def train_questions(repeats: int) -> dict[str, dict]:
    """A training step with 8 questions an image: `image_rows` against the image 8 times."""
    figures = {}
    for frozen in (True, False):
        model = our_model(512, 8, [3, 7], heads=8, kv_heads=4, inner=1024, vision=small_tower(280)).to(DEVICE).train()
        model = hf_xattn.freeze_base(model, vision=frozen)
        ids, pixels = torch.randint(3, 1000, (8, 32), device=DEVICE), torch.randn(1, 1, 3, 280, 280, device=DEVICE)
        inputs = {
            "once": {"pixel_values": pixels, "image_rows": torch.zeros(8, dtype=torch.long, device=DEVICE)},
            "every": {"pixel_values": pixels.repeat(8, 1, 1, 1, 1)},
        }

        def step(name, model=model, ids=ids, inputs=inputs):
            model.zero_grad()
            loss = model(input_ids=ids, labels=ids, use_cache=False, **inputs[name]).loss
            loss.backward()
            return loss

        assert torch.allclose(step("once"), step("every"), rtol=1e-4)
        times = seconds({name: functools.partial(step, name) for name in inputs}, max(3, repeats // 5))
        saved = {name: _saved_bytes(model, functools.partial(step, name)) for name in inputs}
        tower = "frozen tower" if frozen else "tower trains"
        name = f"training, 8 questions an image, {tower}"
        figures[f"{name}, time, against the image 8 times"] = _ratio(times, "every", "once")
        figures[f"{name}, saved for backward, against 8 times"] = {
            "value": saved["every"] / saved["once"],
            "detail": f"{saved['once'] / 2**20:.0f} MiB, 8 times {saved['every'] / 2**20:.0f} MiB",
        }
    return figures


def _saved_bytes(model: nn.Module, step: Callable[[], torch.Tensor]) -> int:
    """Bytes of all tensors that autograd saves in a step, without weights; each storage counts once."""
    storages: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage  # kept, so that no other storage gets its address
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        step()
    weights = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    return sum(storage.nbytes() for address, storage in storages.items() if address not in weights)


@torch.no_grad()
def text_only(repeats: int) -> dict[str, dict]:
    base = our_model(512, 8, None, heads=8, kv_heads=4, inner=1024).to(DEVICE).eval()
    ours = our_model(512, 8, [3, 7], heads=8, kv_heads=4, inner=1024).to(DEVICE).eval()
    ids = torch.randint(3, 1000, (1, 128), device=DEVICE)
    times = seconds({"ours": lambda: ours(ids), "base": lambda: base(ids)}, 5 * repeats)
    ratio = times["ours"] / times["base"]
    detail = f"{times['ours'] * 1e3:.2f} ms, base {times['base'] * 1e3:.2f} ms"
    figure = {"value": ratio, "ceiling": 1.03, "detail": detail, "measured": times}
    return {"text-only call, hidden 512, 8 layers, over its base": figure}


def training(repeats: int) -> dict[str, dict]:
    """A step with a frozen text model."""
    sizes = {"heads": 8, "kv_heads": 4, "inner": 1024}
    ours = hf_xattn.freeze_base(our_model(512, 8, [3, 7], **sizes))
    theirs = MllamaWithFeatures(mllama_config(512, 10, [3, 8], **sizes))
    theirs.requires_grad_(False)
    for index in (3, 8):
        layer = theirs.model.layers[index].requires_grad_(True)
        for gate in (layer.cross_attn_attn_gate, layer.cross_attn_mlp_gate):
            nn.init.ones_(gate)
    ids, states = torch.randint(3, 1000, (2, 128), device=DEVICE), torch.randn(2, 1601, 512, device=DEVICE)

    def step(model):
        model.zero_grad()
        model(input_ids=ids, labels=ids, cross_attention_states=states, use_cache=False).loss.backward()

    models = {"ours": ours.to(DEVICE).train(), "mllama": theirs.to(DEVICE).train()}
    steps = {name: (lambda model=model: step(model)) for name, model in models.items()}
    times = seconds(steps, 3 * repeats)
    peaks = {}
    for name, model in models.items():
        model.zero_grad()
        peaks[name] = _peak_of(steps[name])
    figures = {}
    for what, measured, scale, unit in (("time", times, 1e3, "ms"), ("peak memory", peaks, 2**-20, "MiB")):
        figures[f"training step, frozen text model, {what}, over Mllama's"] = {
            "value": measured["ours"] / measured["mllama"],
            "ceiling": 1.0,
            "detail": f"{measured['ours'] * scale:.0f} {unit}, Mllama {measured['mllama'] * scale:.0f} {unit}",
            "measured": measured,
        }
    return figures


def _peak_of(step: Callable[[], None]) -> int:
    """Largest sum of live allocations of a run, beyond weights."""
    with Records() as records:
        step()
    return records.peak


def _ratio(times: dict[str, float], slow: str, fast: str, floor: float | None = None) -> dict:
    detail = f"{times[fast] * 1e3:.2f} ms against {times[slow] * 1e3:.2f} ms"
    target = {} if floor is None else {"floor": floor}
    return {"value": times[slow] / times[fast], **target, "detail": detail, "measured": times}


SECTIONS = {
    "attention": attention,
    "alternatives": lambda repeats: alternatives.decode(seconds, DEVICE, repeats),
    "prefill": lambda repeats: alternatives.prefill(seconds, DEVICE, repeats),
    "growth": growth,
    "layer": layer,
    "projection": projection,
    "generate": generate,
    "idefics": idefics,
    "questions": questions,
    "store": store,
    "train_questions": train_questions,
    "text_only": text_only,
    "training": training,
    "features": features_once.epoch,
}


def machine() -> dict[str, str | int]:
    name, arithmetic = platform.processor(), "not known"
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), name)
        flags = next((line.split() for line in lines if line.startswith("flags")), [])
        arithmetic = "yes" if "avx512_bf16" in flags else "no"
    return {
        "device": torch.cuda.get_device_name() if DEVICE == "cuda" else name,
        "bfloat16 arithmetic": "yes" if DEVICE == "cuda" else arithmetic,
        "cores": os.cpu_count() or 0,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "hf_xattn": hf_xattn.__version__,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few repeats, no models")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--output", type=Path, help="JSON file for the figures")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    if arguments.quick:
        arguments.repeats, arguments.only = 3, ["attention", "growth"]
    figures: dict[str, dict] = {}
    print(f"{'figure':<86} {'reached':>8} {'target':>8}  detail")
    for name in arguments.only:
        for figure, result in SECTIONS[name](arguments.repeats).items():
            figures[figure] = result
            target = (
                f"≥ {result['floor']:g}"
                if "floor" in result
                else f"≤ {result['ceiling']:.3g}"
                if "ceiling" in result
                else ""
            )
            print(f"{figure:<86} {result['value']:>8.3g} {target:>8}  {result['detail']}", flush=True)
    if arguments.output:
        arguments.output.write_text(json.dumps({"machine": machine(), "figures": figures}, indent=2) + "\n")
    print(json.dumps(machine()))


if __name__ == "__main__":
    main()
