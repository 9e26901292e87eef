"""`hf-xattn serve`: a chat about images over HTTP, with the client that people use."""

import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import pytest
from huggingface_hub.utils import httpx
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor, AutoTokenizer

from helpers.models.chat_models import NEW_TOKENS, answer, data_url, drawing, question
from helpers.processes.model_server import TEXT, Served, asked, openai
from hf_xattn.commands.main import main


def test_answers_are_those_of_generate(served):
    """An image that the server drops; an answer, streamed or whole, that `generate` would not give."""
    answers = set()
    for images in ((drawing(0),), (drawing(1),), (drawing(0), drawing(1)), ()):
        expected = served.expected([question(TEXT, *images)])
        messages = [asked(TEXT, *images)]
        assert served.text(messages) == expected
        chunks = list(served.ask(messages, stream=True))
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected
        assert chunks[-1].choices[0].finish_reason == "length"
        answers.add(expected)
    assert len(answers) == 4


def test_pictures_are_read_as_by_the_processor(served):
    """A transparent picture on black, where `generate` sees it on white."""

    def expected(image):
        return served.expected([question(TEXT, image)])

    clear = [drawing(seed) for seed in range(30)]
    for each in clear:
        each.putalpha(Image.linear_gradient("L").resize(each.size))
    told = next(each for each in clear if expected(each) != expected(each.convert("RGB")))
    assert served.text([asked(TEXT, told)]) == expected(told)
    assert served.text([asked(TEXT, told.convert("RGB"))]) == expected(told.convert("RGB"))


def test_a_second_turn_knows_the_first(served):
    """A second turn that has lost the first, or its image."""
    first = served.text([asked(TEXT, drawing(2))])
    turns = [asked(TEXT, drawing(2)), {"role": "assistant", "content": first}, asked("how many ?", drawing(3))]
    theirs = [question(TEXT, drawing(2)), {"role": "assistant", "content": first}, question("how many ?", drawing(3))]
    second = served.text(turns)
    assert second == served.expected(theirs)
    turns[0] = asked(TEXT, drawing(0))
    assert served.text(turns) != second


def test_two_clients_at_once(served):
    """Answers that come back to the other client."""
    expected = [served.expected([question(TEXT, drawing(seed))]) for seed in range(4)]
    clients = [openai.OpenAI(base_url=f"{served.address}/v1", api_key="none", timeout=60) for _ in range(2)]

    def ask(seed):
        stream = served.ask([asked(TEXT, drawing(seed))], client=clients[seed % 2], stream=True)
        return "".join(chunk.choices[0].delta.content or "" for chunk in stream)

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(ask, range(4))) == expected
    for client in clients:
        client.close()


def test_clients_find_the_model_and_nothing_else(served):
    """A model that clients cannot find, or a page that the framework opens by itself."""
    assert [model.id for model in served.client.models.list()] == ["seeing"]
    assert json.loads(served.fetch("/health")) == {"status": "ok"}
    for path in ("/v1/responses", "/v1/completions", "/docs", "/openapi.json", "/nowhere"):
        answer = httpx.get(served.address + path)
        assert answer.status_code == 404 and answer.json()["error"]["type"] == "invalid_request_error"


BROKEN = data_url(drawing(0, 64))
REFUSED = {
    "no image": (asked(TEXT, "data:image/png;base64,bm8gaW1hZ2U="), "part 0 of message 0 cannot be read"),
    "cut off": (asked(TEXT, drawing(1), BROKEN[: len(BROKEN) // 2]), "part 1 of message 0 cannot be read"),
    "file of the server": (asked(TEXT, __file__), "start with data:image/"),
    "an address": (asked(TEXT, "https://example.com/a.png"), "with `--fetch-images`"),
    "no address": (
        {"role": "user", "content": [{"type": "image_url"}]},
        "parts.0.image_url.image_url`: Field required",
    ),
    "audio": (
        {"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}]},
        "Input tag 'input_audio'",
    ),
    "text that is none": (
        {"role": "user", "content": [{"type": "text", "text": 3}]},
        "parts.0.text.text`: Input should be a valid string",
    ),
    "content that is none": ({"role": "user", "content": 3}, "0.content.parts`: Input should be a valid list"),
    "no role": ({"content": "a"}, "0.role`: Field required"),
    "no message": (None, "`messages`: List should have at least 1 item"),
    "a text with a picture in it": (
        {"role": "user", "content": [{"type": "text", "text": "a", "image_url": {"url": BROKEN}}]},
        "parts.0.text.image_url`: Extra inputs",
    ),
    "a picture with a text in it": (
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": BROKEN}, "text": "a"}]},
        "parts.0.image_url.text`: Extra inputs",
    ),
    "images beside the content": ({"role": "user", "content": "a", "images": ["x"]}, "0.images`: Extra inputs"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_wrong_request_is_the_clients_error(served, case):
    """A blind answer, a server's error without words, or a server that does not answer again."""
    message, words = REFUSED[case]
    messages = [] if message is None else [message]
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as error:
            served.ask(messages, stream=stream)
        assert words in error.value.body["message"] and len(error.value.body["message"]) < 500
    served.check_goes_on()


@pytest.mark.parametrize(
    "field, value",
    [
        ("n", 2),
        ("logprobs", True),
        ("response_format", {"type": "json_object"}),
        ("presence_penalty", 1.0),
        ("frequency_penalty", 1.0),
        ("tools", [{"type": "function", "function": {"name": "look", "parameters": {}}}]),
        ("tool_choice", "required"),
        ("parallel_tool_calls", False),
        ("store", True),
    ],
)
def test_a_field_that_the_server_ignores(served, field, value):
    """An answer of another kind than was asked for, without a word."""
    with pytest.raises(openai.BadRequestError, match=f"Expected `{field}` to be"):
        served.ask([asked(TEXT)], **{field: value})


@pytest.mark.parametrize("field", ["audio", "prediction", "reasoning_effort", "input", "top_k", "max_output_tokens"])
def test_a_field_that_is_not_known(served, field):
    """A field of another API, of a later one, or misspelt, that is passed over."""
    with pytest.raises(openai.BadRequestError, match=f"got `{field}`, which is not obeyed"):
        served.ask([asked(TEXT)], extra_body={field: "high"})


def test_fields_that_ask_for_nothing(served):
    """A client that writes the defaults out, and is refused."""
    fields = {"n": 1, "logprobs": False, "response_format": {"type": "text"}, "presence_penalty": 0.0}
    fields |= {"tool_choice": "auto", "tools": [], "parallel_tool_calls": True, "top_logprobs": None, "user": "a"}
    fields |= {"logit_bias": {}, "stop": [], "store": False, "metadata": {"run": "7"}, "frequency_penalty": 0}
    assert served.text([asked(TEXT)], **fields) == served.expected([question(TEXT)])


def test_another_model_is_refused(served):
    """An answer of this model under another one's name."""
    with pytest.raises(openai.BadRequestError, match="seeing"):
        served.ask([asked(TEXT)], model="another")
    served.check_goes_on()


ERRORS = {
    "of the client": (ValueError('no "such"\n value'), 400),
    "of the server": (RuntimeError("out of memory"), 500),
    "with a path": (ValueError("/home/somebody/model/config.json is no JSON"), 500),
    "with a path of Windows": (TypeError(r"got 'C:\models\one'"), 500),
    "of a file": (FileNotFoundError(2, "No such file", "/home/somebody/model"), 500),
}


@pytest.mark.parametrize("case", ERRORS)
def test_an_error_of_the_model_has_words(served, monkeypatch, caplog, case):
    """`Internal Server Error`, and nothing else; a stream that breaks at a quote in the error; the inside of the server
    in the words that a client gets, or nothing in its log.
    """
    error, status = ERRORS[case]

    def fail(*args, **kwargs):
        raise error

    logger = logging.getLogger("hf_xattn.serving.request_limits")
    with monkeypatch.context() as patched:
        patched.setattr(served.model, "generate", fail)
        patched.setattr(logger, "propagate", True)
        logger.addHandler(caplog.handler)
        try:
            with pytest.raises(openai.APIStatusError) as whole:
                served.ask([asked(TEXT)])
            with pytest.raises(openai.APIError) as streamed:
                list(served.ask([asked(TEXT)], stream=True))
        finally:
            logger.removeHandler(caplog.handler)
    assert whole.value.status_code == status
    words = f"{type(error).__name__}: {error}" if status == 400 else "The server has failed at this request."
    for each in (whole.value.body["message"], streamed.value.message):
        assert each.startswith(words) and "somebody" not in each
    assert (str(error) in caplog.text) == (status == 500)
    served.check_goes_on()


@pytest.mark.parametrize("usage", [None, False, True])
def test_streams_end_as_those_of_the_api(served, usage):
    """A client that waits for the end, or that finds usage where it looks for a choice, or none where it asked."""
    options = {} if usage is None else {"stream_options": {"include_usage": usage}}
    body = {"model": "seeing", "messages": [asked(TEXT)], "max_tokens": NEW_TOKENS, "stream": True, **options}
    *events, end, rest = served.fetch("/v1/chat/completions", body).split("\n\n")
    assert end == "data: [DONE]" and rest == ""
    events = [json.loads(event.removeprefix("data: ")) for event in events]
    assert [bool(event["choices"]) for event in events] == [True] * (len(events) - bool(usage)) + [False] * bool(usage)
    assert [bool(event.get("usage")) for event in events] == [not event["choices"] for event in events]
    whole = served.ask([asked(TEXT)])
    chunks = list(served.ask([asked(TEXT)], stream=True, **options))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
    assert next(c.choices[0].finish_reason for c in reversed(chunks) if c.choices) == "length"
    if usage:
        assert chunks[-1].usage == whole.usage and chunks[-1].usage.completion_tokens == NEW_TOKENS


def test_stream_options_that_are_not_known(served):
    """An option that is dropped without a word."""
    for options in ({"include": True}, {"include_usage": "yes"}, True):
        with pytest.raises(openai.BadRequestError, match="`stream_options` is"):
            served.ask([asked(TEXT)], stream=True, extra_body={"stream_options": options})


def test_large_images_are_read_or_refused_by_name(served):
    """A photo that stops the server, or that Pillow takes for an attack, which nobody tells."""
    photo = Image.new("1", (8000, 6250))
    photo.paste(1, (0, 0, 4000, 6250))
    assert served.text([asked(TEXT, photo)]) == served.expected([question(TEXT, photo.convert("RGB"))])
    with pytest.raises(openai.BadRequestError, match="exceeds limit"):
        served.ask([asked(TEXT, Image.new("1", (20000, 20000)))])
    served.check_goes_on()


@pytest.mark.parametrize("stream", [True, False])
def test_a_request_cut_off(served, stream):
    """A model that goes on for a client who has left."""
    begun, left, steps = threading.Event(), threading.Event(), []

    def step(*_):
        """A small model is done before the server hears that the client has left: wait, then go slowly."""
        begun.set()
        assert left.wait(60)
        time.sleep(0.01)
        steps.append(1)

    hook = served.model.register_forward_hook(step)
    body = {"messages": [asked(TEXT, drawing(3))], "stream": stream, "max_tokens": 1000}
    url = urlsplit(served.address)
    with socket.create_connection((url.hostname, url.port), timeout=60) as connection:
        text = json.dumps(body).encode()
        head = f"Host: a\r\nContent-Type: application/json\r\nContent-Length: {len(text)}\r\n\r\n"
        connection.sendall(f"POST /v1/chat/completions HTTP/1.1\r\n{head}".encode() + text)
        assert begun.wait(60)
    left.set()
    served.check_goes_on()  # waits for the model
    hook.remove()
    assert len(steps) < 500


def test_the_second_question_encodes_nothing(served):
    """A chat client sends every image again at every turn: each would be encoded at every turn."""
    runs = []
    watched = [served.model.model.vision_tower, *(block.attn.k_proj for block in served.model.blocks)]
    hooks = [module.register_forward_hook(lambda *_: runs.append(1)) for module in watched]
    turns, theirs = [asked(TEXT, drawing(7))], [question(TEXT, drawing(7))]
    first = served.text(turns)
    assert first == served.expected(theirs)
    once = len(runs)
    assert once == len(watched)
    turns += [{"role": "assistant", "content": first}, asked("how many ?")]
    theirs += [{"role": "assistant", "content": first}, question("how many ?")]
    assert served.text(turns) == served.expected(theirs)
    assert len(runs) == once
    for hook in hooks:
        hook.remove()


def test_a_model_without_an_image_processor(chat_folder, tmp_path):
    """A question about an image answered from its text alone."""
    model = AutoModelForImageTextToText.from_pretrained(chat_folder)
    model.save_pretrained(tmp_path)
    tokenizer = AutoProcessor.from_pretrained(chat_folder).tokenizer
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }} {% endfor %}"
    tokenizer.save_pretrained(tmp_path)
    blind = Served(tmp_path, "blind")
    try:
        with pytest.raises(openai.BadRequestError, match="without an image processor"):
            blind.ask([asked(TEXT, drawing(0))])
        ids = tokenizer(TEXT + " ", return_tensors="pt")["input_ids"]
        tokens = blind.reference.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False)
        assert blind.text([asked(TEXT)]) == tokenizer.decode(tokens[0, ids.shape[1] :], skip_special_tokens=True)
    finally:
        blind.stop()


def test_the_command_answers_and_stops_with_ctrl_c(chat_folder):
    """A command that says it is ready and does not answer, or that Ctrl-C does not stop."""
    command = [
        sys.executable,
        "-m",
        "hf_xattn.commands.main",
        "serve",
        str(chat_folder),
        "--host",
        "127.0.0.1",
        "--port",
        "0",
    ]
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment)
    try:
        lines = iter(process.stdout.readline, "")
        address = next(found[1] for line in lines if (found := re.match(r"Ready: (\S+) serves (\S+)\. ", line)))
        client = openai.OpenAI(base_url=address, api_key="none", max_retries=0, timeout=60)
        (model,) = client.models.list()
        assert model.id == str(chat_folder)
        made = client.chat.completions.create(
            model=model.id, messages=[asked(TEXT, drawing(0))], max_tokens=NEW_TOKENS, temperature=0.0
        )
        reference, processor = (
            AutoModelForImageTextToText.from_pretrained(chat_folder),
            AutoProcessor.from_pretrained(chat_folder),
        )
        assert made.choices[0].message.content == answer(reference, processor, [question(TEXT, drawing(0))])
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0
    finally:
        process.kill()


def test_a_server_that_cannot_answer_does_not_start(chat_folder, tmp_path, capsys):
    """An error at the first question, which could have been known at the start."""
    from hf_xattn.commands.servers import bind

    bare = tmp_path / "bare"
    AutoModelForImageTextToText.from_pretrained(chat_folder).save_pretrained(bare)
    AutoTokenizer.from_pretrained(chat_folder.parent / "text").save_pretrained(bare)
    with bind("localhost", 0) as taken:
        taken.listen()
        wrong = {
            "missing": (tmp_path / "missing",),
            "hf-xattn retrofit": (chat_folder.parent / "text",),
            "chat template": (bare, "--port", "0"),
            "--port": (chat_folder, "--port", str(taken.getsockname()[1])),
        }
        for words, arguments in wrong.items():
            assert main(["serve", *map(str, arguments)]) == 2
            assert words in capsys.readouterr().err


def test_a_missing_extra_is_named(chat_folder, monkeypatch, capsys):
    """A traceback where FastAPI is not installed."""
    monkeypatch.setitem(sys.modules, "fastapi", None)
    assert main(["serve", str(chat_folder)]) == 2
    assert "pip install 'fastapi>=0.115' uvicorn" in capsys.readouterr().err
