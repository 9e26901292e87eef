"""The tables of what is used in training, for `test_public_surface.py`."""

import torch
from conftest import make_model
from surface import NOTHING, Fine, Surface, Wrong, needs, value
from template_models import make_processor

from hf_xattn import XAttnDataCollator, added_modules, lora_targets


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
    "lora_targets": Surface(
        lora_targets,
        lambda **given: lora_targets(**needs(given, model=make_model())),
        {
            "model": value(none=None, kind=torch.nn.Linear(2, 2)),
            "where": value(none=None, kind=3, size="tower"),
            "projections": value(none=Fine(None), kind="q_proj", size=[], dtype=[3]),
        },
    ),
    "added_modules": Surface(
        added_modules,
        lambda **given: added_modules(**needs(given, model=make_model())),
        {"model": value(none=None, kind=torch.nn.Linear(2, 2))},
    ),
}
