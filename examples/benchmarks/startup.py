"""Time and peak memory until a model is there, beside transformers' own for the text model alone.

python examples/benchmarks/startup.py [--layers 16] [--repeats 3] [--kinds shards meta]

Each run is a process of its own, and the fastest counts: other work on the machine only adds time. Text model and
model with blocks take turns, in another order each time. A first round, which is not counted, reads the files into the
page cache and compiles both packages, as pip does when it installs them. A Llama of hidden size 2048 in bfloat16 is
saved in shards of 500 MB, and once more with a block in front of every fourth layer. The last row of the table builds
a model of the size of Llama 2 7B on the meta device. A line below it says how long torch alone takes for the random
numbers of a retrofit.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from bench import machine
from transformers import AutoModelForCausalLM, LlamaConfig

import hf_xattn


# VmHWM and not `ru_maxrss`, which starts with the memory of the process that has started this one. It is Linux only.
MEASURE = """
import time
start = time.perf_counter()
{code}
seconds = time.perf_counter() - start
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
print("RESULT", seconds, int(peak.split()[1]) / 2**20)
"""
BASE = "from transformers import AutoModelForCausalLM; model = AutoModelForCausalLM.from_pretrained({base!r})"
META = """
import torch
from transformers import AutoModelForCausalLM, LlamaConfig
with torch.device("meta"):
    model = AutoModelForCausalLM.from_config(LlamaConfig(), dtype=torch.bfloat16)
"""
KINDS = {
    "import": ("from transformers import AutoModelForCausalLM, PreTrainedModel", "import hf_xattn; hf_xattn.retrofit"),
    "from_pretrained": (
        BASE,
        "import hf_xattn; from transformers import AutoModelForImageTextToText as Auto; model = "
        "Auto.from_pretrained({ours!r})",
    ),
    "retrofit from shards": (BASE, "import hf_xattn; model = hf_xattn.retrofit({base!r}, every=4)"),
    "retrofit on meta": (
        META,
        META + "\nimport hf_xattn\nwith torch.device('meta'):\n    model = hf_xattn.retrofit(model, every=4)",
    ),
}
# `start` is set again: the imports are not the question.
DRAW = """
import torch
start = time.perf_counter()
weights = [torch.empty(shape, dtype=torch.bfloat16).normal_(std=0.02) for shape in {shapes}]
"""


def run(code: str) -> tuple[float, float]:
    """Seconds, and the peak of the resident memory in GiB."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-c", MEASURE.format(code=code)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    lines = [line.split() for line in done.stdout.splitlines() if line.startswith("RESULT")]
    if not lines:
        raise RuntimeError(done.stderr)
    return float(lines[0][1]), float(lines[0][2])


def save(folder: Path, layers: int) -> dict[str, Any]:
    """Saves both models. Returns their folders, and the shapes of all first weights that are random."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=2048,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        intermediate_size=8192,
    )
    names: dict[str, Any] = {"base": str(folder / "base"), "ours": str(folder / "ours")}
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(names["base"], max_shard_size="500MB")
    fresh = hf_xattn.retrofit(model, every=4)
    fresh.save_pretrained(names["ours"], max_shard_size="500MB")
    added = [weight for name, weight in fresh.named_parameters() if "cross_attention_block" in name]
    print(f"first weights: {sum(weight.nbytes for weight in added) / 2**30:.2f} GiB")
    return names | {"shapes": [tuple(weight.shape) for weight in added if weight.dim() == 2 and weight.any()]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--kinds", nargs="+", default=["import", "from_pretrained", "shards", "meta"], help="words in the names of rows"
    )
    arguments = parser.parse_args()
    kinds = {kind: codes for kind, codes in KINDS.items() if any(word in kind for word in arguments.kinds)}
    with tempfile.TemporaryDirectory() as folder:
        reads = any("{base" in code for codes in kinds.values() for code in codes)
        names = save(Path(folder), arguments.layers) if reads else {}
        if reads:
            base, ours = (
                sum(file.stat().st_size for file in Path(names[name]).glob("*.safetensors"))
                for name in ("base", "ours")
            )
            print(f"bytes of the files, with blocks over without: {ours / base:.2f}")
        print("| | text model, s | with blocks, s | ratio | text model, GiB | with blocks, GiB | ratio |")
        print("|---|---|---|---|---|---|---|")
        for kind, codes in kinds.items():
            runs: list[list[tuple[float, float]]] = [[], []]
            for repeat in range(arguments.repeats + 1):
                for which in (0, 1) if repeat % 2 else (1, 0):
                    result = run(codes[which].format(**names))
                    if repeat:
                        runs[which].append(result)
            (base_time, base_peak), (our_time, our_peak) = [[min(values) for values in zip(*found)] for found in runs]
            print(
                f"| {kind} | {base_time:.2f} | {our_time:.2f} | {our_time / base_time:.2f} | {base_peak:.2f} | "
                f"{our_peak:.2f} | {our_peak / base_peak:.2f} |",
                flush=True,
            )
        if reads:
            drawn = min(run(DRAW.format(**names))[0] for _ in range(arguments.repeats))
            numbers = sum(height * width for height, width in names["shapes"])
            print(f"torch alone draws the {numbers / 1e6:.0f} million random first weights in {drawn:.2f} s")
    print(json.dumps(machine()))


if __name__ == "__main__":
    main()
