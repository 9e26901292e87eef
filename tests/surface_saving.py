"""What saving and its model card take; see `test_public_surface.py`."""

import tempfile

from conftest import make_model
from surface import Fine, Surface, value

from hf_xattn import XAttnForConditionalGeneration, model_card


FOLDER = tempfile.TemporaryDirectory()  # removed when the tests end


def call_save(**given):
    return make_model().save_pretrained(tempfile.mkdtemp(dir=FOLDER.name), **given)


def call_card(**given):
    folder = tempfile.mkdtemp(dir=FOLDER.name)
    return model_card.write_model_card(**{"model": make_model(), "folder": folder, **given})


SURFACES = {
    "save_pretrained": Surface(
        XAttnForConditionalGeneration.save_pretrained,
        call_save,
        {"with_code": value(none=None, kind="no", size=1)},
        fields={"with_code"},  # the others are transformers' own
    ),
    "write_model_card": Surface(
        model_card.write_model_card,
        call_card,
        {
            "model": value(none=None, kind="model"),
            "folder": value(none=None, kind=3),
            "trainer": value(none=Fine(None), kind="trainer"),
            "training": value(none=Fine(None), kind="long"),
            "results": value(none=Fine(None), kind=[0.5]),
            "base": value(none=Fine(None), kind="llama"),
        },
    ),
}
