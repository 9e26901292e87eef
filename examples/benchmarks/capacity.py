"""What images cost in decoders of known shapes: bytes of keys and values, and compute. Arithmetic only.

python examples/benchmarks/capacity.py [--tokens N] [--every E]
"""

from __future__ import annotations

import argparse

import torch

from hf_xattn import CrossAttentionConfig
from hf_xattn.checkpoints.model_card import flops_per_text_token, key_value_bytes_per_token


SHAPES = {  # hidden size, layers, query heads, K/V heads, head size, inner size of the MLP
    "Llama-3.2-1B": (2048, 16, 32, 8, 64, 8192),
    "Llama-3.1-8B": (4096, 32, 32, 8, 128, 14336),
    "Llama-3.1-70B": (8192, 80, 64, 8, 128, 28672),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1601, help="tokens an image (default: 1601)")
    parser.add_argument("--every", type=int, default=4, help="a block in front of every E-th layer (default: 4)")
    arguments = parser.parse_args()
    print("| shape | blocks | K/V bytes an image | images a GiB | GFLOP added a text token |")
    print("|---|---|---|---|---|")
    for name, (hidden, layers, heads, kv_heads, head_dim, inner) in SHAPES.items():
        config = CrossAttentionConfig(
            hidden_size=hidden,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            intermediate_size=inner,
        )
        blocks = layers // arguments.every
        size = key_value_bytes_per_token(config, blocks, torch.bfloat16) * arguments.tokens
        flops = flops_per_text_token(config, blocks, arguments.tokens)
        shape = f"{name} (hidden {hidden}, {layers} layers, {heads}/{kv_heads} heads of {head_dim}, inner {inner})"
        print(f"| {shape} | {blocks} | {size / 1e6:.1f} MB | {2**30 // size} | {flops / 1e9:.2f} |")


if __name__ == "__main__":
    main()
