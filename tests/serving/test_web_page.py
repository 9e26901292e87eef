"""What the page asks the server for, over HTTP: no browser needed."""

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

import numpy as np
import pytest
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor, AutoTokenizer

from helpers.checkout import EXAMPLES, ROOT
from helpers.models.chat_models import NEW_TOKENS, answer, drawing, question


pytest.importorskip("gradio", reason="the page needs Gradio: pip install -e '.[web]'")
import httpx

from helpers.processes.web_server import nobody_answers, served, slow
from helpers.processes.web_visitor import Refused, WebVisitor
from hf_xattn.checkpoints.model_card import write_model_card
from hf_xattn.commands.main import main
from hf_xattn.commands.servers import address_of
from hf_xattn.serving import web_visitors as visitors
from hf_xattn.serving.web import MAX_QUEUE, MAX_REQUEST, build_page


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


@pytest.fixture
def visitor(server):
    return WebVisitor(server[0])


def test_a_conversation_gives_the_answers_of_the_model(visitor, server):
    """A picture that is lost on its way, an answer that is not the model's, a picture that is encoded twice."""
    _, model, processor = server
    misses = model.image_store.misses
    visitor.add(drawing(1))
    steps = list(visitor.asking(TEXT))
    messages = [question(TEXT, drawing(1))]
    said = answer(model, processor, messages)
    assert visitor.chat[-2:] == [("user", TEXT), ("assistant", said)]
    assert visitor.chat[0][1].startswith("![image 1](data:image/png;base64,")
    assert len(steps) > 3 and all(said.startswith(step[-1][1].strip()) for step in steps[1:])
    assert "".join(word for word, _ in visitor.words) == said and len(visitor.words) == len(said.split())
    assert visitor.seen == [] and visitor.value("multimodaltextbox") == {"text": "", "files": []}

    messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "and ?"}]
    assert visitor.ask("and ?") == answer(model, processor, messages)
    assert model.image_store.misses - misses <= 1

    visitor.do("chatbot", "clear")
    assert visitor.chat == visitor.words == []
    assert visitor.ask(TEXT) == answer(model, processor, [{"role": "user", "content": TEXT}])
    assert visitor.words == []  # there is no picture to look at


def test_the_page_shows_heat_of_the_chosen_word(visitor, server):
    """Heat of another answer, word or layer than the one that was chosen."""
    model = server[1]
    visitor.add(drawing(0))
    first = visitor.ask(TEXT)
    visitor.choose(1)
    assert [label for _, label in visitor.words] == [None, "chosen", *[None] * (len(first.split()) - 2)]
    (seen,) = visitor.seen
    assert re.fullmatch(r"\d+% of the attention", seen["caption"])
    mean = visitor.fetched(seen)
    assert mean.size == (320, 320), "the model reads 32 pixels"
    dropdown = visitor.number("dropdown")
    assert [value for _, value in visitor.parts[dropdown]["props"]["choices"]] == [
        "mean",
        *model.config.cross_attention_layers,
    ]
    visitor.values[dropdown] = model.config.cross_attention_layers[0]
    visitor.do("dropdown", "input")
    of_layer = visitor.fetched(visitor.seen[0])
    assert np.asarray(of_layer).shape == np.asarray(mean).shape and of_layer.tobytes() != mean.tobytes()

    visitor.add(drawing(1))
    visitor.ask("and ?")
    assert visitor.seen == []
    visitor.choose(0)
    assert len(visitor.seen) == 2
    index = [role for role, _ in visitor.chat].index("assistant")
    visitor.do("chatbot", "select", {"index": [index, 0], "value": first})
    assert "".join(word for word, _ in visitor.words) == first and visitor.seen == []
    visitor.choose(1)
    assert len(visitor.seen) == 1 and visitor.fetched(visitor.seen[0]).tobytes() == of_layer.tobytes()
    with pytest.raises(Refused, match="Expected a word from 0 to"):
        visitor.choose(99)


def test_a_drawing_is_asked_about_and_an_empty_canvas_is_not(visitor, server):
    """An empty canvas that is asked about; a drawing that is lost."""
    _, model, processor = server
    blank = Image.new("RGB", (704, 704), "black")
    assert visitor.parts[visitor.number("imageeditor")]["props"]["canvas_size"] == [704, 704]
    visitor.draw(blank)
    assert visitor.ask(TEXT) == answer(model, processor, [{"role": "user", "content": TEXT}])
    visitor.do("chatbot", "clear")
    drawn = drawing(0).resize((704, 704))
    visitor.draw(drawn)
    visitor.add(drawing(1))
    messages = [question(TEXT, drawing(1), drawn)]
    assert visitor.ask(TEXT) == answer(model, processor, messages)
    with httpx.stream("GET", f"{server[0]}/gradio_api/file={visitor.value('imageeditor')['background']['path']}") as it:
        assert Image.open(io.BytesIO(it.read())).convert("RGB").tobytes() == blank.tobytes()


def test_errors_are_told_and_survived(visitor, server, monkeypatch):
    """A page that says nothing, or a server that shows its inside or stays broken."""
    _, model, processor = server
    with pytest.raises(Refused, match="Write a question"):
        visitor.ask(" ")
    for content in (b"\x89PNG\r\n\x1a\nnot", b"hello"):
        visitor.files = [visitor.upload(content, "b.png")]
        with pytest.raises(Refused, match="b.png cannot be read as an image"):
            visitor.ask(TEXT)
    visitor.files = [visitor.upload(b"hello", "notes.txt")]
    with pytest.raises(Refused, match="Invalid file type"):
        visitor.ask(TEXT)
    visitor.files = []
    visitor.add(drawing(0))
    with monkeypatch.context() as broken:
        broken.setattr(model, "generate", lambda **_: 1 / 0)
        with pytest.raises(Refused, match="Something went wrong") as error:
            visitor.ask(TEXT)
        assert "division" not in str(error.value)
    kept = visitor.value("multimodaltextbox")
    assert visitor.chat == [] and kept["text"] == TEXT and len(kept["files"]) == 1
    assert visitor.ask(TEXT) == answer(model, processor, [question(TEXT, drawing(0))])
    before = visitor.chat
    with pytest.raises(Refused, match="Write a question"):
        visitor.ask(" ")
    assert visitor.chat == before


def test_a_forgotten_conversation_is_told(visitor, server, monkeypatch):
    """A model that has silently forgotten what it was asked about."""
    visitor.ask(TEXT)
    monkeypatch.setattr(visitors, "MAX_VISITORS", 1)
    WebVisitor(server[0]).ask(TEXT)
    with pytest.raises(Refused, match="no longer kept"):
        visitor.ask("and ?")
    visitor.do("chatbot", "clear")
    assert visitor.ask(TEXT)


def test_visitors_wait_for_each_other_and_do_not_mix(long_server):
    """Two answers at once, or an answer about the picture of somebody else."""
    address, model, processor = long_server
    several = [WebVisitor(address) for _ in range(2)]
    for seed, visitor in enumerate(several):
        visitor.add(drawing(seed))
    with ThreadPoolExecutor(2) as pool:
        said = list(pool.map(lambda visitor: visitor.ask(TEXT), several))
    expected = [answer(model, processor, [question(TEXT, drawing(seed))], max_new_tokens=LONG) for seed in range(2)]
    assert said == expected
    stranger = WebVisitor(address)
    with pytest.raises(Refused, match="no longer kept"):
        stranger.choose(0)


def test_the_stop_button_stops_an_answer(long_server):
    """A button that stops nothing."""
    address, model, _ = long_server
    visitor = WebVisitor(address)
    with slow(model) as steps:
        chats = visitor.asking(TEXT)
        next(chats)
        next(chats)
        visitor.do("multimodaltextbox", "stop")
        *_, last = chats
        assert nobody_answers() and len(steps) < LONG // 2
    assert last[-1][0] == "assistant" and last[-1][1]
    assert visitor.ask("and ?")


@pytest.mark.parametrize("how", ["close", "new chat"])
def test_an_answer_that_nobody_waits_for(how, long_server):
    """A model that goes on for a visitor who has gone, while the next one waits."""
    address, model, processor = long_server
    visitor, next_one = WebVisitor(address), WebVisitor(address)
    with slow(model) as steps:
        alive = visitor.http.stream("GET", f"/heartbeat/{visitor.session}")  # as an open tab
        alive.__enter__()
        chats = visitor.asking(TEXT)
        next(chats)
        next(chats)
        if how == "close":
            chats.close()
            alive.__exit__(None, None, None)
        else:
            visitor.do("chatbot", "clear")
            assert visitor.chat == []
        assert nobody_answers() and len(steps) < LONG // 2
    messages = [{"role": "user", "content": TEXT}]
    assert next_one.ask(TEXT) == answer(model, processor, messages, max_new_tokens=LONG)


def test_a_queue_has_an_end(long_server):
    """Questions that wait without an end, or a visitor who is not told why there is no answer."""
    address, model, _ = long_server
    first, last = WebVisitor(address), WebVisitor(address)
    running, held = threading.Event(), threading.Event()

    def hold(*_):
        running.set()
        assert held.wait(60)

    hook = model.lm_head.register_forward_hook(hold)
    try:
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(first.ask, TEXT)
            assert running.wait(60)
            last.values[last.number("multimodaltextbox")] = {"text": " ", "files": []}  # an error, which takes no time
            _, body = last.request("multimodaltextbox", "submit")
            for number in range(MAX_QUEUE):
                answered = last.http.post("/queue/join", json={**body, "session_hash": f"a{number}"})
                assert answered.status_code == 200
            with pytest.raises(Refused, match="Queue is full"):
                last.ask(TEXT)
            last.do("chatbot", "clear")  # what needs no model is answered at once
            held.set()
            assert asked.result(60)
    finally:
        hook.remove()
        held.set()
    until = time.monotonic() + 60
    while True:  # until those who wait have been told
        try:
            assert last.ask("and ?")
            break
        except Refused:
            assert time.monotonic() < until
            time.sleep(0.1)


def test_what_a_browser_may_send(server, visitor, monkeypatch):
    """A request that fills the memory of the server."""
    with pytest.raises(Refused, match="too large|maximum allowed size"):
        visitor.upload(b"a" * (visitors.MAX_BYTES + 1), "a.png")
    body = json.dumps({"data": ["a" * MAX_REQUEST]}).encode()
    json_type = {"content-type": "application/json"}
    answered = visitor.http.post("/queue/join", content=body, headers=json_type)
    assert answered.status_code == 413 and "too large" in answered.json()["detail"]
    parts = (body[start : start + 2**20] for start in range(0, len(body), 2**20))  # without a length
    try:
        assert visitor.http.post("/run/predict", content=parts, headers=json_type).status_code >= 400
    except httpx.TransportError:
        pass
    for number in range(visitors.MAX_PICTURES + 1):
        visitor.add(drawing(number))
    with pytest.raises(Refused, match=f"{visitors.MAX_PICTURES} images"):
        visitor.ask(TEXT)
    visitor.files = []
    with monkeypatch.context() as less:
        less.setattr(visitors, "MAX_KEPT", 3 * 32 * 32 * 3 - 1)
        for number in range(3):
            visitor.add(drawing(number))
            if number < 2:
                visitor.ask(TEXT)
        with pytest.raises(Refused, match="as many images as the page keeps"):
            visitor.ask(TEXT)
    assert visitor.ask(TEXT)


def test_files_of_the_server(server, visitor):
    """A visitor who reads the server's files, or lets it call addresses of its own machine."""
    secret = ROOT / "pyproject.toml"
    for path in (str(secret), "/etc/passwd"):
        answered = visitor.http.get(f"/file={path}")
        assert answered.status_code in (403, 404) and "root:" not in answered.text
    note = visitor.upload(drawing(0), "a.png")
    for path in (str(secret), f"{server[0]}/config"):
        visitor.files = [{**note, "path": path}]
        with pytest.raises(Refused):
            visitor.ask(TEXT)
    assert visitor.http.get(f"/proxy={server[0]}/config").status_code >= 400


def test_functions_are_closed(server, visitor):
    """A question past the queue, or functions that anybody's program finds."""
    info = visitor.http.get("/info").json()
    assert info["named_endpoints"] == {} and info["unnamed_endpoints"] == {}
    visitor.values[visitor.number("multimodaltextbox")] = {"text": TEXT, "files": []}
    dependency, body = visitor.request("multimodaltextbox", "submit")
    for way in ("run", "api"):
        for name in ("predict", dependency["api_name"] or "ask"):
            answered = visitor.http.post(f"/{way}/{name}", json=body)
            assert answered.status_code >= 400 and nobody_answers(), (way, name)
    for path in ("/monitoring", "/docs", "/redoc", "/openapi.json"):
        assert httpx.get(server[0] + path).status_code >= 400, path


def test_the_page_loads_nothing_from_elsewhere(server):
    """A page of somebody else in which a visitor clicks without knowing; a page that loads something from elsewhere."""
    for path in ("", "/?view=api", "/theme.css"):
        answered = httpx.get(server[0] + path)
        directives = dict(part.strip().split(" ", 1) for part in answered.headers["content-security-policy"].split(";"))
        assert directives["frame-ancestors"] == "'self' https://huggingface.co https://*.hf.space"
        assert "http" not in directives["default-src"] and "*" not in directives["default-src"]
        assert answered.status_code == 200 and "fonts.googleapis" not in answered.text


def test_a_text_only_model(chat_folder, tmp_path):
    """A page for a model without an image processor that fails when it is built, or that offers a canvas."""
    shutil.copytree(chat_folder, tmp_path / "model")
    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(chat_folder)
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    page = build_page(model, tokenizer)
    parts = {part["type"]: part["props"] for part in page.get_config_file()["components"]}
    assert parts["multimodaltextbox"]["sources"] == [] and parts["gallery"]["visible"] is False


def test_the_printed_address_can_be_opened():
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
        parts = page.get_config_file()["components"]
        return [part["props"]["value"] for part in parts if part["type"] == "button"]

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
