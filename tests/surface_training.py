"""The table of the collator, for `test_public_surface.py`."""

from surface import NOTHING, Fine, Surface, Wrong, value
from template_models import make_processor

from hf_xattn import XAttnDataCollator


ROW = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]}
NUMBER = value(none=Fine(None), kind="8", size=0, dtype=8.5)


def make(**given):
    return XAttnDataCollator(**{"processor": make_processor(), **given})


SURFACES = {
    "collator": Surface(
        XAttnDataCollator,
        make,
        {
            "processor": value(none=Wrong(None, "got NoneType"), kind=3),
            "train_on": value(none=None, kind=3, size="answer"),
            "max_length": NUMBER,
            "padding_side": value(none=Fine(None), kind=3, size="top"),
            "pad_to_multiple_of": NUMBER,
        },
    ),
    "collate": Surface(
        XAttnDataCollator.__call__,
        lambda **given: make()(**{"rows": [ROW], **given}),
        {
            "rows": value(
                none=Wrong(None, "got NoneType"),
                kind=3,
                rank=Wrong(ROW, "got dict"),
                size=Wrong([], "empty"),
                dtype=NOTHING,
            )
        },
    ),
}
