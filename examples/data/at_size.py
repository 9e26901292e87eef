"""Many rows from start to end: shards are made, two processes train, are killed, go on, and the model is evaluated.

python examples/data/at_size.py [OUT] [--rows 200000] [--shards 40] [--steps 2000]

The model is tiny and has random weights, so that reading is what is tried: its answers mean nothing. The rows are those
of `examples/scenes`, which that script draws.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
from transformers import AutoImageProcessor, AutoTokenizer

import hf_xattn


EXAMPLES = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(EXAMPLES)]
from tiny_chat import CHAT_TEMPLATE  # noqa: E402
from tiny_checkpoints import make_text_checkpoint, make_vision_checkpoint  # noqa: E402


TWO = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "hf_xattn"]


BATCH = 16


def run(*words: object) -> None:
    print("+", *words, flush=True)
    subprocess.run([sys.executable, *map(str, words)], check=True)


def make_model(folder: Path, shards: str) -> None:
    """A tiny model whose tokenizer knows the words of the rows."""
    rows = hf_xattn.load_rows(shards)
    some = [rows[index]["messages"] for index in range(0, len(rows), -(-len(rows) // 2000))]
    contents = [message["content"] for messages in some for message in messages]
    parts = [part for each in contents for part in ([{"text": each}] if isinstance(each, str) else each)]
    words = sorted({word for part in parts for word in re.findall(r"\w+|[^\w\s]", part.get("text", ""))})
    text, vision = make_text_checkpoint(folder / "text", words), make_vision_checkpoint(folder / "vision")
    hf_xattn.retrofit(text, vision, every=2).save_pretrained(folder / "model")
    parts = AutoImageProcessor.from_pretrained(vision), AutoTokenizer.from_pretrained(text)
    hf_xattn.XAttnProcessor(*parts, chat_template=CHAT_TEMPLATE).save_pretrained(folder / "model")


def train_and_kill(words: list[str], output: Path, step: int) -> None:
    """Kills all processes of a run when it has written the checkpoint of a step."""
    process = psutil.Popen([sys.executable, *words])
    written = output / "checkpoints" / f"checkpoint-{step}" / "trainer_state.json"
    while process.poll() is None and not written.exists():
        time.sleep(0.02)
    for each in [process, *process.children(recursive=True)] if process.poll() is None else []:
        each.kill()
    process.wait()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, nargs="?", help="a new folder (default: a temporary one)")
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--shards", type=int, default=40)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--questions", type=int, default=200)
    options = parser.parse_args(arguments)
    if options.output is not None:
        try_reading(options.output.resolve(), options)
        return
    with tempfile.TemporaryDirectory() as folder:
        try_reading(Path(folder), options)


def try_reading(output: Path, options: argparse.Namespace) -> None:
    shards = f"{output}/shards/*.tar"
    scenes = EXAMPLES / "scenes" / "make_scenes.py"
    run(scenes, output / "shards", "--rows", options.rows, "--shards", options.shards)
    run(scenes, output / "development", "--split", "development", "--rows", options.questions)
    make_model(output, shards)

    early = max(1, options.steps // 4)
    words = ["train", output / "model", "--data", shards, "--output", output / "trained", "--stream"]
    words += ["--steps", options.steps, "--save-steps", early, "--batch-size", BATCH, "--workers", 1]
    words += ["--text-share", 0, "--learning-rate", 1e-3, "--log-steps", max(1, options.steps // 10), "--device", "cpu"]
    command = [*TWO, *map(str, words)]
    start = time.perf_counter()
    train_and_kill(command, output / "trained", early)
    print(f"killed behind step {early} of {options.steps}", flush=True)
    run(*command, "--resume")
    seconds = time.perf_counter() - start
    print(f"{options.steps * 2 * BATCH} rows of {len(hf_xattn.load_rows(shards))} in {seconds:.0f} s, with the kill")
    words = ["-m", "hf_xattn", "eval", output / "trained", "--data", output / "development", "--by", "kind", "--json"]
    done = subprocess.run([sys.executable, *map(str, words)], check=True, capture_output=True, text=True)
    shares = json.loads(done.stdout)["pictures"]
    print("right answers:", {way: round(each["normalised"]["share"], 3) for way, each in shares.items()})


if __name__ == "__main__":
    main()
