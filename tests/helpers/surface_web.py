"""What the page takes; see `test_public_surface.py`. Without Gradio, what is refused is still refused."""

from importlib.util import find_spec

import pytest
import torch
from chat_templates import TEXT_TEMPLATES, make_processor
from surface import Fine, Surface, needs, value
from tiny_models import make_model

from hf_xattn.serving.web import build_page


def call(**given):
    processor = make_processor(TEXT_TEMPLATES["guard"])
    try:
        return build_page(**needs(given, model=make_model(), processor=processor))
    except ImportError as error:  # after all checks of the arguments
        if find_spec("gradio") is not None:
            raise
        pytest.skip(str(error))


COLOUR = value(none=Fine(None), kind=3, rank=["red"])

SURFACES = {
    "build_page": Surface(
        build_page,
        call,
        {
            "model": value(none=None, kind=torch.nn.Linear(2, 2)),
            "processor": value(none=None, kind="folder"),
            "title": value(none=None, kind=3),
            "questions": value(none=Fine(None), kind="what ?", rank=3, size=Fine([]), dtype=[3]),
            "system": value(none=Fine(None), kind=3),
            "canvas": value(none=Fine(None), kind="60x20", rank=60, size=(60,), dtype=(60.5, 20)),
            "ink": COLOUR,
            "paper": COLOUR,
            "generate_kwargs": value(none=Fine(None), kind=["do_sample"]),
        },
    ),
}
