"""Web addresses that a client of `hf-xattn serve` names: fetched within bounds, and only where the operator says so."""

import http.server
import io
import socket
import threading
import time

import pytest

from helpers.models.chat_models import drawing, question


pytest.importorskip("openai")
pytest.importorskip("fastapi")
from helpers.processes.model_server import TEXT, Served, asked, openai
from hf_xattn.serving import request_pictures


SLOW = 200  # bytes, which take ten seconds


def content():
    buffer = io.BytesIO()
    drawing(1).save(buffer, "PNG")
    return buffer.getvalue()


class Pages(http.server.BaseHTTPRequestHandler):
    asked: list[str] = []
    ended = threading.Event()

    def do_GET(self):
        self.asked.append(self.path)
        try:
            self.answer()
        except OSError:  # the server has heard enough
            pass
        if self.path.startswith("/slow"):
            self.close_connection = True
            self.ended.set()

    def answer(self):
        if self.path == "/loop":
            self.send(b"", location="/loop")
        elif self.path == "/inside":
            self.send(b"", location=f"http://127.0.0.1:{self.server.server_port}/a.png")
        elif self.path == "/to_a.png":
            self.send(b"", location="/a.png")
        elif self.path == "/file":
            self.send(b"", location="file:///etc/passwd")
        elif self.path == "/endless":  # without a length
            self.send_response(200)
            self.end_headers()
            for _ in range(1000):
                self.wfile.write(b"\0" * 10_000)
        elif self.path in ("/slow", "/slow_header"):  # a byte at a time
            self.wfile.write(b"HTTP/1.1 200 OK\r\n" + (b"\r\n" if self.path == "/slow" else b"X-Name: "))
            for _ in range(SLOW):
                self.wfile.write(b"0")
                self.asked.append("a byte")
                time.sleep(0.05)
        elif self.path == "/packed":
            self.send(b"\0" * 100, **{"Content-Encoding": "gzip"})
        elif self.path == "/large":
            self.send(b"\0" * 30_000)
        elif self.path == "/missing":
            self.send_error(404)
        else:
            self.send(content())

    def send(self, body, **headers):
        self.send_response(302 if "location" in headers else 200)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def pages():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Pages)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    Pages.asked = []
    yield server.server_port
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def all_of_them(chat_folder):
    """A server that fetches any address."""
    served = Served(chat_folder, "open", fetch=True, private_addresses=True, max_image_bytes=20_000, max_seconds=2.0)
    yield served
    served.stop()


@pytest.fixture(scope="module")
def public_ones(chat_folder):
    """A server that fetches public addresses."""
    served = Served(chat_folder, "public", fetch=True)
    yield served
    served.stop()


def test_no_address_by_default(served, pages):
    """A server that asks whom its clients name."""
    for path in ("a.png", "missing"):
        with pytest.raises(openai.BadRequestError, match="start with data:image/, got .* with `--fetch-images`"):
            served.ask([asked(TEXT, f"http://127.0.0.1:{pages}/{path}")])
    assert Pages.asked == []


def test_downloads_are_limited(all_of_them, pages):
    """An address that sends bytes until the memory is full, or a few that unpack to many."""
    url = f"http://127.0.0.1:{pages}"
    for path in ("a.png", "to_a.png"):
        expected = all_of_them.expected([question(TEXT, drawing(1))])
        assert all_of_them.text([asked(TEXT, f"{url}/{path}")]) == expected
    for path, words in {
        "large": "at most 20000 bytes, got more",
        "endless": "at most 20000 bytes, got more",
        "packed": "compressed as 'gzip': expected no compression",
        "loop": "more than 5 times",
        "file": "leads to 'file:///etc/passwd'",
        "missing": "404",
    }.items():
        with pytest.raises(
            openai.BadRequestError, match=f"{path}', the image in part 0 .* cannot be loaded: .*{words}"
        ):
            all_of_them.ask([asked(TEXT, f"{url}/{path}")])
    with pytest.raises(openai.BadRequestError, match="cannot be loaded"):
        all_of_them.ask([asked(TEXT, "http://127.0.0.1:9/a.png")])
    all_of_them.check_goes_on()


@pytest.mark.parametrize("path", ["slow", "slow_header"])
def test_downloads_have_an_end(all_of_them, path, pages):
    """Single bytes, each of which comes before a timeout: an address that sends for days is listened to for days."""
    Pages.ended.clear()
    with pytest.raises(openai.BadRequestError, match="all images of a request within 2 seconds"):
        all_of_them.ask([asked(TEXT, f"http://127.0.0.1:{pages}/{path}")])
    assert Pages.ended.wait(60) and Pages.asked.count("a byte") < SLOW, "all was read"


def test_private_addresses_are_not_fetched(public_ones, pages):
    """A server that fetches for its clients what only it can reach, by a number or a name."""
    for host in (
        "127.0.0.1",
        "localhost",
        "0.0.0.0",
        "2130706433",
        "0x7f.1",
        "[::1]",
        "[::ffff:127.0.0.1]",
        "10.0.0.1",
        "169.254.169.254",
    ):
        with pytest.raises(openai.BadRequestError, match="of this machine or of a private network|cannot be found"):
            public_ones.ask([asked(TEXT, f"http://{host}:{pages}/a.png")])
    assert Pages.asked == [], "the server was asked"
    public_ones.check_goes_on()


def resolving(monkeypatch, *answers):
    """Names get these addresses, one after another."""
    left = iter(answers)
    real = socket.getaddrinfo

    def found(host, port, *args, **kwargs):
        if host != "example.com":
            return real(host, port, *args, **kwargs)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (ip, port)) for ip in next(left)]

    monkeypatch.setattr(socket, "getaddrinfo", found)


def test_a_name_that_changes_its_address(public_ones, pages, monkeypatch):
    """A name that is public when it is looked at, and private when it is fetched; one with addresses of both kinds."""
    asked_for = []

    async def connect(remote_host, *args, **kwargs):
        asked_for.append(remote_host)
        raise OSError("no network in a test")

    monkeypatch.setattr("anyio.connect_tcp", connect)
    resolving(monkeypatch, ["93.184.216.34"], ["93.184.216.34", "10.0.0.1"])
    for words in ("cannot be loaded", "of this machine or of a private network"):
        with pytest.raises(openai.BadRequestError, match=words):
            public_ones.ask([asked(TEXT, f"http://example.com:{pages}/a.png")])
    assert asked_for == ["93.184.216.34"], "the name would be resolved once more"


def test_redirects_are_checked(public_ones, pages, monkeypatch):
    """A public address that leads to a private one."""
    real, places = request_pictures.pinned, iter([(f"http://127.0.0.1:{pages}/inside", {})])

    async def pinned(url):
        return next(places, None) or await real(url)

    monkeypatch.setattr(request_pictures, "pinned", pinned)
    with pytest.raises(openai.BadRequestError, match="of this machine"):
        public_ones.ask([asked(TEXT, "http://example.com/a.png")])
    assert Pages.asked == ["/inside"]


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("8.8.8.8", True), ("2606:4700::1111", True), ("127.0.0.1", False), ("10.1.2.3", False), ("172.16.0.1", False), ("192.168.1.1", False),  # noqa: E501
        ("169.254.169.254", False), ("100.64.0.1", False), ("0.0.0.0", False), ("224.0.0.1", False), ("255.255.255.255", False), ("::1", False),  # noqa: E501
        ("fe80::1", False), ("fec0::1", False), ("fc00::1", False), ("::ffff:10.0.0.1", False), ("::ffff:8.8.8.8", True), ("64:ff9b::a00:1", False),  # noqa: E501
        ("2002:7f00:1::", False),
    ],
)  # fmt: skip
def test_every_form_of_a_private_address_is_known(address, public):
    """A way to write a private address that is not known as one."""
    assert request_pictures.is_public(address) is public
