"""The OpenAI server of vLLM under load: eight clients at once, and every tenth request is broken."""

import base64
import io
import json
import os
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

import pytest


pytest.importorskip("vllm.config", reason="vLLM is not installed (see examples/vllm)")

from helpers.models.tiny_mllama import picture as drawn
from helpers.processes.engine_models import save_model


REQUESTS, WARM_UP, CLIENTS, MOST_IMAGES = 200, 100, 8, 3
QUESTION = {"type": "text", "text": "what is in the picture ?"}
# A long answer, which goes on when the client is gone.
LONG = {"max_tokens": 200}
# What a process may grow by in all requests, each of which brings about 2 MB. The front end is a while behind: Python
# collects its garbage after some hundred requests.
OF_FRONT, OF_ENGINE = 25 * 10**7, 5 * 10**7


def picture(seed):
    return drawn(600, 600, seed)


def chats():
    """Conversations with no, one and several pictures, each with a number of tokens of its own."""
    pictures = [[], [1], [2, 3], [4], [1, 1, 5], [6], [7], [], [8]]
    return [(each, 4 + index % 5) for index, each in enumerate(pictures)]


def expected(model, processor, pictures, new_tokens):
    content = [{"type": "image", "image": picture(each)} for each in pictures]
    chat = [{"role": "user", "content": [*content, QUESTION]}]
    inputs = processor.apply_chat_template(
        chat, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
    )
    tokens = model.generate(**inputs, max_new_tokens=new_tokens, do_sample=False, eos_token_id=None)
    return tokens[0, inputs["input_ids"].shape[1] :].tolist()


def url(seed):
    made = io.BytesIO()
    picture(seed).save(made, "PNG")
    return "data:image/png;base64," + base64.b64encode(made.getvalue()).decode()


def asked(urls, **options):
    content = [{"type": "image_url", "image_url": {"url": each}} for each in urls]
    options = {"max_tokens": 5, "temperature": 0, "ignore_eos": True, "return_token_ids": True} | options
    return {"model": "model", "messages": [{"role": "user", "content": [*content, QUESTION]}], **options}


BROKEN = {
    "no picture": ("/v1/completions", {"model": "model", "prompt": "<image>what is it ?", "max_tokens": 5}),
    "bad base64": ("/v1/chat/completions", asked(["data:image/png;base64,%%%%"])),
    "not a picture": ("/v1/chat/completions", asked(["data:image/png;base64,AAAA"])),
    "too many": ("/v1/chat/completions", asked([url(1)] * (MOST_IMAGES + 1))),
}


class Server:
    def __init__(self, folder, log):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.log = log
        options = ["--dtype", "float32", "--enforce-eager", "--max-model-len", "256", "--max-num-seqs", "8"]
        options += ["--served-model-name", "model", "--limit-mm-per-prompt", json.dumps({"image": MOST_IMAGES})]
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", folder]
        with log.open("w") as output:
            self.process = subprocess.Popen(
                [*command, "--port", str(self.port), *options],
                env={"VLLM_CPU_KVCACHE_SPACE": "1", **os.environ},
                stdout=output,
                stderr=output,
            )

    def wait(self):
        for _ in range(600):
            try:
                with urlopen(f"http://127.0.0.1:{self.port}/health"):
                    return
            except URLError:
                assert self.process.poll() is None, self.log.read_text()[-3000:]
                time.sleep(0.5)
        raise TimeoutError(self.log.read_text()[-3000:])

    def ask(self, path, body):
        """Status, and what came."""
        data = json.dumps(body).encode()
        request = Request(f"http://127.0.0.1:{self.port}{path}", data, {"Content-Type": "application/json"})
        try:
            with urlopen(request, timeout=300) as answer:
                return answer.status, json.load(answer)
        except HTTPError as error:
            return error.code, json.load(error)

    def cut(self, body):
        """Sends a request, and leaves before the answer."""
        data = json.dumps(body).encode()
        fields = ["Host: here", "Content-Type: application/json", f"Content-Length: {len(data)}"]
        head = "\r\n".join(["POST /v1/chat/completions HTTP/1.1", *fields, "", ""])
        with socket.create_connection(("127.0.0.1", self.port)) as connection:
            connection.sendall(head.encode() + data)
            time.sleep(0.2)

    def running(self):
        with urlopen(f"http://127.0.0.1:{self.port}/metrics") as answer:
            lines = answer.read().decode().splitlines()
        counts = [line.split()[-1] for line in lines if line.startswith("vllm:num_requests_")]
        return sum(float(each) for each in counts)

    def nbytes(self):
        """Memory of the front end, and of the processes of the engine that it started."""
        ids, sizes = [self.process.pid], []
        for each in ids:
            ids += map(int, Path(f"/proc/{each}/task/{each}/children").read_text().split())
            fields = dict(line.split(":", 1) for line in Path(f"/proc/{each}/status").read_text().splitlines())
            sizes.append(int(fields.get("RssAnon", "0 kB").split()[0]) * 1024)
        return sizes[0], sum(sizes[1:])


@pytest.fixture
def served(tmp_path):
    model, processor = save_model(tmp_path / "model", image_visibility="previous")
    server = Server(str(tmp_path / "model"), tmp_path / "server.log")
    try:
        server.wait()
        yield server, model, processor
    finally:
        server.process.terminate()
        server.process.wait()


@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
def test_every_request_under_load_gets_its_own_answer(served):
    """A request that is lost, or gets another's answer, and memory that grows with requests."""
    server, model, processor = served
    right = [expected(model, processor, *each) for each in chats()]
    cut = 0

    def one(number):
        nonlocal cut
        if number % 10 == 9:
            kinds = [*BROKEN, "cut"]
            kind = kinds[number // 10 % len(kinds)]
            if kind != "cut":
                status, answer = server.ask(*BROKEN[kind])
                return status == 400 and len(answer["error"]["message"]) > 20, (kind, status, answer)
            server.cut(asked([url(1)], **LONG))
            cut += 1
            return True, kind
        index = number % len(right)
        pictures, new_tokens = chats()[index]
        body = asked([url(each) for each in pictures], max_tokens=new_tokens)
        status, answer = server.ask("/v1/chat/completions", body)
        return status == 200 and answer["choices"][0]["token_ids"] == right[index], (number, status, answer)

    results = []
    with ThreadPoolExecutor(CLIENTS) as clients:
        results += clients.map(one, range(WARM_UP))
        before = server.nbytes()
        results += clients.map(one, range(REQUESTS))
    assert [found for good, found in results if not good] == []
    assert len(results) == WARM_UP + REQUESTS and cut == (WARM_UP + REQUESTS) // 50
    front, engine = (now - then for now, then in zip(server.nbytes(), before))
    assert front < OF_FRONT and engine < OF_ENGINE
    for _ in range(100):
        if not server.running():
            return
        time.sleep(0.1)
    raise AssertionError("requests whose clients are gone still run")
