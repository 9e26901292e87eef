"""Many clients at once: this package on vLLM, beside `hf-xattn serve`, and beside image tokens in the prompt on vLLM.

python examples/benchmarks/engine.py [--clients 1 8 32] [--only NAME ...] [--output FILE]

Needs vLLM (see examples/vllm). One decoder and one vision tower are joined in three ways (`engine_peers.py`), and each
is served over HTTP by its server's defaults, in float32. Every client asks one question after another about a picture,
and reads the answer as a stream. Four questions are about each picture, so that a kept prefix or a kept picture helps.
The last part asks 32 questions about one picture, eight at once.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from engine_peers import IMAGE_TOKENS, SIDE, cache_bytes, save_in_prompt, save_ours
from PIL import Image


QUESTION_TOKENS, ANSWER_TOKENS, QUESTIONS_A_PICTURE = 24, 32, 4
VLLM = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--dtype", "float32", "--max-model-len", "1024"]
VLLM += ["--max-num-seqs", "32", "--disable-log-stats", "--served-model-name", "model", "--model"]
OURS = [sys.executable, "-m", "hf_xattn", "serve", "--dtype", "float32", "--name", "model"]


class System(NamedTuple):
    save: Callable[[Path], None]
    command: list[str]
    image_tokens: int
    in_prompt: bool


SYSTEMS = {
    "hf_xattn on vLLM": System(save_ours, VLLM, IMAGE_TOKENS, False),
    "hf-xattn serve": System(save_ours, OURS, IMAGE_TOKENS, False),
    "image tokens in the prompt, vLLM": System(partial(save_in_prompt, compression=1), VLLM, IMAGE_TOKENS, True),
    "the same, compressed 4:1": System(partial(save_in_prompt, compression=4), VLLM, IMAGE_TOKENS // 4, True),
}


def picture(seed: int) -> str:
    made = io.BytesIO()
    colours = np.random.default_rng(seed).integers(0, 255, (12, 12, 3), dtype=np.uint8)
    Image.fromarray(colours).resize((SIDE, SIDE)).save(made, "PNG")
    return "data:image/png;base64," + base64.b64encode(made.getvalue()).decode()


def question(number: int, of_picture: int) -> dict[str, Any]:
    words = np.random.default_rng(number).integers(0, 4000, QUESTION_TOKENS)
    parts = [
        {"type": "image_url", "image_url": {"url": picture(of_picture)}},
        {"type": "text", "text": " ".join(f"w{word}" for word in words)},
    ]
    body = {"model": "model", "messages": [{"role": "user", "content": parts}], "stream": True, "temperature": 0}
    return {**body, "max_tokens": ANSWER_TOKENS}


@contextmanager
def served(system: System, folder: Path, log: Path) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {"VLLM_CPU_KVCACHE_SPACE": "2", **os.environ}
    with log.open("w") as output:
        command = [*system.command, str(folder), "--port", str(port)]
        server = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
    address = f"http://127.0.0.1:{port}"
    try:
        for _ in range(1200):
            try:
                with urllib.request.urlopen(f"{address}/health"):
                    break
            except urllib.error.URLError:
                if server.poll() is not None:
                    raise RuntimeError(log.read_text()[-3000:]) from None
                time.sleep(0.5)
        yield address
    finally:
        server.terminate()
        server.wait()


def ask(address: str, body: dict[str, Any]) -> float:
    """Seconds to the first token. Raises a `RuntimeError` for an answer that is too short."""
    request = urllib.request.Request(
        f"{address}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    start, first, text = time.perf_counter(), 0.0, ""
    with urllib.request.urlopen(request) as answer:
        for line in answer:
            if not line.startswith(b"data: {"):
                continue
            choices = json.loads(line[6:])["choices"]
            if choices and (piece := choices[0]["delta"].get("content")):
                first = first or time.perf_counter() - start
                text += piece
    if len(text.split()) < ANSWER_TOKENS - 4:  # a special token is no word
        raise RuntimeError(f"Expected an answer of {ANSWER_TOKENS} words, got {text!r}.")
    return first


def measure(address: str, clients: int, questions: list[dict[str, Any]]) -> dict[str, float]:
    start = time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        firsts = list(pool.map(lambda body: ask(address, body), questions))
    seconds = time.perf_counter() - start
    return {
        "requests a second": len(questions) / seconds,
        "first token, median": statistics.median(firsts),
        "seconds": seconds,
    }


def run(system: System, folder: Path, clients: list[int]) -> dict[str, Any]:
    """Warms up, then measures each number of clients with pictures and questions that the server has not seen."""
    found: dict[str, Any] = {
        "cache bytes": cache_bytes(system.image_tokens, system.in_prompt, QUESTION_TOKENS + ANSWER_TOKENS)
    }
    system.save(folder)
    with served(system, folder, folder.parent / "server.log") as address:
        seen = 0

        def questions(count: int, a_picture: int) -> list[dict[str, Any]]:
            nonlocal seen
            seen += count
            return [question(seen + each, of_picture=10**6 + seen + each // a_picture) for each in range(count)]

        measure(address, max(clients), questions(max(clients), QUESTIONS_A_PICTURE))
        for each in clients:
            found[str(each)] = measure(address, each, questions(max(16, 3 * each), QUESTIONS_A_PICTURE))
        found["one picture"] = measure(address, 8, questions(32, 32))
    return found


def table(results: dict[str, Any], clients: list[int]) -> list[str]:
    lines = ["| | cache a request | " + " | ".join(f"{each} clients" for each in clients) + " | 32 about one picture |"]
    lines.append("|---" * (len(clients) + 3) + "|")
    for name, found in results.items():
        cells = [f"{found['cache bytes'] / 1e6:.2f} MB"]
        for each in clients:
            of = found[str(each)]
            cells.append(f"{of['requests a second']:.2f} /s, {of['first token, median']:.2f} s")
        cells.append(f"{found['one picture']['seconds']:.1f} s")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--only", nargs="+", choices=list(SYSTEMS), default=list(SYSTEMS))
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    results = {}
    for name in given.only:
        with tempfile.TemporaryDirectory() as folder:
            results[name] = run(SYSTEMS[name], Path(folder) / "model", given.clients)
        print("\n".join(table({name: results[name]}, given.clients)[-1:]), flush=True)
    print("\n".join(table(results, given.clients)))
    if given.output:
        machine = {"machine": platform.processor() or platform.machine(), "cores": os.cpu_count()}
        versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        given.output.write_text(json.dumps({**machine, **versions, "results": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
