"""How fast rows are read: pictures a second beside PIL's decoder alone, the start of a run, and what a step waits for.

python examples/benchmarks/reading.py [--pictures 800] [--workers 2] [--rows 1000000]
"""

from __future__ import annotations

import argparse
import functools
import io
import json
import multiprocessing
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from features_once import make_processor
from PIL import Image
from torch.utils.data import DataLoader
from transformers import LlamaConfig, SiglipVisionConfig

import hf_xattn
from hf_xattn.commands.main import main as command
from hf_xattn.data.loading import Shuffled
from hf_xattn.training.bad_rows import Places, RowReader


SHARDS, BATCH = 8, 16
TEMPLATE = "{% for m in messages %}{{ m.role }} : {% for p in m.content if p is mapping %}{{ p.text or '' }}{% else %}{{ m.content }}{% endfor %}\n{% endfor %}"  # noqa: E501


def make_shards(folder: Path, count: int) -> None:
    """Tar shards of smooth pictures of 640 x 480, as a camera's are, with a question each."""
    generator = np.random.default_rng(0)
    for shard in range(SHARDS):
        with tarfile.open(folder / f"{shard:03d}.tar", "w") as tar:
            for index in range(shard, count, SHARDS):
                small = Image.fromarray(generator.integers(0, 255, (30, 40, 3), dtype=np.uint8))
                file = io.BytesIO()
                small.resize((640, 480), Image.Resampling.BICUBIC).save(file, "JPEG", quality=90)
                fields = json.dumps({"question": "what is it ?", "answer": "a picture"}).encode()
                for kind, content in (("jpg", file.getvalue()), ("json", fields)):
                    about = tarfile.TarInfo(f"{index:06d}.{kind}")
                    about.size = len(content)
                    tar.addfile(about, io.BytesIO(content))


def decode(files: list[bytes]) -> int:
    return sum(Image.open(io.BytesIO(file)).convert("RGB").width > 0 for file in files)


def prepare(image_processor: Any, files: list[bytes]) -> int:
    """What transformers does with decoded pictures: it resizes and normalises them."""
    pictures = [Image.open(io.BytesIO(file)).convert("RGB") for file in files]
    return len(image_processor(pictures, return_tensors="pt")["pixel_values"])


def in_processes(function: Callable[[list[bytes]], int], files: list[bytes], workers: int) -> float:
    """Pictures a second."""
    parts = [files[first : first + BATCH] for first in range(0, len(files), BATCH)]
    with multiprocessing.get_context("fork").Pool(workers) as pool:
        pool.map(function, parts[:1] * workers, chunksize=1)
        start = time.perf_counter()
        pool.map(function, parts, chunksize=1)
        return len(files) / (time.perf_counter() - start)


def pictures_a_second(folder: Path, size: int, workers: int) -> dict[str, float]:
    """Of PIL's decoder alone, with transformers' image processor, and of whole batches; each in `workers` processes."""
    rows = hf_xattn.load_rows(f"{folder}/*.tar")
    files = [row["messages"][0]["content"][0]["image"] for row in rows]
    processor = make_processor()
    processor.image_processor.size = {"height": size, "width": size}
    processor.chat_template = processor.chat_template or TEMPLATE
    alone = in_processes(decode, files, workers)
    prepared = in_processes(functools.partial(prepare, processor.image_processor), files, workers)
    collate = hf_xattn.XAttnDataCollator(processor, train_on="all")
    places = Places(Shuffled(rows, len(rows)))
    loader = DataLoader(places, BATCH, num_workers=workers, collate_fn=RowReader(collate, None))
    batches = iter(loader)
    next(batches)  # the workers have started
    start = time.perf_counter()
    read = sum(len(batch["input_ids"]) for batch in batches)
    ours = read / (time.perf_counter() - start)
    return {
        f"PIL's decoder, pictures a second ({size})": alone,
        f"with transformers' image processor ({size})": prepared,
        f"rows read and collated ({size})": ours,
        f"rows beside the decoder ({size})": ours / alone,
        f"rows beside decoder and image processor ({size})": ours / prepared,
    }


def wait_share(folder: Path, workers: int, steps: int) -> float:
    """The share of a step that waits for rows, beside a text model of SmolLM2-135M's size and a small frozen tower."""
    processor = make_processor()
    processor.image_processor.size = {"height": 224, "width": 224}
    processor.chat_template = processor.chat_template or TEMPLATE
    text = LlamaConfig(vocab_size=len(processor.tokenizer), hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3)  # fmt: skip  # noqa: E501
    tower = SiglipVisionConfig(hidden_size=192, intermediate_size=768, num_hidden_layers=6, num_attention_heads=4, image_size=224, patch_size=16, vision_use_head=False)  # fmt: skip  # noqa: E501
    config = hf_xattn.XAttnConfig(text_config=text, vision_config=tower, cross_attention_layers=list(range(3, 30, 4)))
    hf_xattn.XAttnForConditionalGeneration(config).save_pretrained(folder / "model")
    processor.save_pretrained(folder / "model")
    words = ["train", folder / "model", "--data", f"{folder}/*.tar", "--output", folder / "out", "--stream"]
    words += ["--batch-size", BATCH, "--workers", workers, "--text-share", 0, "--device", "cpu"]
    words += ["--steps", steps, "--save-steps", steps, "--log-steps", steps]
    assert command(list(map(str, words))) in (0, None)
    (state,) = (folder / "out" / "checkpoints").glob("*/trainer_state.json")
    return json.loads(state.read_text())["log_history"][0]["data_wait"]


def seconds_to_first_batch(folder: Path, count: int) -> float:
    """From the file of `count` lines to the first rows in their order."""
    path = folder / "rows.jsonl"
    with path.open("w") as file:
        for index in range(count):
            row = {"file_name": f"{index}.jpg", "question": "what is it ? " * 9, "answer": "a picture of it " * 9}
            file.write(json.dumps(row) + "\n")
    start = time.perf_counter()
    rows = hf_xattn.load_rows(path)
    order = Shuffled(rows, count)
    assert all(order[place] for place in range(BATCH))
    return time.perf_counter() - start


def main(arguments: list[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pictures", type=int, default=800)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--steps", type=int, default=8)
    options = parser.parse_args(arguments)
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_shards(folder, options.pictures)
        for size in (224, 336):
            found |= pictures_a_second(folder, size, options.workers)
        found["share of a step that waits for rows"] = wait_share(folder, options.workers, options.steps)
        found[f"seconds to the first batch of {options.rows} lines"] = seconds_to_first_batch(folder, options.rows)
    print(f"torch {torch.__version__}, {options.workers} workers, {options.pictures} pictures", file=sys.stderr)
    for title, value in found.items():
        print(f"| {title} | {value:.3g} |")
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
