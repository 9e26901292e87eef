"""What saving and its model card take; see `test_public_surface.py`."""

import tempfile

from surface import NOTHING, Fine, Surface, Wrong, value
from tiny_models import make_model, make_text

from hf_xattn import XAttnForConditionalGeneration, remove_blocks
from hf_xattn.checkpoints import model_card


FOLDER = tempfile.TemporaryDirectory()  # removed when the tests end


def call_save(**given):
    return make_model().save_pretrained(tempfile.mkdtemp(dir=FOLDER.name), **given)


def call_push(**given):
    return make_model().push_to_hub("somebody/model", **given)


def call_card(**given):
    folder = tempfile.mkdtemp(dir=FOLDER.name)
    return model_card.write_model_card(**{"model": make_model(), "folder": folder, **given})


SURFACES = {
    "save_pretrained": Surface(
        XAttnForConditionalGeneration.save_pretrained,
        call_save,
        {name: value(none=None, kind="no", size=1) for name in ("with_code", "adapter_only")},
        fields={"with_code", "adapter_only"},  # the others are transformers' own
    ),
    "push_to_hub": Surface(
        XAttnForConditionalGeneration.push_to_hub,
        call_push,
        {
            **{name: value(none=None, kind="no", size=1) for name in ("with_code", "adapter_only")},
            **{name: value(none=NOTHING, kind=Wrong(3, "got 3")) for name in ("text_base", "vision_base")},
        },
        fields={"with_code", "adapter_only", "text_base", "vision_base"},
    ),
    "remove_blocks": Surface(
        remove_blocks,
        remove_blocks,
        {"model": value(none=None, kind="model", size=Wrong(make_text(), "got a LlamaForCausalLM"))},
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
            "questions": value(none=Fine(None), kind="what ?"),
        },
    ),
}
