"""What a client of `hf-xattn serve` may send: requests that are too large, with and without a length, and bodies that
are no request.
"""

import http.client
import http.server
import json
import shutil
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from urllib.error import HTTPError
from urllib.parse import urlsplit

import pytest
from huggingface_hub.utils import httpx
from PIL import Image

from helpers.models.chat_models import data_url, drawing, question
from helpers.processes.model_server import TEXT, Served, asked, openai
from helpers.references.memory_checks import STATUS, resident
from hf_xattn.commands.main import main
from hf_xattn.serving import request_limits
from hf_xattn.serving.request_limits import ServerLimits


MOST = 200_000
PART = b"a" * 2**16
ASK = "/v1/chat/completions"
JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def served(chat_folder):
    served = Served(chat_folder, "small", max_request_bytes=MOST)
    yield served
    served.stop()


def check_refused(status, text):
    """The error has the form of OpenAI's, and says what to do."""
    error = json.loads(text)["error"]
    assert status == 413 and error["type"] == "invalid_request_error" and error.keys() >= {"param", "code"}
    assert f"may have {MOST} bytes" in error["message"] and "--max-request-mib" in error["message"]


def test_a_request_that_is_too_large(served):
    """A client that reads of a broken connection, or of a server's error, and a server that does not answer again."""
    with pytest.raises(openai.APIStatusError) as error:
        served.ask([asked("a" * MOST)])
    assert error.value.status_code == 413 and f"may have {MOST} bytes" in error.value.body["message"]
    for path in (ASK, "/nowhere"):
        answer = httpx.post(served.address + path, content=b"a" * (MOST + 1), headers=JSON)
        check_refused(answer.status_code, answer.text)
        assert answer.headers["connection"] == "close"
    with pytest.raises(HTTPError) as error:  # of a client that sends everything before it reads
        served.fetch(ASK, {"model": "a" * 2**26})
    check_refused(error.value.code, error.value.read())
    served.check_goes_on()


def test_the_limit_itself_passes(served):
    """A limit that is off by one, or counts something else than the body."""
    body = {"model": "small", "max_tokens": 1, "messages": [{"role": "user", "content": TEXT}]}
    text = json.dumps(body).encode()
    for size, status in ((MOST, 200), (MOST + 1, 413)):
        content = text + b" " * (size - len(text))
        for sent in (content, iter([content[:100], content[100:]])):
            answer = httpx.post(served.address + ASK, content=sent, headers=JSON, timeout=60)
            assert answer.status_code == status, answer.text


@pytest.mark.skipif(not STATUS.exists(), reason="memory is read from /proc")
@pytest.mark.parametrize("length", [None, 2**28], ids=["chunked", "with a length"])
def test_memory_of_what_is_refused(served, length):
    """A server that collects what it will refuse: 256 MiB, whose length the client says only in one of two cases."""
    served.check_goes_on()
    before, most = resident(), []

    def parts():
        for _ in range(2**28 // len(PART)):
            most.append(resident())
            yield PART

    headers = JSON if length is None else {**JSON, "Content-Length": str(length)}
    answer = httpx.post(served.address + ASK, content=parts(), headers=headers, timeout=60)
    check_refused(answer.status_code, answer.text)
    assert max(most) - before < 32 * 2**20
    served.check_goes_on()


def test_many_small_parts_take_little_memory(served):
    """Parts of one byte, which take many times their size if each is kept."""
    url = urlsplit(served.address)
    with socket.create_connection((url.hostname, url.port), timeout=60) as connection:
        connection.sendall(f"POST {ASK} HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
        connection.sendall(b"1\r\na\r\n" * (MOST + 1) + b"0\r\n\r\n")
        answer = http.client.HTTPResponse(connection)
        answer.begin()
        check_refused(answer.status, answer.read())


def test_an_answer_before_the_end(served, monkeypatch):
    """A client that is told to go on with what will be refused, or that keeps the server reading for ever."""
    url = urlsplit(served.address)
    head = f"POST {ASK} HTTP/1.1\r\nHost: a\r\nContent-Length: {2**40}\r\n"
    monkeypatch.setattr(request_limits, "LINGER", 0.2)
    for more in ("Expect: 100-continue\r\n\r\n", "\r\n"):
        with socket.create_connection((url.hostname, url.port), timeout=60) as connection:
            connection.sendall((head + more).encode())
            answer = http.client.HTTPResponse(connection)
            answer.begin()  # skips `100 Continue`, if it came
            check_refused(answer.status, answer.read())
            assert connection.recv(1) == b"", "the connection is closed"
    served.check_goes_on()


def test_a_client_that_leaves(served):
    """A request that was cut off and is answered, or that stays in memory."""
    url = urlsplit(served.address)
    for body in (b"Content-Length: 1000\r\n\r\n{", b"Transfer-Encoding: chunked\r\n\r\n5\r\n{"):
        with socket.create_connection((url.hostname, url.port), timeout=60) as connection:
            connection.sendall(f"POST {ASK} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n".encode() + body)
    served.check_goes_on()


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"3", b"null", b'"a"', b"\xff\xfe", b"[" * 100_000, b'{"a": ' + b"1" * 10_000 + b"}", b'{"messages": NaN}'],  # noqa: E501
    ids=["nothing", "cut off", "a list", "a number", "null", "a text", "no UTF-8", "deep", "a long number", "NaN"],
)  # fmt: skip
def test_bodies_that_are_no_request(body, served):
    """An error without words that a client finds, or a server that stops."""
    answer = httpx.post(served.address + ASK, content=body, headers=JSON, timeout=60)
    assert 400 <= answer.status_code < 500, answer.text
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error" and 10 < len(error["message"]) < 500
    served.check_goes_on()


def test_a_page_of_another_host(served):
    """A page in a browser that asks the server of its visitor: it may send a form, but no JSON."""
    text = json.dumps({"messages": [asked(TEXT)], "max_tokens": 1})
    answer = httpx.post(served.address + ASK, content=text, headers={"Content-Type": "text/plain"}, timeout=60)
    assert answer.status_code == 400 and "JSON" in answer.json()["error"]["message"]


def test_the_default_lets_full_pictures_pass():
    """A limit that refuses what the limit of images allows, whichever that is."""
    for limits in (ServerLimits(), ServerLimits(max_image_bytes=2**30), ServerLimits(max_image_bytes=1000)):
        picture = len(f'{{"type": "image_url", "image_url": {{"url": "{data_url(drawing(0))[:22]}"}}}}')
        assert limits.room_for_images >= 4 * (limits.max_image_bytes * 4 // 3 + 4 + picture)
    assert ServerLimits().room_for_images < 2**27


def test_the_option_sets_the_limit_of_a_request(chat_folder, monkeypatch, capsys):
    """An option without effect, or a limit that no request meets."""
    from hf_xattn.serving import serving

    apps, build_app = [], serving.build_app
    monkeypatch.setattr(serving, "build_app", lambda *arguments: apps.append(build_app(*arguments)) or apps[-1])
    monkeypatch.setattr(serving.Server, "run", lambda *_, **__: None)
    for options, most in (((), ServerLimits().room_for_images), (("--max-request-mib", "3"), 3 * 2**20)):
        assert main(["serve", str(chat_folder), "--port", "0", *options]) == 0
        (limit,) = (each for each in apps[-1].user_middleware if each.cls is request_limits.RequestLimits)
        assert limit.kwargs["most"] == most
    assert threading.active_count() < 100


def one_bit(width, height):
    """The address of a picture whose file has few bytes."""
    return data_url(Image.new("1", (width, height)))


@pytest.fixture(scope="module")
def narrow(chat_folder, tmp_path_factory):
    """A server whose image processor sets the shortest edge alone, as that of CLIP does."""
    folder = shutil.copytree(chat_folder, tmp_path_factory.mktemp("narrow") / "model")
    path = folder / "processor_config.json"
    settings = json.loads(path.read_text())
    size = settings["image_processor"]["size"]
    settings["image_processor"] |= {
        "size": {"shortest_edge": size["height"]},
        "crop_size": size,
        "do_center_crop": True,
    }
    settings["image_processor"]["image_processor_type"] = "CLIPImageProcessor"
    path.write_text(json.dumps(settings))
    served = Served(folder, "small")
    yield served
    served.stop()


PICTURES_OF_FEW_BYTES = {
    "two large ones": (lambda: [one_bit(8192, 8192)] * 2, "at most 68000000 pixels in all"),
    "many small ones": (lambda: [one_bit(1, 1)] * 65, "at most 64 images in a request, got 65"),
    "one that becomes long": (lambda: [one_bit(1, 100_000)], "at most 68000000 pixels in all"),
    "many that become long": (lambda: [one_bit(1, 20_000)] * 30, "at most 68000000 pixels in all"),
}


@pytest.mark.skipif(not STATUS.exists(), reason="memory is read from /proc")
@pytest.mark.parametrize("case", PICTURES_OF_FEW_BYTES)
def test_pictures_of_few_bytes_and_many_pixels(narrow, case):
    """Kilobytes of request that take gigabytes of memory: unpacked, or as the image processor enlarges them."""
    make, words = PICTURES_OF_FEW_BYTES[case]
    before = resident()
    answer = httpx.post(narrow.address + ASK, json={"messages": [asked(TEXT, *make())]}, timeout=60)
    assert answer.status_code == 400 and words in answer.json()["error"]["message"]
    assert resident() - before < 64 * 2**20
    narrow.check_goes_on()


def test_many_pictures_within_the_bounds(narrow):
    """A bound that refuses what people send."""
    pictures = [drawing(seed) for seed in range(64)]
    assert narrow.text([asked(TEXT, *pictures)]) == narrow.expected([question(TEXT, *pictures)])
    assert narrow.text([asked(TEXT, one_bit(8192, 8192))])


class Slow(http.server.BaseHTTPRequestHandler):
    """A picture that never comes to its end."""

    def do_GET(self):
        self.server.begun.release()
        self.send_response(200)
        self.end_headers()
        while not self.server.done.wait(0.02):
            self.wfile.write(b"a")

    def log_message(self, *_):
        pass


@pytest.fixture
def slow():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Slow)
    server.done, server.begun = threading.Event(), threading.Semaphore(0)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.done.set()
    server.shutdown()


def test_requests_in_flight(chat_folder, slow):
    """Any number of requests in memory; a place that is taken for ever; a server that does not say that it lives."""
    url = f"http://127.0.0.1:{slow.server_port}/a.png"
    served = Served(chat_folder, "small", fetch=True, private_addresses=True, max_seconds=3.0, max_requests=2)
    try:
        with ThreadPoolExecutor(2) as pool:
            waiting = [pool.submit(served.ask, [asked(TEXT, url)]) for _ in range(2)]
            for _ in waiting:  # a question that is asked before both have their places would take one of them
                assert slow.begun.acquire(timeout=60)
            with pytest.raises(openai.RateLimitError) as refused:
                served.ask([asked(TEXT)])
            message = refused.value.body["message"]
            assert "The server has 2 requests already" in message and "--max-requests" in message
            assert json.loads(served.fetch("/health")) == {"status": "ok"}
            for each in waiting:
                with pytest.raises(openai.BadRequestError, match="cannot be loaded"):
                    each.result()
        served.check_goes_on()
        many = asked(TEXT, *[url] * 20)  # all of them have the time of one
        with pytest.raises(openai.BadRequestError, match="cannot be loaded"):
            served.ask([many], timeout=20)
    finally:
        served.stop()


def test_a_body_that_does_not_come(served, monkeypatch):
    """A client that holds a place for as long as it likes."""
    monkeypatch.setattr(request_limits, "BODY_SECONDS", 0.2)
    monkeypatch.setattr(request_limits, "LINGER", 0.2)
    url = urlsplit(served.address)
    with socket.create_connection((url.hostname, url.port), timeout=60) as connection:
        connection.sendall(f"POST {ASK} HTTP/1.1\r\nHost: a\r\nContent-Length: 1000\r\n\r\n{{".encode())
        answer = http.client.HTTPResponse(connection)
        answer.begin()
        assert answer.status == 408 and "within 0.2 seconds" in json.loads(answer.read())["error"]["message"]
    served.check_goes_on()


def test_the_event_loop_stays_free(served, monkeypatch):
    """Text that is tokenized, or a picture that is resized, while no other client is heard."""
    begun, done = threading.Event(), threading.Event()
    apply = served.processor.apply_chat_template

    def held(*arguments, **kwargs):
        begun.set()
        assert done.wait(20)
        return apply(*arguments, **kwargs)

    monkeypatch.setattr(served.processor, "apply_chat_template", held)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(served.text, [asked(TEXT, drawing(1))])
        assert begun.wait(20)
        try:
            assert json.loads(served.fetch("/health")) == {"status": "ok"}
        finally:
            done.set()
        assert answer.result() == served.expected([question(TEXT, drawing(1))])
