"""What a reader of the README has in the working directory: pictures with rows, and the checkpoints that it names.

The checkpoints are tiny and have random weights (`known_checkpoints`).
"""

import re
from pathlib import Path

from PIL import Image

from helpers.checkout import ROOT
from helpers.models.known_checkpoints import SIGLIP, SMOL, make_llama_vision, make_siglip, make_text


def after(mark: str, language: str, text: str) -> str:
    """The code block behind a mark."""
    found = re.search(rf"<!-- {re.escape(mark)} -->\n```{language}\n(.*?)```", text, re.DOTALL)
    assert found is not None
    return found[1]


def fill(folder: Path) -> None:
    """Saves the pictures, and the vision checkpoint under the name that the README gives it."""
    make_siglip(folder)
    (folder / "pictures").mkdir()
    for name, colour in (("pictures/a.png", "red"), ("pictures/b.png", "blue"), ("photo.png", "green")):
        Image.new("RGB", (60, 40), colour).save(folder / name)
    rows = after("metadata.jsonl", "json", (ROOT / "README.md").read_text())
    (folder / "pictures" / "metadata.jsonl").write_text(rows)


def fill_for_docstrings(folder: Path) -> None:
    """All that the examples in docstrings name: also a text model, a model `seeing`, and a Llama 3.2 Vision."""
    from transformers import AutoImageProcessor, AutoTokenizer

    from hf_xattn import XAttnProcessor, retrofit

    fill(folder)
    make_text(folder, SMOL)
    make_llama_vision(folder)
    text, vision = folder / SMOL, folder / SIGLIP
    retrofit(text, vision, every=4, dtype="float32").save_pretrained(folder / "seeing")
    parts = AutoImageProcessor.from_pretrained(vision), AutoTokenizer.from_pretrained(text)
    XAttnProcessor(*parts).save_pretrained(folder / "seeing")
