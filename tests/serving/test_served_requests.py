"""Requests to `hf-xattn serve` that would make it read files of its machine, or ask its own network."""

import http.server
import threading

import pytest
from chat_models import data_url, drawing, make_chat_model
from PIL import Image
from transformers import AutoModelForImageTextToText

from hf_xattn.commands.shared import load_processor


pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

TEXT = {"type": "input_text", "text": "what is in the picture ?"}
CALL = {"type": "function_call", "call_id": "1", "name": "look", "arguments": "{}"}


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
    from fastapi.testclient import TestClient

    from hf_xattn.serving.serving import build_app

    folder = make_chat_model(tmp_path_factory.mktemp("served"))
    processor = load_processor(str(folder))
    processor.chat_template += "{% if enable_thinking %} think {% endif %}{% for each in documents or [] %}{% endfor %}"
    app = build_app("seeing", AutoModelForImageTextToText.from_pretrained(folder).eval(), processor)
    return TestClient(app, raise_server_exceptions=False)


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


def responses(**body):
    return "/v1/responses", {"input": "what ?", "max_output_tokens": 3, **body}


def chat(**body):
    return "/v1/chat/completions", {"messages": [{"role": "user", "content": "what ?"}], "max_tokens": 3, **body}


def decisions(**body):
    questions = {"q": {"type": "noul", "instructions": "is <pic> red ?"}}
    return "/v1/systemone", {"state": "look at <pic>", "questions": questions, **body}


def image(where):
    return {"type": "input_image", "image_url": where}


CASES = {
    "output of a tool": lambda where: responses(
        input=[
            {"role": "user", "content": "look"},
            CALL,
            {"type": "function_call_output", "call_id": "1", "output": [TEXT, image(where)]},
        ]
    ),
    "parts with a content": lambda where: responses(input=[{**TEXT, "content": "x"}, {**image(where), "content": "x"}]),
    "instructions": lambda where: responses(instructions=[image(where)]),
    "images of the template": lambda where: chat(chat_template_kwargs={"images": [where]}),
    "arguments of the processor": lambda where: chat(chat_template_kwargs={"processor_kwargs": {"images": [where]}}),
    "a decision": lambda where: decisions(assets={"<pic>": {"type": "image", "data_base64": where}}),
    "a decision of transformers 5.20": lambda where: decisions(images=[where]),
}


@pytest.mark.parametrize("case", CASES)
def test_no_file_and_no_private_address(client, targets, case):
    """An image that is named where images are not looked for: transformers hands its address to the processor, which
    reads it.
    """
    places, opened = targets
    for where in places:
        answer = _post(client, CASES[case](where))
        assert opened == [], "it was read"
        assert answer.status_code == 400 or (answer.status_code == 404 and "decision" in case), answer.text


def test_an_image_that_nobody_has_looked_for(client, targets, monkeypatch):
    """A way to name images that a later transformers adds, and that this package does not know."""
    places, opened = targets
    monkeypatch.setattr("hf_xattn.serving.serving.image_parts", lambda *_: ())
    for where in places:
        answer = _post(client, responses(input=[{"role": "user", "content": [TEXT, image(where)]}]))
        assert opened == [] and answer.status_code == 400 and "place where the server reads none" in answer.text


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
    """A picture that a tool has returned, and variables of the template, refused with the rest."""
    output = [{"type": "input_image", "image_url": data_url(drawing(0))}, TEXT]
    asked = [{"role": "user", "content": "look"}, CALL]
    body = responses(input=[*asked, {"type": "function_call_output", "call_id": "1", "output": output}])
    assert _post(client, body).status_code == 200
    body = chat(chat_template_kwargs={"enable_thinking": True, "documents": []})
    assert _post(client, body).status_code == 200
    for odd in ([3], ["role"]):
        assert _post(client, responses(input=odd)).status_code == 400


def _post(client, request):
    path, body = request
    return client.post(path, json={"model": "seeing", **body})


@pytest.mark.parametrize("name", ["max_pixels", "resized_height"])
def test_a_size_that_nothing_obeys(client, name):
    """A picture that is answered about as if it had the size that the request asks for."""
    url = data_url(drawing(1))
    for path, body in (
        chat(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}, name: 28}]}]),
        chat(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url, name: 28}}]}]),
        responses(input=[{"role": "user", "content": [TEXT, {**image(url), name: 28}]}]),
    ):
        answer = client.post(path, json={"model": "seeing", **body})
        assert answer.status_code == 400 and f"without `{name}`, which is not obeyed" in answer.text, answer.text
    hints = {"type": "image_url", "image_url": {"url": url, "detail": "low"}, "cache_control": {"type": "ephemeral"}}
    path, body = chat(messages=[{"role": "user", "content": [hints, {"type": "text", "text": "what ?"}]}])
    assert client.post(path, json={"model": "seeing", **body}).status_code == 200
