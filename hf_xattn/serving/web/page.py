"""Serves the page: a `gradio.Server` with the page's own files, and what it may ask for. One question at a time."""

from __future__ import annotations

import functools
import html
import inspect
import io
import json
import os
import re
from base64 import b64encode
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from transformers.utils import logging

from ...checkpoints.model_card import example_questions
from ...configuration_xattn import XAttnConfig
from ...images.tower import image_size_of
from ...modeling_xattn import XAttnForConditionalGeneration
from ...utils.tensor_checks import type_name
from ..request_limits import BoundedQueue, InFlight, OnlyPaths, RequestLimits
from .visitors import MAX_BYTES, Look, Visitor, Visitors


if TYPE_CHECKING:
    import gradio
    from PIL.Image import Image

logger = logging.get_logger(__name__)

STATIC = Path(__file__).parent / "static"
KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
THUMBNAIL = 240  # pixels
MAX_REQUEST = MAX_BYTES * 4 // 3 + 2**16  # bytes: a picture in base64, and what is around it
MAX_REQUESTS = 64  # whose bodies are in memory at the same time
MAX_QUEUE = 32  # questions and looks that wait for the model
# What the page and Gradio's own client use. Functions that need the model go through the queue (`call`) alone.
FILES = "|".join(re.escape(file.name) for file in STATIC.iterdir() if file.suffix in (".css", ".js"))
GET = re.compile(
    rf"/({FILES}|config/?|gradio_api/(info/?|startup-events|queue/data|heartbeat/[\w-]+|call/(ask|look)/[\w-]+))?"
)
POST = re.compile(r"/gradio_api/(run/(visit|add_picture|remove_picture|stop|clear)|call/(ask|look)|queue/join|cancel)")
# The image processor scales a drawing down. So the canvas has the picture's ratio of width to height, a whole number of
# pixels for each of the picture, and a pen about 1.5 of these wide: thinner lines fade, thicker ones close the loops of
# small digits.
CANVAS_SIDE = 720  # pixels of the longer side, at least half of it
SMALL = 64  # pictures of fewer pixels on the shorter side are drawn white on black, like the usual data sets of digits
MANY_PATCHES = 64  # lines between more patches would be in the way
DEFAULT_SIZE = (224, 224)
# Nothing on the page comes from another host, and browsers keep it so. No page of another host shows it in a frame,
# where a visitor would click without knowing, except those of Hugging Face Spaces.
POLICY = (
    "default-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'; object-src 'none'; "
    "frame-ancestors 'self' https://huggingface.co https://*.hf.space"
)


def build_page(
    model: XAttnForConditionalGeneration,
    processor: Any,
    *,
    title: str = "hf_xattn",
    questions: list[str] | None = None,
    system: str | None = None,
    canvas: tuple[int, int] | None = None,
    ink: str | None = None,
    paper: str | None = None,
    generate_kwargs: dict[str, Any] | None = None,
) -> gradio.Server:
    """Builds a page on which visitors draw or drop pictures, ask, and see where the model looked.

    Every visitor has a conversation of its own. The model answers one question after another. Call
    `model.enable_image_store()` first: then a picture is encoded once, whoever asks about it.

    Args:
        processor: the model's processor; or its tokenizer, for a page without pictures.
        title (`str`): the heading of the page.
        questions (`list[str]`, *optional*): questions that visitors can choose with one click. By default those in the
            card of the model's folder (`widget`), if there are any.
        system (`str`, *optional*): a system message.
        canvas (`tuple[int, int]`, *optional*): width and height of the canvas for drawings. By default the size of the
            pictures that the image processor makes, times a whole number.
        ink, paper (`str`, *optional*): colours of the canvas, as in CSS; see `drawing_for` for the defaults.
        generate_kwargs (`dict`, *optional*): arguments of `generate`. By default at most 256 new tokens.

    Returns:
        `gradio.Server`: call its `launch`.

    Raises:
        ImportError: without Gradio.
        TypeError, ValueError: for arguments that do not fit, and for a model whose chat template cannot render a
            question.
    """
    _check(model, processor, questions, canvas, generate_kwargs, title=title, system=system, ink=ink, paper=paper)
    gradio = load_gradio()
    visitors = Visitors(model, processor, system, **{"max_new_tokens": 256, **(generate_kwargs or {})})
    image_processor = getattr(processor, "image_processor", None)
    drawing = None if image_processor is None else drawing_for(model.config, image_processor, canvas, ink, paper)
    server = gradio.Server(title=title, docs_url=None, redoc_url=None)
    server.add_middleware(BoundedQueue, most=MAX_QUEUE, queue=lambda: server.get_blocks()._queue)
    worded: dict[str, Any] = {"error": lambda _, message: {"error": message}}
    server.add_middleware(RequestLimits, most=MAX_REQUEST, remedy="Send a smaller picture.", **worded)
    server.add_middleware(InFlight, most=MAX_REQUESTS, remedy="", **worded)
    server.add_middleware(OnlyPaths, get=GET, post=POST)
    if questions is None:
        questions = example_questions(model.config.name_or_path)
    settings = {"questions": questions, "maxBytes": MAX_BYTES, "drawing": drawing and drawing._asdict()}
    _add_files(server, title, settings)
    _add_api(server, gradio.Error, visitors)
    return server


def load_gradio() -> Any:
    """Imports Gradio, without reports to its makers."""
    os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")
    try:
        import gradio
    except ImportError as error:
        raise ImportError("The page needs Gradio: run `pip install 'gradio>=6.10,<7'`.") from error
    return gradio


def _check(model: Any, processor: Any, questions: Any, canvas: Any, generate_kwargs: Any, **texts: Any) -> None:
    if not isinstance(model, XAttnForConditionalGeneration):
        raise TypeError(f"Expected `model` to be an XAttnForConditionalGeneration, got {type_name(model)}.")
    if not hasattr(processor, "apply_chat_template"):
        raise TypeError(f"Expected `processor` to be a processor or a tokenizer, got {type_name(processor)}.")
    for name, given in texts.items():
        if not isinstance(given, str) and (given is not None or name == "title"):
            raise TypeError(f"Expected `{name}` to be a str, got {type_name(given)}.")
    if questions is not None and (
        not isinstance(questions, (list, tuple)) or not all(isinstance(question, str) for question in questions)
    ):
        raise TypeError(f"Expected `questions` to be a list of str, got {questions!r}.")
    if canvas is not None and (
        not isinstance(canvas, (list, tuple))
        or len(canvas) != 2
        or not all(isinstance(side, int) and not isinstance(side, bool) and 1 <= side <= 4096 for side in canvas)
    ):
        raise ValueError(f"Expected `canvas` to be (width, height), two integers from 1 to 4096, got {canvas!r}.")
    if generate_kwargs is not None and not isinstance(generate_kwargs, dict):
        raise TypeError(f"Expected `generate_kwargs` to be a dict, got {type_name(generate_kwargs)}.")


def _add_files(server: Any, title: str, settings: dict[str, Any]) -> None:
    from fastapi.responses import Response

    def add(address: str, file: Path) -> None:
        text = file.read_text(encoding="utf-8")
        if file.suffix == ".html":
            values = {"title": title, "settings": json.dumps(settings)}
            text = re.sub(r"\{\{(title|settings)\}\}", lambda found: html.escape(values[found[1]]), text)
        headers = {"Content-Security-Policy": POLICY, "Cache-Control": "no-cache"}

        @server.get(address, include_in_schema=False)
        def answer() -> Any:
            return Response(text, media_type=KINDS[file.suffix], headers=headers)

    for file in STATIC.iterdir():
        if file.suffix in KINDS:
            add("/" if file.name == "page.html" else f"/{file.name}", file)


def _add_api(server: Any, error_type: Callable[..., Exception], visitors: Visitors) -> None:
    """Adds what the page asks for. The first argument is always the visitor's name, which `visit` returned."""
    at_once = {"queue": False}
    # Both need the model, which reads one text at a time.
    in_turn = {"concurrency_limit": 1, "concurrency_id": "model"}

    def api(**options: Any) -> Callable[[Callable], Callable]:
        def add(function: Callable) -> Callable:
            return server.api(_worded(function, error_type), name=function.__name__, **options)

        return add

    @api(**at_once)
    def visit() -> str:
        return visitors.welcome()

    @api(**at_once)
    def add_picture(visitor: str, picture: str, name: str) -> list[str]:
        """Returns the pictures that wait, small."""
        found = visitors.find(visitor)
        found.add(picture, name)
        if not visitors.make_room(visitor):
            found.remove(len(found.waiting) - 1)
            raise ValueError("This conversation has as many pictures as the page keeps. Begin a new one.")
        return _waiting(found)

    @api(**at_once)
    def remove_picture(visitor: str, index: int) -> list[str]:
        found = visitors.find(visitor)
        found.remove(index)
        return _waiting(found)

    @api(**at_once)
    def stop(visitor: str) -> bool:
        visitors.find(visitor).stop()
        return True

    @api(**at_once)
    def clear(visitor: str) -> bool:
        visitors.find(visitor).clear()
        return True

    @api(**in_turn)
    def ask(visitor: str, text: str) -> Iterator[dict]:
        """Yields the answer so far. The last one has words (start, length), and whether there is something to see."""
        found = visitors.find(visitor)
        session, said = found.session, ""
        for piece in found.ask(text):
            said += piece
            yield {"text": said, "done": False}
        answer = session.answers[-1]
        words = [(word.start, len(word.text)) for word in answer.words(session.tokenizer)]
        number = len(session.answers) - 1
        looks = answer.num_images > 0
        yield {"text": answer.text, "done": True, "answer": number, "words": words, "looks": looks}

    @api(**in_turn)
    def look(visitor: str, answer: int, word: int, layer: int | None = None) -> dict:
        """Returns the layers to choose from, and each picture with its heat."""
        layers, looks = visitors.find(visitor).look(answer, word, layer)
        return {"layers": layers, "pictures": [_shown(each) for each in looks]}


def _worded(function: Callable, error_type: Callable[..., Exception]) -> Callable:
    """Tells the visitor why something has failed; an error that nobody expected is logged instead."""

    def told(error: Exception) -> Exception:
        if isinstance(error, (ValueError, TypeError)):
            return error_type(str(error), print_exception=False)
        logger.error(f"{function.__name__} has failed", exc_info=error)
        return error_type("Something went wrong on the server, which logged it. Try again.", print_exception=False)

    @functools.wraps(function)
    def plain(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            raise told(error) from error

    @functools.wraps(function)
    def streamed(*args: Any, **kwargs: Any) -> Iterator[Any]:
        try:
            yield from function(*args, **kwargs)
        except Exception as error:
            raise told(error) from error

    return streamed if inspect.isgeneratorfunction(function) else plain


def _waiting(visitor: Visitor) -> list[str]:
    shown = []
    for picture in visitor.waiting:
        small = picture.copy()
        small.thumbnail((THUMBNAIL, THUMBNAIL))
        shown.append(_data_url(small))
    return shown


def _shown(look: Look) -> dict[str, Any]:
    return {
        "picture": _data_url(look.picture),
        "heat": _data_url(look.heat),
        "width": look.picture.width,
        "height": look.picture.height,
        "covered": look.covered,
        "share": look.share,
    }


def _data_url(picture: Image) -> str:
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    return "data:image/png;base64," + b64encode(buffer.getvalue()).decode()


class Drawing(NamedTuple):
    """The canvas that visitors draw on."""

    width: int  # in pixels, as height and pen
    height: int
    ink: str  # colour of lines, as in CSS
    paper: str  # colour of the background
    pen: float  # width of lines
    reads: tuple[int, int]  # height and width of the picture that the model reads
    patches: tuple[int, int] | None  # rows and columns of the patches, to draw lines between them


def drawing_for(
    config: XAttnConfig,
    image_processor: Any,
    canvas: tuple[int, int] | None = None,
    ink: str | None = None,
    paper: str | None = None,
) -> Drawing:
    """Chooses a canvas.

    Arguments as in [`build_page`]. The colours are by default white on black for pictures of fewer than 64 pixels on a
    side, else black on white. They should be those of the pictures that the model was trained on.
    """
    reads = _picture_size(config, image_processor)
    height, width = reads
    scale = max(1, round(CANVAS_SIDE / max(reads)))
    if canvas is not None:
        scale = max(1, round(canvas[0] / width))
        width, height = canvas
    else:
        width, height = width * scale, height * scale
    small = min(reads) < SMALL
    pen = max(1.5 * scale, 0.02 * min(width, height))
    colours = (ink or ("white" if small else "black"), paper or ("black" if small else "white"))
    return Drawing(width, height, *colours, round(pen, 1), reads, _patches(config, reads))


def _picture_size(config: XAttnConfig, image_processor: Any) -> tuple[int, int]:
    """Height and width of the pictures that an image processor makes, where every picture gets the same size."""
    crop = getattr(image_processor, "crop_size", None) if getattr(image_processor, "do_center_crop", False) else None
    for size in (crop, getattr(image_processor, "size", None)):
        found = _pair(size)
        if found is not None:
            return found
    tower = config.vision_config
    return (image_size_of(tower) if tower is not None else None) or DEFAULT_SIZE


def _pair(size: Any) -> tuple[int, int] | None:
    if isinstance(size, int):
        return size, size
    read = size.get if hasattr(size, "get") else lambda name: getattr(size, name, None)
    if size is None:
        return None
    height, width = read("height"), read("width")
    if height and width:
        return int(height), int(width)
    side = read("shortest_edge") or read("longest_edge")
    return (int(side), int(side)) if side else None


def _patches(config: XAttnConfig, reads: tuple[int, int]) -> tuple[int, int] | None:
    """Rows and columns of the patches; None if they are many, or not known."""
    tower = config.vision_config
    patch = getattr(tower, "patch_size", None)
    if patch is None:
        return None
    across = (patch, patch) if isinstance(patch, int) else tuple(patch)
    rows, columns = reads[0] // across[0], reads[1] // across[1]
    return (rows, columns) if 1 < rows * columns <= MANY_PATCHES else None
