"""A web page to try a model: draw or drop images, ask about them, and see where the model looked.

The page needs the extra `web` (Gradio). `hf-xattn web DIR` serves it. [`build_page`] builds the same page for a loaded
model, for example in a Hugging Face Space. All components are Gradio's. Events that need the model go through Gradio's
queue.
"""

from __future__ import annotations

import functools
import io
import os
from base64 import b64encode
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from PIL import Image
from starlette.middleware import Middleware

from ..checkpoints.model_card import example_questions
from .request_limits import Policy, RequestLimits
from .web_visitors import MAX_BYTES, MAX_PICTURES, Drawing, Visitor, Visitors, drawing_for, read_picture


os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")  # Without this, Gradio reports its use to its makers.

import gradio as gr


if TYPE_CHECKING:
    from ..modeling_xattn import XAttnForConditionalGeneration
    from ..processing.chat_templates import Processor

MAX_REQUEST = MAX_BYTES + 2**16  # bytes of a request: an image and the rest of the request
MAX_REQUESTS = 64  # requests whose bodies are in memory at the same time
MAX_QUEUE = 32  # questions and attention maps that wait for the model
KEPT_SECONDS = 3600  # seconds for which Gradio keeps the file of an image
THUMBNAIL = 240  # pixels of the longer side of an image in the chat
CHOSEN = "chosen"  # label of the word that was clicked
IN_TURN: dict[str, Any] = {"concurrency_limit": 1, "concurrency_id": "model", "api_visibility": "private"}
AT_ONCE: dict[str, Any] = {"queue": False, "show_progress": "hidden", "api_visibility": "private"}
READY: dict[str, Any] = {"submit_btn": True, "stop_btn": False}


def build_page(
    model: XAttnForConditionalGeneration,
    processor: Processor,
    *,
    title: str = "hf_xattn",
    questions: list[str] | None = None,
    system: str | None = None,
    canvas: tuple[int, int] | None = None,
    ink: str | None = None,
    paper: str | None = None,
    generate_kwargs: dict[str, Any] | None = None,
) -> gr.Blocks:
    """Builds a page on which visitors draw or drop images, ask about them, and see where the model looked.

    Every visitor has a conversation of their own. The model answers one question after another. Call
    `model.enable_image_store()` first, so that an image is encoded only once, for all questions about it.

    Args:
        model ([`XAttnForConditionalGeneration`]): the model.
        processor: the model's processor, or its tokenizer for a page without images.
        title (`str`): heading of the page, in Markdown.
        questions (`list[str]`, *optional*): questions that visitors can ask with one click. By default those in the
            model card of the model's folder (`widget`), if there are any.
        system (`str`, *optional*): a system message.
        canvas (`tuple[int, int]`, *optional*): width and height of the canvas for drawings. By default the size of the
            images that the image processor returns, times a whole number.
        ink, paper (`str`, *optional*): colours of the lines and of the canvas: names as in CSS, or `#rrggbb`. By
            default white on black if the model reads images of less than 64 pixels on a side, otherwise black on
            white. Choose the colours of the images that the model was trained on.
        generate_kwargs (`dict`, *optional*): arguments of `generate`. By default at most 256 new tokens.

    Returns:
        `gradio.Blocks`: call its `launch`. The limits of the page are default arguments of this `launch`.

    Raises:
        ValueError: for a model whose chat template cannot render a question.
    """
    visitors = Visitors(model, processor, system, **{"max_new_tokens": 256, **(generate_kwargs or {})})
    image_processor = getattr(processor, "image_processor", None)
    drawing = None if image_processor is None else drawing_for(image_processor, canvas, ink, paper)
    if questions is None:
        questions = example_questions(model.config.name_or_path)
    page: Any = gr.Blocks(title=title, delete_cache=(KEPT_SECONDS, KEPT_SECONDS))
    with page:
        Layout(visitors, title, questions, drawing, sorted(set(model.config.cross_attention_layers)))
    page.queue(max_size=MAX_QUEUE, api_open=False)
    page.launch = functools.partial(page.launch, **_closed())
    return page


def _closed() -> dict[str, Any]:
    """Returns arguments of `launch` that turn off everything that the page does not need."""
    limits: dict[str, Any] = {"most": MAX_REQUEST, "most_requests": MAX_REQUESTS, "remedy": "Send a smaller image."}
    middleware = [Middleware(Policy), Middleware(RequestLimits, **limits)]
    without = {"docs_url": None, "redoc_url": None, "openapi_url": None}
    return {
        "max_file_size": MAX_BYTES,
        "footer_links": ["gradio", "settings"],
        "app_kwargs": {"middleware": middleware, **without},
        "enable_monitoring": False,
        "mcp_server": False,
        "ssr_mode": False,
    }


class Layout:
    """Adds the components of the page to the open `gradio.Blocks`, and connects them with the visitors' conversations.

    Only the text box and the canvas accept files. Gradio checks that these files are the visitor's own uploads.
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
        """Asks about the files of the message and the drawing, and shows the answer while it is generated."""
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
        except Exception as error:  # The question and its images return to the text box.
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
        """Returns what the page shows after an answer, and in a new chat."""
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

    def choose_word(self, layer: int | str, event: gr.SelectData, request: gr.Request) -> tuple:
        with _telling():
            visitor = self.visitors.find(request.session_hash)
            visitor.chosen = visitor.chosen[0], event.index
        return self.look(layer, request)

    def look(self, layer: int | str, request: gr.Request) -> tuple:
        """Shows the images with the attention of the chosen word laid over them."""
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
    """Returns the error that the visitor reads. Gradio logs all errors but `ValueError`."""
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
        brush=gr.Brush(round(drawing.pen / 2), [drawing.ink], drawing.ink),  # Gradio expects the radius of the pen.
        canvas_size=drawing.blank.size,
        label=f"Draw here (read as {drawing.reads[0]} × {drawing.reads[1]} pixels)",
        buttons=[],
    )


def _question(text: str, pictures: list[Image.Image]) -> list[dict[str, str]]:
    """Returns a question and its images as messages of the chat.

    The images are data URLs, so that no file is written for them.
    """
    shown = []
    for number, picture in enumerate(pictures):
        small = picture.copy()
        small.thumbnail((THUMBNAIL, THUMBNAIL))
        buffer = io.BytesIO()
        small.save(buffer, "PNG")
        shown.append(f"![image {number + 1}](data:image/png;base64,{b64encode(buffer.getvalue()).decode()})")
    return [{"role": "user", "content": content} for content in (" ".join(shown), text) if content]


def _words(visitor: Visitor) -> list[tuple[str, str | None]]:
    """Returns the words of the chosen answer, each with the white space after it. The list is empty for an answer
    without images.
    """
    answer, chosen = visitor.session.answers[visitor.chosen[0]], visitor.chosen[1]
    words = answer.words(visitor.session.tokenizer) if answer.num_images else []
    ends = [*(word.start for word in words[1:]), len(answer.text)]
    texts = [answer.text[word.start : end] for word, end in zip(words, ends)]
    return [(text, CHOSEN if index == chosen else None) for index, text in enumerate(texts)]
