"""What activation checkpointing saves in a training step, by what trains.

python examples/benchmarks/checkpointing_memory.py [--text-tokens T] [--images N] [--rows R]

Bytes beyond weights and gradients: what is kept between forward and backward, and the most at any time of the step. A
Llama of hidden size 512 with 8 layers and 2 blocks, and a SigLIP of 4 layers of width 192 that makes 1600 tokens an
image; float32.
"""

from __future__ import annotations

import argparse

import torch
from memory import Memory, memory_of
from peers import VOCABULARY, our_model, small_tower
from timing import DEVICE

from hf_xattn import freeze


TRAINS = {
    "blocks and connector": {},
    "and the vision tower": {"vision": False},
    "everything": {"text": False, "vision": False},
}


def measure(trains: dict[str, bool], checkpoints: bool, options: argparse.Namespace) -> Memory:
    torch.manual_seed(0)
    model = our_model(512, 8, [3, 7], heads=8, kv_heads=4, inner=1024, vision=small_tower())
    freeze(model, **trains).to(DEVICE).train()
    if checkpoints:
        # until transformers 5.22 the method had another name
        (getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable)()
    ids = torch.randint(3, VOCABULARY, (options.rows, options.text_tokens), device=DEVICE)
    pixels = torch.randn(options.rows, options.images, 3, 560, 560, device=DEVICE)
    return memory_of(lambda: model(ids, pixel_values=pixels, labels=ids, use_cache=False).loss)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text-tokens", type=int, default=128, help="text tokens a row (default: 128)")
    parser.add_argument("--images", type=int, default=1, help="images a row (default: 1)")
    parser.add_argument("--rows", type=int, default=2, help="rows (default: 2)")
    options = parser.parse_args()
    print("| trains | checkpointing | kept for backward, MiB | peak, MiB |")
    print("|---|---|---|---|")
    for name, trains in TRAINS.items():
        for checkpoints in (False, True):
            kept, peak = (size / 2**20 for size in measure(trains, checkpoints, options))
            print(f"| {name} | {'yes' if checkpoints else 'no'} | {kept:.0f} | {peak:.0f} |", flush=True)


if __name__ == "__main__":
    main()
