"""What the page asks the server for, through Gradio's own client: no browser needed."""

import base64
import html
import io
import json
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from chat_models import NEW_TOKENS, answer, data_url, drawing, question
from checkout import EXAMPLES, ROOT
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor


pytest.importorskip("gradio", reason="the page needs Gradio: pip install -e '.[web]'")
pytest.importorskip("gradio_client")
import httpx
from fastapi import FastAPI
from fastapi.testclient import TestClient
from gradio_client import Client
from gradio_client.exceptions import AppError
from gradio_client.utils import QueueError
from web_server import nobody_answers, served, slow

from hf_xattn.checkpoints.model_card import write_model_card
from hf_xattn.commands.main import main
from hf_xattn.commands.servers import address_of
from hf_xattn.serving.web import build_page, visitors
from hf_xattn.serving.web.page import MAX_QUEUE, MAX_REQUEST, STATIC, _add_files


TEXT = "what is in the picture ?"
LONG = 60


@pytest.fixture(scope="module")
def server(chat_folder):
    greedy = {"max_new_tokens": NEW_TOKENS, "do_sample": False}
    with served(chat_folder, title="A <b>title</b>", questions=['What\'s "that"?'], generate_kwargs=greedy) as found:
        yield found


@pytest.fixture(scope="module")
def long_server(chat_folder):
    with served(chat_folder, generate_kwargs={"max_new_tokens": LONG, "do_sample": False}) as found:
        yield found


def client_of(server):
    return Client(server[0], verbose=False, analytics_enabled=False)


@pytest.fixture
def client(server):
    return client_of(server)


def test_a_conversation(client, server):
    """A picture that is lost on its way, an answer that is not the model's, a picture that is encoded twice."""
    _, model, processor = server
    misses = model.image_store.misses
    visitor = client.predict(api_name="/visit")
    for seed in (0, 1):
        waiting = client.predict(visitor, data_url(drawing(seed)), "a.png", api_name="/add_picture")
    assert len(waiting) == 2
    shown = Image.open(io.BytesIO(base64.b64decode(waiting[1].partition(",")[2])))
    assert shown.convert("RGB").tobytes() == drawing(1).tobytes()
    assert len(client.predict(visitor, 0, api_name="/remove_picture")) == 1
    states = list(client.submit(visitor, TEXT, api_name="/ask"))
    messages = [question(TEXT, drawing(1))]
    assert states[-1]["text"] == answer(model, processor, messages)
    assert [state["done"] for state in states] == [False] * (len(states) - 1) + [True]
    assert len(states) > 2 and all(states[-1]["text"].startswith(state["text"].strip()) for state in states)
    last = states[-1]
    assert [last["text"][start : start + length] for start, length in last["words"]] == last["text"].split()
    assert last["looks"] and last["answer"] == 0

    looked = client.predict(visitor, 0, 1, api_name="/look")
    assert looked["layers"] == model.config.cross_attention_layers
    (picture,) = looked["pictures"]
    assert (picture["width"], picture["height"]) == (32, 32) and picture["covered"] == [1.0, 1.0]
    assert picture["heat"].startswith("data:image/png") and 0 < picture["share"] <= 1.001
    of_layer = client.predict(visitor, 0, 1, looked["layers"][0], api_name="/look")
    assert of_layer["pictures"][0]["heat"] != picture["heat"]

    messages += [{"role": "assistant", "content": last["text"]}, {"role": "user", "content": "and ?"}]
    *_, state = client.submit(visitor, "and ?", api_name="/ask")
    assert state["text"] == answer(model, processor, messages) and state["answer"] == 1
    assert model.image_store.misses - misses <= 2

    assert client.predict(visitor, api_name="/clear")
    *_, state = client.submit(visitor, "and ?", api_name="/ask")
    assert state["text"] == answer(model, processor, [{"role": "user", "content": "and ?"}]) and not state["looks"]


def test_errors_are_told_and_survived(client, server, monkeypatch):
    """A page that says nothing, or a server that shows its inside or stays broken."""
    _, model, _ = server
    visitor = client.predict(api_name="/visit")
    for arguments, name, words in (
        ((visitor, "data:image/png;base64,aGVsbG8=", "b.png"), "/add_picture", "b.png cannot be read"),
        ((visitor, "", "b.png"), "/add_picture", "b.png is not a picture"),
        (("nobody", "a"), "/ask", "Reload the page"),
        ((visitor, " "), "/ask", "Write a question"),
        ((visitor, 3, 0), "/look", "no longer kept"),
    ):
        with pytest.raises(AppError, match=words):
            client.predict(*arguments, api_name=name)
    client.predict(visitor, data_url(drawing(0)), "a.png", api_name="/add_picture")
    with monkeypatch.context() as broken:
        broken.setattr(model, "generate", lambda **_: 1 / 0)
        with pytest.raises(AppError, match="Something went wrong") as error:
            client.predict(visitor, TEXT, api_name="/ask")
        assert "division" not in str(error.value)
    *_, state = client.submit(visitor, TEXT, api_name="/ask")  # the picture still waits
    assert state["looks"] and state["text"] == answer(*server[1:], [question(TEXT, drawing(0))])


def test_visitors_wait_for_each_other_and_do_not_mix(long_server):
    """Two answers at once, or an answer about the picture of somebody else."""
    _, model, processor = long_server
    clients = [client_of(long_server) for _ in range(2)]
    visitors = [client.predict(api_name="/visit") for client in clients]
    for seed, (client, visitor) in enumerate(zip(clients, visitors)):
        client.predict(visitor, data_url(drawing(seed)), "a.png", api_name="/add_picture")
    jobs = [client.submit(visitor, TEXT, api_name="/ask") for client, visitor in zip(clients, visitors)]
    for seed, job in enumerate(jobs):
        *_, state = job
        assert state["text"] == answer(model, processor, [question(TEXT, drawing(seed))], max_new_tokens=LONG)


def test_stop(long_server):
    """A button that stops nothing."""
    _, model, _ = long_server
    client = client_of(long_server)
    visitor = client.predict(api_name="/visit")
    with slow(model) as steps:
        job = client.submit(visitor, TEXT, api_name="/ask")
        states = [next(iter(job))]
        client.predict(visitor, api_name="/stop")
        states += list(job)
        assert nobody_answers() and len(steps) < LONG // 2
    assert states[-1]["done"] and states[-1]["text"]


def test_a_lost_connection_stops_its_answer(long_server):
    """A model that goes on for a visitor who has gone, while the next one waits."""
    address, model, processor = long_server
    client = client_of(long_server)
    gone, next_one = client.predict(api_name="/visit"), client.predict(api_name="/visit")
    with slow(model) as steps:
        body = {"data": [gone, TEXT]}
        event = httpx.post(f"{address}/gradio_api/call/ask", json=body).json()["event_id"]
        with httpx.stream("GET", f"{address}/gradio_api/call/ask/{event}", timeout=30) as stream:
            line = next(line for line in stream.iter_lines() if line.startswith("data: [") or '"text"' in line)
            assert json.loads(line.removeprefix("data: "))[0]["done"] is False
        assert nobody_answers() and len(steps) < LONG // 2
    *_, state = client.submit(next_one, TEXT, api_name="/ask")
    messages = [{"role": "user", "content": TEXT}]
    assert state["text"] == answer(model, processor, messages, max_new_tokens=LONG)


def test_the_page_and_its_files(server):
    """A title or a question that breaks the page; a file that is missing; a page that loads
    something from elsewhere.
    """
    address = server[0]
    page = httpx.get(address)
    assert "<h1>A &lt;b&gt;title&lt;/b&gt;</h1>" in page.text and "<b>" not in page.text
    assert page.headers["content-security-policy"].startswith("default-src 'self'")
    for file in STATIC.iterdir():
        text = file.read_text()
        assert "http://" not in text and "https://" not in text and "//cdn" not in text
        if file.name != "page.html":
            answer = httpx.get(f"{address}/{file.name}")
            assert answer.status_code == 200 and answer.text == text
            assert answer.headers["content-type"].startswith(("text/css", "text/javascript"))


def test_who_may_show_the_page_in_a_frame(server):
    """A page of somebody else in which a visitor clicks without knowing; a Space that shows nothing."""
    for path in ("", "/?view=api"):
        policy = httpx.get(server[0] + path).headers["content-security-policy"]
        directives = dict(part.strip().split(" ", 1) for part in policy.split(";"))
        assert directives["frame-ancestors"] == "'self' https://huggingface.co https://*.hf.space"


def test_a_queue_has_an_end(long_server, monkeypatch):
    """Questions that wait without an end, or a visitor who is not told why there is no answer."""
    address, model, _ = long_server
    client = client_of(long_server)
    names = [client.predict(api_name="/visit") for _ in range(MAX_QUEUE + 2)]
    ask = f"{address}/gradio_api/call/ask"
    running, held = threading.Event(), threading.Event()

    def hold(*_):
        running.set()
        assert held.wait(60)

    hook = model.lm_head.register_forward_hook(hold)
    try:
        first = httpx.post(ask, json={"data": [names[0], TEXT]}).json()["event_id"]
        assert running.wait(60)
        with ThreadPoolExecutor(16) as pool:  # at once
            bodies = [{"data": [name, " "]} for name in names[1:] * 2]  # answered with an error, which takes no time
            answers = list(pool.map(lambda body: httpx.post(ask, json=body), bodies))
        assert [answer.status_code for answer in answers].count(200) == MAX_QUEUE
        for address_of_gradio in (ask, f"{address}/gradio_api/queue/join"):
            answer = httpx.post(address_of_gradio, json={"data": [names[0], TEXT], "fn_index": 5, "session_hash": "a"})
            assert answer.status_code == 503 and "questions are waiting already" in answer.json()["error"]
        stopped = httpx.post(f"{address}/gradio_api/run/stop", json={"data": names[:1]})  # as the page asks
        assert stopped.json()["data"] == [True], "what needs no model is answered at once"
    finally:
        hook.remove()
        held.set()
    with httpx.stream("GET", f"{ask}/{first}", timeout=60) as stream:
        assert any("complete" in line for line in stream.iter_lines())
    until = time.monotonic() + 60
    while True:  # until those who wait have been told
        try:
            *_, state = client.submit(names[-1], "and ?", api_name="/ask")
            break
        except QueueError:
            assert time.monotonic() < until
            time.sleep(0.1)
    assert state["done"]


def test_what_a_browser_may_send(server, client):
    """A request that fills the memory of the server; a file that stays on its disk."""
    api = f"{server[0]}/gradio_api"
    for path in ("upload", "upload/", "process_recording", "component_server", "stream/a"):
        answer = httpx.post(f"{api}/{path}", files={"files": ("a.txt", b"text"), "file": ("a.webm", b"sound")})
        assert answer.status_code == 404 and "nothing at this address" in answer.text
    body = json.dumps({"data": ["a" * MAX_REQUEST]}).encode()
    json_type = {"content-type": "application/json"}
    answer = httpx.post(f"{api}/run/stop", content=body, headers=json_type)
    assert answer.status_code == 413 and "too large" in answer.json()["error"]
    parts = (body[start : start + 2**20] for start in range(0, len(body), 2**20))  # without a length
    try:
        assert httpx.post(f"{api}/run/visit", content=parts, headers=json_type).status_code >= 400
    except httpx.TransportError:
        pass
    assert client.predict(api_name="/visit")


def test_only_the_paths_of_the_page(server, client):
    """A question past the queue, or another route that Gradio opens by itself."""
    address, name = server[0], client.predict(api_name="/visit")
    assert client.predict(name, data_url(drawing(1)), "a.png", api_name="/add_picture")
    assert list(client.submit(name, TEXT, api_name="/ask"))[-1]["done"]
    for function, values in (("ask", [name, TEXT]), ("look", [name, 0, 0])):
        for way in ("run", "api", "call/v2", "../run", "run/.."):
            for path in (f"/gradio_api/{way}/{function}", f"/gradio_api/{way}/{function}/", f"/{way}/{function}"):
                answer = httpx.post(address + path, json={"data": values})
                assert answer.status_code == 404, path
    for path in (
        "/gradio_api/file=/etc/passwd",
        "/gradio_api/proxy=http://127.0.0.1",
        "/monitoring",
        "/docs",
        "/openapi.json",
    ):
        assert httpx.get(address + path).status_code == 404, path
    for method in ("PUT", "DELETE", "PATCH", "OPTIONS"):
        assert httpx.request(method, address).status_code == 404
    assert httpx.head(address).status_code == 200
    assert client.predict(name, 0, 0, api_name="/look")["pictures"]


def test_a_name_that_is_a_placeholder():
    """A heading that prints the settings, or parts of them."""
    title = "{{settings}} {{title}} &"
    server = FastAPI()
    _add_files(server, title, {"questions": ["{{title}}"]})
    page = TestClient(server).get("/").text
    assert f"<h1>{html.escape(title)}</h1>" in page and page.count("&quot;questions&quot;") == 1


def test_one_visitor_with_many_pictures(server, client, monkeypatch):
    """A conversation that is not counted against the limit of all of them."""
    monkeypatch.setattr(visitors, "MAX_KEPT", 3 * 32 * 32 * 3)
    name = client.predict(api_name="/visit")

    def add(seed):
        return client.predict(name, data_url(drawing(seed)), "a.png", api_name="/add_picture")

    add(0)
    list(client.submit(name, TEXT, api_name="/ask"))
    add(1)
    assert len(add(2)) == 2
    with pytest.raises(AppError, match="as many pictures as the page keeps"):
        add(3)
    client.predict(name, 0, api_name="/remove_picture")
    assert len(add(3)) == 2
    assert list(client.submit(name, TEXT, api_name="/ask"))[-1]["done"]


def test_addresses_of_hosts():
    """An address that no browser opens."""
    assert address_of("localhost", 80) == "http://localhost:80" and address_of("::1", 80) == "http://[::1]:80"


def test_wrong_command_lines(chat_folder, tmp_path, capsys):
    """A model that is loaded before the command line is read to its end."""
    from hf_xattn.commands.servers import bind

    with bind("localhost", 0) as taken:
        taken.listen()
        for words, arguments in {
            "missing": (tmp_path / "missing",),
            "--port": (chat_folder, "--port", taken.getsockname()[1]),
            "--image-store": (chat_folder, "--image-store", -1),
            "--max-new-tokens": (chat_folder, "--max-new-tokens", 0),
        }.items():
            assert main(["web", *map(str, arguments)]) == 2
            assert words in capsys.readouterr().err
        with pytest.raises(SystemExit):
            main(["web", str(chat_folder), "--canvas", "large"])
        assert "--canvas" in capsys.readouterr().err


def test_questions_of_the_model(chat_folder, tmp_path):
    """A page for a model that knows a few questions, and does not say which."""
    shutil.copytree(chat_folder, tmp_path / "model")
    loaded = AutoModelForImageTextToText.from_pretrained(tmp_path / "model")
    assert write_model_card(loaded, tmp_path / "model", questions=["digits :", "<b> ?"])

    def offered(page):
        with TestClient(page) as client:
            text = html.unescape(client.get("/").text)
        return json.loads(re.search(r'{"questions".*}', text)[0])["questions"]

    processor = AutoProcessor.from_pretrained(chat_folder)
    assert offered(build_page(loaded, processor)) == ["digits :", "<b> ?"]
    assert offered(build_page(loaded, processor, questions=["own ?"])) == ["own ?"]
    assert offered(build_page(loaded, processor, questions=[])) == []
    assert offered(build_page(AutoModelForImageTextToText.from_pretrained(chat_folder), processor)) == []


SPACE = EXAMPLES / "space"


@pytest.mark.parametrize("what", ["command", "space"])
def test_the_command_and_the_space(what, chat_folder, monkeypatch, tmp_path):
    """A command or a Space that never serves, or does not stop at Ctrl-C."""
    monkeypatch.setenv("PYTHONUNBUFFERED", "1")
    command = [
        sys.executable,
        "-m",
        "hf_xattn.commands.main",
        "web",
        str(chat_folder),
        "--port",
        "0",
        "--question",
        "a ?",
    ]
    if what == "space":
        command = [sys.executable, str(SPACE / "app.py")]
        for name, value in (("MODEL", str(chat_folder)), ("QUESTIONS", "a ?|b ?")):
            monkeypatch.setenv(name, value)
    # Limits of time are for a process that hangs: a busy machine may need ten seconds for what takes one.
    with open(tmp_path / "errors", "w+") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        try:
            found = (re.search(r"http://[\w.]+:\d+", line) for line in process.stdout)
            address = next((each[0] for each in found if each), None)
            assert address, (tmp_path / "errors").read_text()
            page = httpx.get(address, timeout=60)
            assert page.status_code == 200 and "a ?" in page.text
            process.send_signal(signal.SIGINT)
            status = process.wait(180)
            # Gradio decides how a Space's script ends.
            assert status == 0 or what == "space", (status, (tmp_path / "errors").read_text())
        finally:
            process.kill()


def test_the_space_names_what_it_needs():
    """A Space that starts with another Gradio, or without this package."""
    front = (SPACE / "README.md").read_text().split("---")[1]
    fields = dict(line.split(": ", 1) for line in front.strip().splitlines())
    assert fields["sdk"] == "gradio" and fields["app_file"] == "app.py" and (SPACE / fields["app_file"]).is_file()
    assert [int(part) for part in fields["sdk_version"].split(".")] >= [6, 10]
    wanted = (SPACE / "requirements.txt").read_text().splitlines()  # the package itself is a folder beside the script
    project = (ROOT / "pyproject.toml").read_text()
    needed = re.search(r"^dependencies = \[(.*?)^\]", project, re.MULTILINE | re.DOTALL)[1]
    web = re.search(r"^web = \[(.*?)\]", project, re.MULTILINE)[1]
    assert wanted == re.findall('"(.+?)"', needed + web)
