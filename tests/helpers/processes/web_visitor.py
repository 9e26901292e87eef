"""A visitor of the page without a browser: sends over HTTP what Gradio's own page would send."""

import io
import json
import secrets

import httpx
from gradio_client.utils import apply_diff


class Refused(Exception):
    """What the page tells a visitor in place of an answer."""


class WebVisitor:
    """Has the page's components, and fires their events.

    Args:
        address (`str`): of the page.
        session (`str`, *optional*): the name of the visitor's tab. By default a new one.
    """

    def __init__(self, address, session=None):
        self.address, self.session = address, session or secrets.token_hex(8)
        self.http = httpx.Client(base_url=f"{address}/gradio_api", timeout=120)
        config = httpx.get(f"{address}/config", timeout=60).json()
        self.dependencies = config["dependencies"]
        self.parts = {part["id"]: part for part in config["components"]}
        self.values = {number: part["props"].get("value") for number, part in self.parts.items()}
        self.files, self.drawing = [], None

    def number(self, kind, label=None):
        found = [
            number
            for number, part in self.parts.items()
            if part["type"] == kind and (label is None or part["props"].get("value") == label)
        ]
        return found[0]

    def value(self, kind):
        return self.values[self.number(kind)]

    @property
    def chat(self):
        """Roles and texts of the messages that the page shows."""
        messages = self.value("chatbot") or []
        return [(each["role"], " ".join(part["text"] for part in each["content"])) for each in messages]

    @property
    def words(self):
        """The words to choose from, as the page shows them."""
        return [(part["token"], part["class_or_confidence"]) for part in self.value("highlightedtext") or []]

    @property
    def seen(self):
        """The pictures under the heat, with what is written below them."""
        return self.value("gallery") or []

    def fetched(self, shown):
        from PIL import Image

        answer = self.http.get(f"{self.address}/gradio_api/file={shown['image']['path']}")
        assert answer.status_code == 200, answer.text
        return Image.open(io.BytesIO(answer.content))

    def upload(self, content, name):
        """Uploads a file: bytes, or a picture, which becomes a PNG file. Returns Gradio's note of it."""
        if not isinstance(content, bytes):
            buffer = io.BytesIO()
            content.save(buffer, "PNG")
            content = buffer.getvalue()
        answer = self.http.post("/upload", files={"files": (name, content)})
        if answer.status_code != 200:
            raise Refused(answer.text)
        return {"path": answer.json()[0], "orig_name": name, "meta": {"_type": "gradio.FileData"}}

    def add(self, content, name="a.png"):
        """Adds a file to the next message."""
        self.files.append(self.upload(content, name))

    def draw(self, picture):
        """Draws on the canvas."""
        given = self.upload(picture, "composite.png")
        self.drawing = {"background": given, "layers": [], "composite": given, "id": None}

    def ask(self, text):
        """Asks, and returns the answer."""
        for _ in self.asking(text):
            pass
        return self.chat[-1][1]

    def asking(self, text):
        """Asks, and yields the chat at each step."""
        self.values[self.number("multimodaltextbox")] = {"text": text, "files": self.files}
        if self.drawing is not None:
            self.values[self.number("imageeditor")] = self.drawing
        for _ in self.fire("multimodaltextbox", "submit"):
            yield self.chat
        self.files, self.drawing = [], None

    def do(self, kind, event, detail=None, label=None):
        for _ in self.fire(kind, event, detail, label):
            pass

    def choose(self, word):
        self.do("highlightedtext", "select", {"index": word, "value": None})

    def request(self, kind, event, detail=None, label=None):
        """The event's function, and the body that the page would send."""
        target = [self.number(kind, label), event]
        dependency = next(each for each in self.dependencies if target in each["targets"] and each["backend_fn"])
        inputs = dependency["inputs"]
        values = [None if self.parts[each]["type"] == "state" else self.values[each] for each in inputs]
        body = {"data": values, "event_data": detail, "fn_index": dependency["id"], "trigger_id": target[0]}
        return dependency, {**body, "session_hash": self.session}

    def fire(self, kind, event, detail=None, label=None):
        """Fires an event, and yields whenever something on the page has changed."""
        dependency, body = self.request(kind, event, detail, label)
        if not dependency["queue"]:
            answer = self.http.post("/run/predict", json=body)
            if answer.status_code != 200:
                raise Refused(answer.json().get("error") or answer.text)
            self._show(dependency, answer.json()["data"])
            yield
            return
        answer = self.http.post("/queue/join", json=body)
        if answer.status_code != 200:
            raise Refused(answer.json()["detail"])
        event_id, known = answer.json()["event_id"], None
        with self.http.stream("GET", "/queue/data", params={"session_hash": self.session}) as stream:
            for line in stream.iter_lines():
                message = json.loads(line.removeprefix("data: ")) if line.startswith("data: ") else {}
                if message.get("event_id") != event_id or "output" not in message:
                    continue
                if not message["success"]:
                    raise Refused(message["output"].get("error"))
                given = message["output"].get("data") or []
                if message["msg"] == "process_generating":
                    known = given if known is None else [apply_diff(*pair) for pair in zip(known, given)]
                    given = known
                self._show(dependency, given)
                yield
                if message["msg"] == "process_completed":
                    return

    def _show(self, dependency, values):
        for number, value in zip(dependency["outputs"], values):
            if isinstance(value, dict) and value.get("__type__") == "update":
                if "value" in value:
                    self.values[number] = value["value"]
            else:
                self.values[number] = value
