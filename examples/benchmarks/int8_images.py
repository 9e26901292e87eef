"""Images kept in int8 (`cache_dtype="int8"`) beside images kept in the model's dtype: bytes, time and answers.

python examples/benchmarks/int8_images.py [--repeats N] [--quick]            # one block's attention, and a decode step
python examples/benchmarks/int8_images.py --demo OUTPUT [--count N]          # answers of a trained model

OUTPUT is the folder of a finished `hf-xattn demo` without `--language-model`. Its held-out pictures are read
twice, the second time with an image store in int8. Times are medians of runs that take turns. Three ways are timed:
keys and values in the model's dtype, int8 as the package reads it, and int8 that is always dequantised first
(`multiplies_few` in `hf_xattn/storage/int8_states.py` says no).
"""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from alternatives import HEAD_DIM, HEADS, KV_HEADS
from peers import our_model
from timing import DEVICE, seconds
from torch import nn
from transformers import AutoModelForImageTextToText, AutoProcessor
from transformers.cache_utils import DynamicCache

from hf_xattn import CrossAttentionConfig, GatedCrossAttention
from hf_xattn.cache.cross_cache import CrossCache
from hf_xattn.cache.image_layout import ImageLayout
from hf_xattn.layers.context import CrossAttentionContext
from hf_xattn.storage.int8_states import Int8States


WAYS = ("plain", "int8", "dequantised")


@contextmanager
def dequantised_first() -> Iterator[None]:
    rule = Int8States.multiplies_few
    Int8States.multiplies_few = staticmethod(lambda query: False)
    try:
        yield
    finally:
        Int8States.multiplies_few = staticmethod(rule)


def _ways(call: Callable[[Any], Any], plain: Any, small: Any) -> dict[str, Callable[[], Any]]:
    def first() -> Any:
        with dequantised_first():
            return call(small)

    return {"plain": lambda: call(plain), "int8": lambda: call(small), "dequantised": first}


@torch.no_grad()
def attention(repeats: int, quick: bool) -> list[dict[str, Any]]:
    """One text token's attention over cached images, in a layer whose query and output projections cost next to
    nothing.
    """
    sizes = {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM}
    figures = []
    for dtype in (torch.bfloat16, torch.float32):
        layer = GatedCrossAttention(CrossAttentionConfig(hidden_size=64, intermediate_size=1, **sizes))
        layer = layer.to(DEVICE, dtype).eval()
        nn.init.normal_(layer.q_proj.weight, std=0.3)
        nn.init.normal_(layer.o_proj.weight, std=0.02)
        for rows, tokens in ((1, 1601),) if quick else ((1, 1601), (1, 6404), (1, 25616), (4, 1601)):
            pair = tuple(torch.randn(rows, KV_HEADS, tokens, HEAD_DIM, device=DEVICE, dtype=dtype) for _ in range(2))
            text = torch.randn(rows, 1, 64, device=DEVICE, dtype=dtype)
            contexts = []
            for states in (pair, tuple(map(Int8States.quantize, pair))):
                cache = CrossCache()
                cache.fill(ImageLayout.of((tokens,), text.device), [states])
                contexts.append(CrossAttentionContext(cache=cache))
            runs = _ways(lambda context: layer(text, cross_attention=context)[0], *contexts)
            outputs = {name: run().float() for name, run in runs.items()}
            figures.append(
                {
                    "dtype": str(dtype).removeprefix("torch."),
                    "rows": rows,
                    "N": tokens,
                    "bytes": contexts[1].cache.nbytes / contexts[0].cache.nbytes,
                    "difference": ((outputs["int8"] - outputs["plain"]).norm() / outputs["plain"].norm()).item(),
                    **{name: 1e3 * time for name, time in seconds(runs, repeats).items()},
                }
            )
    return figures


@torch.no_grad()
def step(repeats: int, quick: bool) -> list[dict[str, Any]]:
    """A decode step of a whole model: hidden 1024, 16 layers, 4 blocks, 8/4 heads of 128."""
    figures = []
    for dtype in (torch.bfloat16, torch.float32):
        layers, blocks = (2, [1]) if quick else (16, [3, 7, 11, 15])
        model = our_model(1024, layers, blocks, heads=8, kv_heads=4, inner=2816).to(DEVICE, dtype).eval()
        for block in model.blocks:
            nn.init.normal_(block.attn.o_proj.weight, std=0.05)
            nn.init.normal_(block.mlp.down_proj.weight, std=0.02)
        ids = torch.arange(3, 19, device=DEVICE)[None]
        for tokens in (1601,) if quick else (1601, 6404, 25616):
            states = torch.randn(1, tokens, 1024, device=DEVICE, dtype=dtype)
            images = [model.encode_images(cross_attention_states=states, cache_dtype=kind) for kind in (None, "int8")]
            logits, caches = [], []
            for image in images:
                cache = image.fork(DynamicCache(config=model.config.get_text_config(decoder=True)))
                logits.append(model(ids, cache=cache).logits.float())
                caches.append(cache)

            def one_step(cache: Any) -> torch.Tensor:
                output = model(ids[:, :1], cache=cache).logits
                cache.crop(-1)
                return output

            figures.append(
                {
                    "dtype": str(dtype).removeprefix("torch."),
                    "N": tokens,
                    "bytes": images[1].nbytes / images[0].nbytes,
                    "largest logit difference": (logits[1] - logits[0]).abs().max().item(),
                    "largest logit": logits[0].abs().max().item(),
                    **{name: 1e3 * time for name, time in seconds(_ways(one_step, *caches), repeats).items()},
                }
            )
    return figures


def demo(output: Path, count: int) -> dict[str, Any]:
    """Answers of the demo's model about held-out pictures, without and with images in int8."""
    from hf_xattn.demo.canvases import PROMPT, DigitPool, picture_of
    from hf_xattn.demo.run import _accuracy, _read

    model = AutoModelForImageTextToText.from_pretrained(output / "model", dtype=torch.float32).to(DEVICE).eval()
    processor = AutoProcessor.from_pretrained(output / "model")
    pool, rng = DigitPool(held_out=True, seed=0), np.random.default_rng((0, 3))
    canvases = [pool.canvas(rng) for _ in range(count)]
    pictures = [picture_of(canvas) for canvas in canvases]
    found: dict[str, Any] = {"pictures": len(pictures)}
    said = {}
    for kind in (None, "int8"):
        model.enable_image_store(dtype=kind)
        said[kind] = _read(model, processor, canvases, pictures)
        digits, whole = _accuracy(said[kind], canvases)
        found[f"accuracy, {kind or 'plain'}"] = {"digits": digits, "canvases": whole}
    model.disable_image_store()
    found["answers that differ"] = sum(one != other for one, other in zip(*said.values()))
    found.update(_differences(model, processor, pictures[:50], PROMPT))
    return found


@torch.no_grad()
def _differences(model: Any, processor: Any, pictures: list, prompt: str) -> dict[str, float]:
    """Bytes and logits of the same text beside images that are kept in both ways: a prompt and the
    model's own answer.
    """
    bytes_of, largest, scale = {None: 0, "int8": 0}, 0.0, 0.0
    for picture in pictures:
        inputs = processor(text=[prompt], images=[picture]).to(model.device)
        ids = model.generate(**inputs, max_new_tokens=8, do_sample=False)
        logits = []
        for kind in bytes_of:
            image = model.encode_images(pixel_values=inputs["pixel_values"], cache_dtype=kind)
            bytes_of[kind] += image.nbytes
            text = DynamicCache(config=model.config.get_text_config(decoder=True))
            logits.append(model(ids, cache=image.fork(text)).logits)
        largest = max(largest, (logits[1] - logits[0]).abs().max().item())
        scale = max(scale, logits[0].abs().max().item())
    ratio = bytes_of["int8"] / bytes_of[None]
    return {"bytes": ratio, "largest logit difference": largest, "largest logit": scale}


def _table(title: str, figures: list[dict[str, Any]]) -> None:
    print(f"\n{title} (times in ms)\n")
    columns = [name for name in figures[0] if name not in WAYS]
    header = [*columns, "plain", "int8", "dequantised", "int8 / plain"]
    print("| " + " | ".join(header) + " |\n|" + "---|" * len(header))
    for row in figures:
        cells = [f"{row[name]:.3g}" if isinstance(row[name], float) else str(row[name]) for name in columns]
        cells += [f"{row[name]:.2f}" for name in WAYS] + [f"{row['int8'] / row['plain']:.2f}"]
        print("| " + " | ".join(cells) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument(
        "--quick", action="store_true", help="one size and a small model, as a test; its times mean nothing"
    )
    parser.add_argument("--demo", type=Path, metavar="OUTPUT", help="folder of a finished demo")
    parser.add_argument("--count", type=int, default=500, help="pictures (default: 500)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="a JSON file for all figures")
    arguments = parser.parse_args()
    results: dict[str, Any] = {"machine": platform.processor() or platform.machine(), "torch": torch.__version__}
    if arguments.demo is not None:
        results["demo"] = demo(arguments.demo, arguments.count)
        print(json.dumps(results["demo"], indent=2))
    else:
        results["attention"] = attention(arguments.repeats, arguments.quick)
        _table("One text token's attention in one block", results["attention"])
        results["step"] = step(arguments.repeats, arguments.quick)
        _table("A decode step of a model", results["step"])
    if arguments.output is not None:
        arguments.output.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
