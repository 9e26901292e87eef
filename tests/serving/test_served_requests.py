"""Requests that would make `hf-xattn serve` read files of its machine, or ask its own network."""

import http.server
import random
import threading

import pytest
import torch
from huggingface_hub.utils import httpx
from PIL import Image
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from helpers.models.chat_models import data_url, drawing, make_chat_model


pytest.importorskip("openai")
pytest.importorskip("fastapi")
from helpers.processes.model_server import Served
from hf_xattn.serving.answering import _Pieces


TEXT = {"type": "text", "text": "what is in the picture ?"}


class Inside(http.server.BaseHTTPRequestHandler):
    """A server that only this machine can reach."""

    asked: list[str] = []

    def do_GET(self):
        self.asked.append(self.path)
        self.send_response(404)
        self.end_headers()

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    """A server that fetches public addresses, and its client."""
    served = Served(make_chat_model(tmp_path_factory.mktemp("served")), "seeing", fetch=True)
    used = "{% if enable_thinking %} think {% endif %}{% for each in documents or [] %}{% endfor %}"
    served.processor.chat_template += used
    with httpx.Client(base_url=served.address, timeout=60) as client:
        yield client
    served.stop()


@pytest.fixture
def targets(tmp_path, monkeypatch):
    """A file and an address of the server's own; and what was opened of them."""
    drawing(1).save(tmp_path / "secret.png")
    served = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Inside)
    threading.Thread(target=served.serve_forever, daemon=True).start()
    Inside.asked = opened = []
    real = Image.open

    def noted(file, *args, **kwargs):
        if isinstance(file, (str, type(tmp_path))):
            opened.append(str(file))
        return real(file, *args, **kwargs)

    monkeypatch.setattr(Image, "open", noted)
    yield (str(tmp_path / "secret.png"), f"http://127.0.0.1:{served.server_port}/inside"), opened
    served.shutdown()
    served.server_close()


def chat(*parts, **body):
    message = {"role": "user", "content": [TEXT, *parts]}
    return {"messages": [message], "max_tokens": 3, **body}


def image(where):
    return {"type": "image_url", "image_url": {"url": where}}


CASES = {
    "a part": lambda where: chat(image(where)),
    "a part without an object": lambda where: chat({"type": "image_url", "image_url": where}),
    "a part of transformers": lambda where: chat({"type": "image", "path": where}),
    "a second address of a part": lambda where: chat({"type": "image_url", "path": where}),
    "a part with a text": lambda where: chat({**TEXT, "url": where}),
    "a video": lambda where: chat({"type": "video_url", "video_url": {"url": where}}),
    "output of a tool": lambda where: chat(messages=[{"role": "tool", "tool_call_id": "1", "content": [image(where)]}]),
    "beside the content": lambda where: chat(messages=[{"role": "user", "content": "a", "images": [where]}]),
    "a name": lambda where: chat(messages=[{"role": "user", "content": "a", "name": [image(where)]}]),
    "a field": lambda where: chat(images=[where]),
    "images of the template": lambda where: chat(chat_template_kwargs={"images": [where]}),
    "arguments of the processor": lambda where: chat(chat_template_kwargs={"processor_kwargs": {"images": [where]}}),
    "an assistant model": lambda where: chat(generation_config={"assistant_model": where}),
}


@pytest.mark.parametrize("case", CASES)
def test_no_file_and_no_private_address(client, targets, case):
    """An image that is named where images are not looked for: the processor would read it."""
    places, opened = targets
    for where in (*places, f"file://{places[0]}"):
        answer = _post(client, CASES[case](where))
        assert opened == [], "it was read"
        assert answer.status_code == 400, answer.text


@pytest.mark.parametrize(
    "given",
    [
        {"size": {"height": 10**5, "width": 10**5}},
        {"chat_template": "{{ 1 }}"},
        {"messages": []},
        {"tools": []},
        ["a"],
        3,
    ],
)
def test_template_kwargs_are_variables(client, given):
    """A size of images that takes all memory, or another template, which may run for ever."""
    answer = _post(client, chat(chat_template_kwargs=given))
    assert answer.status_code == 400 and "chat_template_kwargs" in answer.text


def test_what_stays_allowed(client):
    """Variables of the template, refused with the rest; hints that change nothing."""
    url = data_url(drawing(1))
    assert _post(client, chat(chat_template_kwargs={"enable_thinking": True, "documents": []})).status_code == 200
    hints = {"type": "image_url", "image_url": {"url": url, "detail": "low"}, "cache_control": {"type": "ephemeral"}}
    assert _post(client, chat(hints)).status_code == 200


def _post(client, body):
    return client.post("/v1/chat/completions", json={"model": "seeing", **body})


@pytest.mark.parametrize("name", ["max_pixels", "resized_height"])
def test_a_size_that_nothing_obeys(client, name):
    """A picture that is answered about as if it had the size that the request asks for."""
    url = data_url(drawing(1))
    for part in ({**image(url), name: 28}, {"type": "image_url", "image_url": {"url": url, name: 28}}):
        answer = _post(client, chat(part))
        assert answer.status_code == 400 and f"{name}`: Extra inputs" in answer.text, answer.text


def test_what_nobody_reads_in_a_part(client):
    """A second picture of a part, of which nothing is said."""
    url = data_url(drawing(1))
    other = data_url(drawing(2))
    for part, name in (
        ({**image(url), "image": other}, "image"),
        ({"type": "image_url", "image_url": {"url": url, "path": other}}, "path"),
        ({"type": "text", "text": "hi", "image_url": {"url": url}}, "image_url"),
        ({**image(url), "foo": 3}, "foo"),
    ):
        answer = _post(client, chat(part))
        assert answer.status_code == 400 and name in answer.text, answer.text


def test_a_stream_of_broken_characters():
    """Bytes that never become a character: an error in place of an answer, or text that is lost or comes twice."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in (0x0A, 0xF0, 0x9F, 0x98, 0x80)), "a", "b"]
    model = models.BPE({piece: number for number, piece in enumerate(pieces)}, [], byte_fallback=True)
    backend = Tokenizer(model)
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")
    draw = random.Random(0)
    broken = [1, 2, 3, 6]
    for ids in (broken, [2, 3, 4, 5, 6, 7], *([draw.randrange(1, 8) for _ in range(8)] for _ in range(200))):
        given = []
        stream = _Pieces(tokenizer, [], given.append)
        stream.put(torch.tensor([[6, 6]]))  # the prompt
        for token in ids:
            stream.put(torch.tensor([token]))
        whole = tokenizer.decode(ids, skip_special_tokens=True)
        stream.finish(whole)
        shown = "".join(given)  # a line break that was shown may become part of the bytes that are no character
        assert len(shown) == len(whole) and (shown == whole or "\ufffd" in whole)
