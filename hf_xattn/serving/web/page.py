"""Builds the page, and closes what Gradio leaves open."""

from __future__ import annotations

import functools
import os
from typing import TYPE_CHECKING, Any

from ...checkpoints.model_card import example_questions
from ..request_limits import InFlight, Policy, RequestLimits
from .visitors import MAX_BYTES, Visitors, drawing_for


if TYPE_CHECKING:
    import gradio

    from ...modeling_xattn import XAttnForConditionalGeneration

MAX_REQUEST = MAX_BYTES + 2**16  # bytes: a picture, and what is around it
MAX_REQUESTS = 64  # whose bodies are in memory at the same time
MAX_QUEUE = 32  # questions and looks that wait for the model
KEPT_SECONDS = 3600  # that Gradio keeps the file of a picture


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
) -> gradio.Blocks:
    """Builds a page on which visitors draw or drop pictures, ask, and see where the model looked.

    Every visitor has a conversation of its own. The model answers one question after another. Call
    `model.enable_image_store()` first: then a picture is encoded once, whoever asks about it.

    Args:
        processor: the model's processor; or its tokenizer, for a page without pictures.
        title (`str`): the heading of the page, in Markdown.
        questions (`list[str]`, *optional*): questions that visitors can choose with one click. By default those in the
            card of the model's folder (`widget`), if there are any.
        system (`str`, *optional*): a system message.
        canvas (`tuple[int, int]`, *optional*): width and height of the canvas for drawings. By default the size of the
            pictures that the image processor makes, times a whole number.
        ink, paper (`str`, *optional*): colours of the canvas: names as in CSS, or `#rrggbb`. By default
            white on black if the model reads less than 64 pixels on a side, else black on white. Take those of the
            pictures that the model was trained on.
        generate_kwargs (`dict`, *optional*): arguments of `generate`. By default at most 256 new tokens.

    Returns:
        `gradio.Blocks`: call its `launch`, which has the limits of the page as defaults of its arguments.

    Raises:
        ImportError: without Gradio.
        ValueError: for a model whose chat template cannot render a question.
    """
    gradio = load_gradio()
    from .layout import Layout

    visitors = Visitors(model, processor, system, **{"max_new_tokens": 256, **(generate_kwargs or {})})
    image_processor = getattr(processor, "image_processor", None)
    drawing = None if image_processor is None else drawing_for(image_processor, canvas, ink, paper)
    if questions is None:
        questions = example_questions(model.config.name_or_path)
    page: Any = gradio.Blocks(title=title, delete_cache=(KEPT_SECONDS, KEPT_SECONDS))
    with page:
        Layout(visitors, title, questions, drawing, sorted(set(model.config.cross_attention_layers)))
    page.queue(max_size=MAX_QUEUE, api_open=False)
    page.launch = functools.partial(page.launch, **_closed())
    return page


def load_gradio() -> Any:
    """Imports Gradio, without reports to its makers."""
    os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")
    try:
        import gradio
    except ImportError as error:
        raise ImportError("The page needs Gradio: run `pip install 'gradio>=6.10,<7'`.") from error
    return gradio


def _closed() -> dict[str, Any]:
    """Arguments of `launch` that leave open only what the page needs."""
    from starlette.middleware import Middleware

    worded: dict[str, Any] = {"error": lambda _, message: {"detail": message}}
    middleware = [
        Middleware(Policy),
        Middleware(RequestLimits, most=MAX_REQUEST, remedy="Send a smaller picture.", **worded),
        Middleware(InFlight, most=MAX_REQUESTS, remedy="", **worded),
    ]
    without = {"docs_url": None, "redoc_url": None, "openapi_url": None}
    return {
        "max_file_size": MAX_BYTES,
        "footer_links": ["gradio", "settings"],
        "app_kwargs": {"middleware": middleware, **without},
        "enable_monitoring": False,
        "mcp_server": False,
        "ssr_mode": False,
    }
