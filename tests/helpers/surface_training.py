"""The tables of what is used in training, for `test_public_surface.py`."""

import torch
from surface import NOTHING, Fine, Surface, Wrong, needs, switch, value
from template_models import make_processor
from tiny_models import make_model

from hf_xattn import (
    FreezeSchedule,
    PictureUseCallback,
    VisionFeatures,
    XAttnDataCollator,
    added_modules,
    align_connector,
    freeze,
    last_complete_checkpoint,
    load_rows,
    lora_targets,
    parameter_groups,
    sharding_units,
    train_in_float32,
    training_table,
)


ROW = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]}
NUMBER = value(none=Fine(None), kind="8", size=0, dtype=8.5)
FLAG = value(none=None, kind="yes", dtype=1)
MODEL = value(none=None, kind=torch.nn.Linear(2, 2))


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
            "share_images": FLAG,
            "padding_free": FLAG,
            "features": value(none=Fine(None), kind="features"),
        },
    ),
    "load_rows": Surface(
        load_rows,
        lambda **given: load_rows(**needs(given, source="/no/such/file")),
        {
            "source": value(none=Wrong(None, "got NoneType"), kind=3, size="/no/such/file"),
            "pictures": value(none=NOTHING, kind=3, size="/no/such/folder"),
            "prompt": value(none=None, kind=3, size=" "),
        },
    ),
    "vision_features": Surface(
        VisionFeatures,
        lambda **given: VisionFeatures(**needs(given, folder="/no/such/folder", model=make_model())),
        {
            "folder": value(none=None, kind=3, size="/no/such/folder"),
            "model": {**MODEL, "size": Wrong(make_model(vision=False), "got one without")},
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
    "align_connector": Surface(
        align_connector,
        lambda **given: align_connector(**needs(given, model=make_model(), processor=make_processor(), rows=[ROW])),
        {
            "model": {**MODEL, "size": Wrong(make_model(vision=False), "got one without")},
            "processor": value(none=Wrong(None, "got NoneType"), kind=3),
            "rows": value(
                none=Wrong(None, "got NoneType"), kind=3, rank=Wrong(ROW, "got dict"), size=Wrong([], "none")
            ),
            "noise": value(none=None, kind="0.5", size=-1.0),
            "blocks": value(none=None, kind="yes", size=1),
            "batch_size": value(none=None, kind="8", size=0, dtype=8.5),
            "seed": value(none=None, kind="0", size=-1, dtype=0.5),
        },
    ),
    "freeze": Surface(
        freeze,
        lambda **given: freeze(**needs(given, model=make_model())),
        {
            "model": MODEL,
            "text": FLAG,
            "vision": FLAG,
            "connector": FLAG,
            "blocks": FLAG,
            "names": value(
                none=Fine(None),
                kind=["*.mlp.*"],
                size=Wrong({"no.such": True}, "'no.such'"),
                dtype=Wrong({"*.mlp.*": "yes"}, "'yes'"),
            ),
        },
    ),
    "freeze_schedule": Surface(
        FreezeSchedule,
        FreezeSchedule,
        {
            "stages": value(
                none=None, kind=3, rank=[{}], size=Wrong({1.5: {}}, "got 1.5"), dtype=Wrong({"first": {}}, "'first'")
            )
        },
    ),
    "picture_use_callback": Surface(
        PictureUseCallback,
        lambda **given: PictureUseCallback(**{"rows": [ROW], "collate": make(), **given}),
        {
            "rows": value(none=Wrong(None, "got NoneType"), kind=3),
            "collate": value(none=Wrong(None, "got NoneType"), kind=3),
            "batch_size": {**NUMBER, "none": None},
            "most_rows": {**NUMBER, "none": None},
        },
    ),
    "parameter_groups": Surface(
        parameter_groups,
        lambda **given: parameter_groups(**needs(given, model=make_model(), learning_rate=1e-3)),
        {
            "model": MODEL,
            "learning_rate": value(none=None, kind="fast", size=-1.0, dtype={"text": "fast"}),
            "weight_decay": value(none=None, kind="none", size=float("inf"), dtype={"tower": 0.1}),
            "include_frozen": switch(),
            "started_rate": value(none=None, kind="slow", size=-1.0, dtype=float("nan")),
        },
    ),
    "train_in_float32": Surface(
        train_in_float32, lambda **given: train_in_float32(**needs(given, model=make_model())), {"model": MODEL}
    ),
    "last_complete_checkpoint": Surface(
        last_complete_checkpoint,
        lambda **given: last_complete_checkpoint(**given),
        {"folder": value(none=None, kind=3, size=__file__)},
    ),
    "sharding_units": Surface(
        sharding_units, lambda **given: sharding_units(**needs(given, model=make_model())), {"model": MODEL}
    ),
    "training_table": Surface(
        training_table, lambda **given: training_table(**needs(given, model=make_model())), {"model": MODEL}
    ),
}
