"""The tables of small checkpoints, for `test_public_surface.py`."""

import functools
import tempfile
from pathlib import Path

from surface import Fine, Surface, Wrong, value
from tiny_models import make_text

from hf_xattn import GatedCrossAttentionBlock, XAttnForConditionalGeneration, retrofit


FOLDER = tempfile.TemporaryDirectory()  # removed when the tests end


@functools.cache
def saved():
    path = Path(FOLDER.name)
    make_text().save_pretrained(path / "text")
    model = retrofit(path / "text")
    model.save_pretrained(path / "added", adapter_only=True)
    model.save_pretrained(path / "whole")
    model.blocks[0].save_pretrained(path / "block")
    return path


def fresh():
    return XAttnForConditionalGeneration.from_pretrained(saved() / "whole").model


def save(**given):
    given = {"adapter_only": True, **given}
    fresh().save_pretrained(tempfile.mkdtemp(dir=FOLDER.name), **given)


def load(**given):
    XAttnForConditionalGeneration.from_pretrained(saved() / "added", **given)


def load_block(**given):
    GatedCrossAttentionBlock.from_pretrained(saved() / "block", **given)


class Bases:
    """Two arguments of transformers' methods; the misspelt ones go where transformers takes any keyword."""

    text = value(none=Fine(None), kind=Wrong(3, "got int"), size=Wrong("/nowhere/at/all", "no folder"))
    vision = {**text, "size": Wrong("/nowhere/at/all", "no folder")}


SURFACES = {
    "save_adapter_only": Surface(
        XAttnForConditionalGeneration.save_pretrained,
        save,
        {"text_base": Bases.text, "vision_base": Bases.vision},
        misspelt=(TypeError, ValueError),
        fields={"text_base", "vision_base"},
    ),
    "load_adapter_only": Surface(
        XAttnForConditionalGeneration.from_pretrained,
        load,
        {
            "text_base": Bases.text,
            "vision_base": Bases.vision,
            "allow_missing_weights": value(none=None, kind="yes", size=1),
        },
        fields={"text_base", "vision_base", "allow_missing_weights"},
    ),
    "load_block": Surface(
        GatedCrossAttentionBlock.from_pretrained,
        load_block,
        {"allow_missing_weights": value(none=None, kind="yes", size=1)},
        fields={"allow_missing_weights"},
    ),
}
