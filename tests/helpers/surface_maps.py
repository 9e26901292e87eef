"""The table of attention maps, for `test_public_surface.py`."""

import functools

import pytest
import torch
from surface import NOTHING, Fine, Surface, Wrong, needs, value
from tiny_models import make_model, pixels, token_ids

from hf_xattn import AttentionMaps, attention_maps


INPUTS = {"input_ids": token_ids(), "pixel_values": pixels()}


@functools.cache
def model():
    return make_model()


def call(**given):
    return attention_maps(**needs(given, model=model(), inputs=INPUTS))


@functools.cache
def maps():
    return call()


def call_plot(**given):
    pytest.importorskip("matplotlib")
    maps().plot(**given)


INDEX = value(none=None, kind="1", size=9, dtype=1.5)
CHOICE = value(none=Fine(None), kind="max", size=9, dtype=1.5)
ONE = {**CHOICE, "none": None}

SURFACES = {
    "attention_maps": Surface(
        attention_maps,
        call,
        {
            "model": value(none=None, kind=torch.nn.Linear(2, 2)),
            "inputs": value(
                none=Wrong(None, "got NoneType"),
                kind=3,
                rank=Wrong(token_ids(), "got torch.Tensor"),
                size=Wrong({"pixel_values": pixels()}, "input_ids.*pixel_values"),
                dtype=Wrong({**INPUTS, "input_ids": [[1]]}, "input_ids.*list"),
            ),
            "max_new_tokens": value(none=Fine(None), kind="8", size=0, dtype=8.5),
        },
    ),
    "maps.grid": Surface(
        AttentionMaps.grid,
        lambda **given: maps().grid(**given),
        {
            "image": INDEX,
            "row": INDEX,
            "layer": CHOICE,
            "head": CHOICE,
            "token": value(none=Fine(None), kind="1", size=9, dtype=1.5),
        },
    ),
    "maps.pixels": Surface(
        AttentionMaps.pixels, lambda **given: maps().pixels(**given), {"image": INDEX, "row": INDEX}
    ),
    "maps.covered": Surface(
        AttentionMaps.covered, lambda **given: maps().covered(**given), {"image": INDEX, "row": INDEX}
    ),
    "maps.plot": Surface(
        AttentionMaps.plot,
        call_plot,
        {
            "tokens": value(none=Fine(None), kind="words", rank=3, size=[9], dtype=[1.5]),
            "processor": value(none=Fine(None), kind=3),
            "picture": value(none=Fine(None), kind="file.png", rank=torch.zeros(3), size=NOTHING, dtype=NOTHING),
            "image": INDEX,
            "row": INDEX,
            "layer": ONE,
            "head": ONE,
        },
    ),
}
