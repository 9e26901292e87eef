"""The tables of small checkpoints and sets of blocks, for `test_public_surface.py`."""

import functools
import tempfile
from pathlib import Path

from surface import NOTHING, Fine, Surface, Wrong, needs, value
from tiny_models import make_text

from hf_xattn import GatedCrossAttentionBlock, XAttnForConditionalGeneration, XAttnModel, retrofit


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


def load_set(**given):
    fresh().load_cross_attention(**needs(given, folder=saved() / "added", name="second"))


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
    "load_cross_attention": Surface(
        XAttnModel.load_cross_attention,
        load_set,
        {
            "folder": value(none=Wrong(None, "got NoneType"), kind=3, size=Wrong("/nowhere/at/all", "no such folder")),
            "name": value(none=Wrong(None, "got NoneType"), kind=3, size=Wrong("", "to be new"), rank=NOTHING),
        },
    ),
    "set_cross_attention": Surface(
        XAttnModel.set_cross_attention,
        lambda **given: fresh().set_cross_attention(**given),
        {"name": value(none=Fine(None), kind=3, size="second")},
    ),
    "delete_cross_attention": Surface(
        XAttnModel.delete_cross_attention,
        lambda **given: fresh().delete_cross_attention(**given),
        {"name": value(none=None, kind=3, size="second")},
    ),
}
