"""`hf-xattn serve` in a thread of this process, with a client, and messages in the form of OpenAI."""

import json
import threading
from urllib.request import Request, urlopen

import pytest
from transformers import AutoModelForImageTextToText

from helpers.models.chat_models import NEW_TOKENS, answer, data_url, drawing, question
from hf_xattn.commands.shared import load_processor


openai = pytest.importorskip("openai")
pytest.importorskip("fastapi")

TEXT = "what is in the picture ?"


class Served:
    """A server in a thread of this process, its model, and a copy of the model to compare with."""

    def __init__(self, folder, name, **limits):
        from hf_xattn.commands.servers import bind
        from hf_xattn.serving.request_limits import ServerLimits
        from hf_xattn.serving.serving import Server, build_app

        self.name = name
        self.model = AutoModelForImageTextToText.from_pretrained(folder).eval()
        self.processor = load_processor(str(folder))
        self.reference = AutoModelForImageTextToText.from_pretrained(folder).eval()
        self.model.enable_image_store()
        listener, ready = bind("127.0.0.1", 0), threading.Event()
        self.address = f"http://127.0.0.1:{listener.getsockname()[1]}"
        app = build_app(name, self.model, self.processor, ServerLimits(**limits))
        self.server = Server(app, ready.set, log_level="critical")
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [listener]}, daemon=True)
        self.thread.start()
        assert ready.wait(20)
        self.client = openai.OpenAI(base_url=f"{self.address}/v1", api_key="none", max_retries=0, timeout=60)

    def ask(self, messages, client=None, **options):
        made = {"model": self.name, "max_tokens": NEW_TOKENS, "temperature": 0.0} | options
        return (client or self.client).chat.completions.create(messages=messages, **made)

    def text(self, messages, **options):
        return self.ask(messages, **options).choices[0].message.content

    def expected(self, messages):
        return answer(self.reference, self.processor, messages)

    def check_goes_on(self):
        """The server lives, and answers about an image rightly."""
        assert json.loads(self.fetch("/health")) == {"status": "ok"}
        assert self.text([asked(TEXT, drawing(5))]) == self.expected([question(TEXT, drawing(5))])

    def fetch(self, path, body=None):
        data = None if body is None else json.dumps(body).encode()
        request = Request(self.address + path, data, {"Content-Type": "application/json"})
        with urlopen(request, timeout=20) as response:
            return response.read().decode()

    def stop(self):
        self.server.should_exit = True
        self.thread.join(20)


def asked(text, *images):
    """A message of a chat in OpenAI's form. Images are PIL images or addresses."""
    urls = [image if isinstance(image, str) else data_url(image) for image in images]
    return {
        "role": "user",
        "content": [
            *({"type": "image_url", "image_url": {"url": url}} for url in urls),
            {"type": "text", "text": text},
        ],
    }
