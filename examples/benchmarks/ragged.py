"""Rows with 1 to 8 images in one batch: what padding costs, and what is left of it.

python examples/benchmarks/ragged.py [--images 1 2 3 4 5 6 7 8] [--dtype float32] [--repeats 3]

Compares the package as it is with the same code where nothing can be read of the masks (as under `torch.compile`),
which computes padding and masks it. First both answers are compared. Arithmetic is counted by
`torch.utils.flop_counter`, memory from the profiler's records, time as the median of runs that take turns. A SigLIP of
4 layers of width 192 makes 400 tokens an image; a Llama of hidden size 1024 with 4 layers and 2 blocks.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterator
from unittest.mock import patch

import torch
from memory import Records
from peers import VOCABULARY, our_model, small_tower
from timing import DEVICE, seconds
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from hf_xattn.utils.transformers_api import CACHE


TEXT_TOKENS = 16
WAYS = ("padded", "ragged")


@contextlib.contextmanager
def way(name: str) -> Iterator[None]:
    """Inside, padding is computed and masked, or left out."""
    with contextlib.ExitStack() as stack:
        if name == "padded":
            for module in ("cache.image_layout", "parts.tiles"):
                stack.enter_context(patch(f"hf_xattn.{module}.has_values", return_value=False))
        yield


def in_way(name: str, run: Callable[[], object]) -> Callable[[], object]:
    def wrapped() -> object:
        with way(name):
            return run()

    return wrapped


def flops(run: Callable[[], object]) -> float:
    """Of matrix products and attention, whose usual CPU kernel the counter does not know."""
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        run()
    return counter.get_total_flops()


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, nargs="+", default=list(range(1, 9)), help="images of each row")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--repeats", type=int, default=3, help="timed runs of each side")
    options = parser.parse_args()

    vision = small_tower(280)
    model = our_model(1024, 4, [1, 3], heads=16, kv_heads=8, inner=2048, vision=vision)
    model = model.to(DEVICE, getattr(torch, options.dtype)).eval()
    rows, most = len(options.images), max(options.images)
    ids = torch.randint(3, VOCABULARY, (rows, TEXT_TOKENS), device=DEVICE)
    images = {
        "pixel_values": torch.randn(rows, most, 3, 280, 280, device=DEVICE),
        "image_mask": torch.arange(most, device=DEVICE) < torch.tensor(options.images, device=DEVICE)[:, None],
    }
    caches, logits = {}, {}

    def prefill() -> torch.Tensor:
        return model(ids, use_cache=True, **images)

    for name in WAYS:
        with way(name):
            output = prefill()
        logits[name], caches[name] = output.logits, output[CACHE]
    torch.testing.assert_close(*logits.values(), atol=1e-4 if options.dtype == "float32" else 0.1, rtol=0.01)

    def step(name: str) -> Callable[[], object]:
        def run() -> None:
            model(ids[:, :1], cache=caches[name])
            caches[name].crop(-1)

        return in_way(name, run)

    print(f"{rows} rows of {options.images} images: {sum(options.images)} images and {rows * most} places")
    print(f"{options.dtype} on {DEVICE}, {torch.get_num_threads()} threads")
    print("| | padded | ragged | padded / ragged |")
    print("|---|---|---|---|")
    table: dict[str, tuple[float, dict[str, float]]] = {
        "prefill, TFLOP": (1e12, {name: flops(in_way(name, prefill)) for name in WAYS}),
        "decode step, GFLOP": (1e9, {name: flops(step(name)) for name in WAYS}),
    }
    peaks = {}
    for name in WAYS:
        with way(name), Records() as records:
            prefill()
        peaks[name] = float(records.peak)
    table["prefill, peak MiB"] = (2**20, peaks)
    table["prefill, s"] = (1, seconds({name: in_way(name, prefill) for name in WAYS}, options.repeats))
    table["decode step, ms"] = (1e-3, seconds({name: step(name) for name in WAYS}, 10 * options.repeats))
    for name, (unit, values) in table.items():
        padded, ragged = (values[each] / unit for each in WAYS)
        print(f"| {name} | {padded:.2f} | {ragged:.2f} | {padded / ragged:.2f} |")


if __name__ == "__main__":
    main()
