"""Time and peak memory until a model is there, beside transformers' own for the text model alone.

python examples/benchmarks/startup.py [--layers 16] [--repeats 3]

Each run is a process of its own; all kinds take turns, and the files are in the page cache. A Llama of hidden size 2048 in bfloat16 is
saved in shards of 500 MB, and once more with a block in front of every fourth layer. The last two rows build a model of the size of
Llama 2 7B on the meta device.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

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
        "import hf_xattn; from transformers import AutoModelForImageTextToText as Auto; model = Auto.from_pretrained({ours!r})",
    ),
    "retrofit from shards": (BASE, "import hf_xattn; model = hf_xattn.retrofit({base!r}, every=4)"),
    "retrofit of a 7B on meta": (
        META,
        META + "\nimport hf_xattn\nwith torch.device('meta'):\n    model = hf_xattn.retrofit(model, every=4)",
    ),
}


def run(code: str) -> tuple[float, float]:
    """Seconds, and the peak of the resident memory in GiB."""
    done = subprocess.run(
        [sys.executable, "-c", MEASURE.format(code=code)], capture_output=True, text=True, check=False
    )
    lines = [line.split() for line in done.stdout.splitlines() if line.startswith("RESULT")]
    if not lines:
        raise RuntimeError(done.stderr)
    return float(lines[0][1]), float(lines[0][2])


def save(folder: Path, layers: int) -> dict[str, str]:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=2048,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        intermediate_size=8192,
    )
    names = {"base": str(folder / "base"), "ours": str(folder / "ours")}
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(names["base"], max_shard_size="500MB")
    hf_xattn.retrofit(model, every=4).save_pretrained(names["ours"], max_shard_size="500MB")
    return names


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        names = save(Path(folder), arguments.layers)
        bytes_of = {
            name: sum(file.stat().st_size for file in Path(path).glob("*.safetensors")) for name, path in names.items()
        }
        print(f"bytes of the files, with blocks over without: {bytes_of['ours'] / bytes_of['base']:.2f}")
        print("| | text model, s | with blocks, s | ratio | text model, GiB | with blocks, GiB | ratio |")
        print("|---|---|---|---|---|---|---|")
        for kind, codes in KINDS.items():
            runs: list[list[tuple[float, float]]] = [[], []]
            for repeat in range(arguments.repeats + 1):
                for found, code in zip(runs, codes):
                    result = run(code.format(**names))
                    if repeat:  # the first round reads the files
                        found.append(result)
            (base, base_peak), (ours, our_peak) = [
                [statistics.median(values) for values in zip(*found)] for found in runs
            ]
            print(
                f"| {kind} | {base:.2f} | {ours:.2f} | {ours / base:.2f} | {base_peak:.2f} | {our_peak:.2f} | "
                f"{our_peak / base_peak:.2f} |",
                flush=True,
            )
    print(json.dumps(machine()))


if __name__ == "__main__":
    main()
