"""The page's components, all of Gradio, and what their events do. Those that need the model go through the queue."""

from __future__ import annotations

import io
from base64 import b64encode
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import gradio as gr
from PIL import Image

from .visitors import MAX_PICTURES, Drawing, Visitor, Visitors, read_picture


THUMBNAIL = 240  # pixels
CHOSEN = "chosen"  # label of the word that was clicked
IN_TURN: dict[str, Any] = {"concurrency_limit": 1, "concurrency_id": "model", "api_visibility": "private"}
AT_ONCE: dict[str, Any] = {"queue": False, "show_progress": "hidden", "api_visibility": "private"}
READY: dict[str, Any] = {"submit_btn": True, "stop_btn": False}


class Layout:
    """Lays the components into the Blocks that are open, and connects them with the visitors' conversations.

    No input but the box and the canvas holds files: Gradio checks that these are a visitor's own uploads.
    """

    def __init__(
        self, visitors: Visitors, title: str, questions: Sequence[str], drawing: Drawing | None, layers: list[int]
    ):
        self.visitors, self.drawing, sees = visitors, drawing, drawing is not None
        gr.Markdown(f"# {title}")
        self.begun = gr.State(False)
        with gr.Row():
            with gr.Column(visible=sees):
                self.canvas = _canvas(drawing)
                self.words = gr.HighlightedText(
                    elem_id="words",
                    label="Choose a word to see where the model looked",
                    color_map={CHOSEN: "orange"},
                    show_inline_category=False,
                )
                choices: list[Any] = [("mean of layers", "mean"), *((f"layer {layer}", layer) for layer in layers)]
                layer = gr.Dropdown(choices, value="mean", label="Layer")
            with gr.Column():
                hint = "Draw a picture and ask about it" if sees else "Ask a question"
                self.chat = gr.Chatbot(label="Chat", elem_id="chat", placeholder=hint, buttons=[])
                with gr.Row():
                    ready = [(text, gr.Button(text, size="sm", min_width=80)) for text in questions]
                self.box = gr.MultimodalTextbox(
                    elem_id="box",
                    show_label=False,
                    placeholder="Ask a question",
                    sources=["upload"] if sees else [],
                    file_types=["image"],
                    file_count="multiple",
                )
                self.looked = gr.Gallery(
                    label="Where it looked", elem_id="looked", format="png", visible=sees, buttons=[]
                )

        given = [self.box, self.canvas, self.begun]
        changed = {self.chat, self.box, self.canvas, self.words, self.looked, self.begun}
        turn = {**IN_TURN, "show_progress_on": self.chat}
        asked = [self.box.submit(self.ask, given, changed, **turn)]
        asked += [button.click(self._asks(text), given, changed, **turn) for text, button in ready]
        self.box.stop(self.stop, **AT_ONCE)
        self.chat.clear(self.new_chat, None, changed, cancels=asked, **AT_ONCE)
        self.canvas.clear(lambda: drawing and drawing.blank, None, self.canvas, **AT_ONCE)
        look = [self.words, self.looked]
        self.chat.select(self.choose_answer, None, look, **AT_ONCE)
        turn = {**IN_TURN, "show_progress_on": self.looked}
        self.words.select(self.choose_word, layer, look, **turn)
        layer.input(self.look, layer, look, **turn)

    def ask(self, message: dict, drawn: dict | None, begun: bool, request: gr.Request) -> Iterator[dict]:
        """Asks about the files of the message and the drawing, and shows the answer so far."""
        before: dict = {}
        try:
            text, pictures = message["text"].strip(), self._pictures(message, drawn)
            visitor = self.visitors.enter(request.session_hash, begun, text, pictures)
            before = {self.chat: visitor.shown}
            now = [*visitor.shown, *_question(text, pictures)]
            yield {self.chat: now, self.box: gr.MultimodalTextbox(None, submit_btn=False, stop_btn=True)}
            said = ""
            for piece in visitor.ask(text, pictures):
                said += piece
                yield {self.chat: [*now, {"role": "assistant", "content": said}]}
        except Exception as error:  # the question and its pictures stay where they were
            yield {**before, self.box: gr.MultimodalTextbox(message, **READY)}
            raise _told(error) from error
        answers = visitor.session.answers
        visitor.shown = [*now, {"role": "assistant", "content": answers[-1].text or "(an empty answer)"}]
        visitor.chosen = len(answers) - 1, None
        yield {**self._cleared(visitor.shown, _words(visitor)), self.box: gr.MultimodalTextbox(**READY)}

    def _asks(self, text: str) -> Callable[..., Iterator[dict]]:
        def ask(message: dict, drawn: dict | None, begun: bool, request: gr.Request) -> Iterator[dict]:
            yield from self.ask({**message, "text": text}, drawn, begun, request)

        return ask

    def _pictures(self, message: dict, drawn: dict | None) -> list[Image.Image]:
        files = message["files"][: MAX_PICTURES + 1]
        drawing = drawn and drawn["composite"]
        if drawing and self.drawing and drawing.tobytes() != self.drawing.blank.tobytes():
            files = [*files, drawing]
        return [read_picture(file) for file in files]

    def _cleared(self, chat: list, words: list) -> dict:
        """What the page shows after an answer, and in a new chat."""
        blank = self.drawing and self.drawing.blank
        return {self.chat: chat, self.canvas: blank, self.words: words, self.looked: None, self.begun: bool(chat)}

    def stop(self, request: gr.Request) -> None:
        self.visitors.find(request.session_hash).stop()

    def new_chat(self, request: gr.Request) -> dict:
        self.visitors.forget(request.session_hash)
        return {**self._cleared([], []), self.box: gr.MultimodalTextbox(None, **READY)}

    def choose_answer(self, event: gr.SelectData, request: gr.Request) -> tuple:
        """Shows the words of the answer that was clicked."""
        with _telling():
            visitor = self.visitors.find(request.session_hash)
            message = event.index[0] if isinstance(event.index, (list, tuple)) else event.index
            answer = sum(each["role"] == "assistant" for each in visitor.shown[:message])
            visitor.chosen = min(answer, len(visitor.session.answers) - 1), None
            return _words(visitor), None

    def choose_word(self, layer: Any, event: gr.SelectData, request: gr.Request) -> tuple:
        with _telling():
            visitor = self.visitors.find(request.session_hash)
            visitor.chosen = visitor.chosen[0], event.index
        return self.look(layer, request)

    def look(self, layer: Any, request: gr.Request) -> tuple:
        """Shows the pictures under the heat of the chosen word."""
        with _telling():
            visitor = self.visitors.find(request.session_hash)
            if visitor.chosen[1] is None:
                return gr.skip(), gr.skip()
            shown = [(picture, f"{share:.0%} of the attention") for picture, share in visitor.look(layer)]
            return _words(visitor), shown


@contextmanager
def _telling() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise _told(error) from error


def _told(error: Exception) -> Exception:
    """What the visitor reads. Gradio logs an error that nobody expected."""
    if isinstance(error, ValueError):
        return gr.Error(str(error), print_exception=False)
    return gr.Error("Something went wrong on the server, which logged it. Try again.")


def _canvas(drawing: Drawing | None) -> gr.ImageEditor:
    if drawing is None:
        return gr.ImageEditor()
    return gr.ImageEditor(
        drawing.blank,
        elem_id="canvas",
        type="pil",
        image_mode="RGB",
        format="png",
        sources=["upload", "clipboard"],
        transforms=["crop"],
        layers=False,
        brush=gr.Brush(round(drawing.pen / 2), [drawing.ink], drawing.ink),  # the radius
        canvas_size=drawing.blank.size,
        label=f"Draw here (read as {drawing.reads[0]} × {drawing.reads[1]} pixels)",
        buttons=[],
    )


def _question(text: str, pictures: list[Image.Image]) -> list[dict[str, str]]:
    """A question and its pictures as messages of the chat. The pictures are data URLs: no file of them is written."""
    shown = []
    for number, picture in enumerate(pictures):
        small = picture.copy()
        small.thumbnail((THUMBNAIL, THUMBNAIL))
        buffer = io.BytesIO()
        small.save(buffer, "PNG")
        shown.append(f"![picture {number + 1}](data:image/png;base64,{b64encode(buffer.getvalue()).decode()})")
    return [{"role": "user", "content": content} for content in (" ".join(shown), text) if content]


def _words(visitor: Visitor) -> list[tuple[str, str | None]]:
    """The words of the chosen answer, each with what follows it; none if the answer saw no picture."""
    answer, chosen = visitor.session.answers[visitor.chosen[0]], visitor.chosen[1]
    words = answer.words(visitor.session.tokenizer) if answer.num_images else []
    ends = [*(word.start for word in words[1:]), len(answer.text)]
    texts = [answer.text[word.start : end] for word, end in zip(words, ends)]
    return [(text, CHOSEN if index == chosen else None) for index, text in enumerate(texts)]
