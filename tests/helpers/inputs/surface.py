"""How the public surface is tested: for each argument of each function, what happens with something that does not fit.

A table names every argument of a function and, for every kind of misfit, a value. The function must then raise a
`ValueError` or `TypeError` that names the argument and what came, unless the table says that the value is fine.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from helpers.models.tiny_models import pixels
from hf_xattn.utils.transformers_api import CACHE


# None; another type; another number of axes; another size; another dtype; another device.
KINDS = ("none", "type", "rank", "size", "dtype", "device")


class Fine(NamedTuple):
    """A value that is taken."""

    value: Any


class Wrong(NamedTuple):
    """A value that is refused with a message that holds `words`."""

    value: Any
    words: str


# The kind does not apply: a number has no axes, a path no dtype.
NOTHING = object()


@dataclasses.dataclass
class Surface:
    """A public function and its table.

    Attributes:
        function (`Callable`): its signature is read.
        call (`Callable`): calls it with the arguments that a case gives, beside those that it needs.
        rows (`dict`): for each argument, a value for each of `KINDS`.
        fields (`set[str]`, *optional*): names of the arguments, where no signature holds them.
    """

    function: Callable[..., Any]
    call: Callable[..., Any]
    rows: dict[str, dict[str, Any]]
    fields: set[str] | None = None

    @property
    def arguments(self) -> set[str]:
        if self.fields is not None:
            return self.fields
        parameters = inspect.signature(self.function).parameters.values()
        kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        named = {each.name for each in parameters if each.kind not in kinds and each.name != "self"}
        return {"cache" if name == CACHE else name for name in named}


def check_case(surface: Surface, argument: str, case: Any) -> None:
    """Calls the function with a misfit, and reads what it says."""
    if case is NOTHING:
        return
    if isinstance(case, Fine):
        surface.call(**{argument: case.value})
        return
    value, words = case if isinstance(case, Wrong) else (case, None)
    try:
        surface.call(**{argument: value})
    except (ValueError, TypeError) as error:
        message = str(error)
        if words is not None:
            assert argument in message and re.search(words, message), f"{argument!r} or {words!r} is not in: {message}"
        else:
            assert f"`{argument}" in message, f"{argument!r} is not named: {message}"
            assert any(came in message for came in _as_words(value)), f"what came is not named: {message}"
    else:
        raise AssertionError(f"`{argument}` was taken: {_as_words(value)[0]}")


def _as_words(value: Any) -> list[str]:
    """How a message may name a value."""
    words = [
        repr(value),
        str(value),
        f"got {type(value).__qualname__}",
        f"{type(value).__module__}.{type(value).__qualname__}",
    ]
    if isinstance(value, type):
        words.append(value.__name__)
    if isinstance(value, (torch.Tensor, np.ndarray)):
        words = [str(tuple(value.shape)), str(value.dtype)]
        if isinstance(value, np.ndarray):
            words = ["numpy.ndarray"]
    return words


def row(**cases: Any) -> dict[str, Any]:
    """The cases of one argument; every kind must be there."""
    assert cases.keys() == set(KINDS), f"missing {set(KINDS) - cases.keys()}, unknown {cases.keys() - set(KINDS)}"
    return cases


def tensor(
    good: torch.Tensor, *, none: Any, size: Any, dtype: Any, rank: Any = None, device: bool = False
) -> dict[str, Any]:
    """An argument that is a tensor. Arrays are refused, and tensors without an axis.

    `device` asks for an error of ours: where images are on another device than the text. A meta tensor stands for one
    there. Anything else ends in torch's own error.
    """
    return row(
        none=none,
        type=good.numpy(),
        rank=good.flatten()[0] if rank is None else rank,
        size=size,
        dtype=dtype,
        device=Wrong(good.to("meta"), "got (it on|them on)? ?meta") if device else NOTHING,
    )


def switch() -> dict[str, Any]:
    """A flag: transformers takes the truth of any value."""
    return row(none=Fine(None), type=Fine("yes"), rank=NOTHING, size=NOTHING, dtype=NOTHING, device=NOTHING)


def value(*, none: Any, kind: Any, size: Any = NOTHING, rank: Any = NOTHING, dtype: Any = NOTHING) -> dict[str, Any]:
    """Any other argument."""
    return row(none=none, type=kind, rank=rank, size=size, dtype=dtype, device=NOTHING)


def needs(given, **needed):
    """Arguments of a case, and those that it needs beside it; `None` of a case is passed."""
    return {**{name: value for name, value in needed.items() if name not in given}, **given}


# --- the image arguments

PIXELS, STATES = pixels(), torch.randn(2, 5, 32)
FEATURES = torch.randn(2, 1, 16, 24)  # of the tower
MASK, IMAGE_MASK = torch.ones(2, 5, dtype=torch.bool), torch.ones(2, 1, dtype=torch.bool)
ROWS = torch.tensor([0, 0])
RATIO_IDS, RATIO_MASK = torch.ones(1, 1, dtype=torch.long), torch.ones(1, 1, 4, dtype=torch.long)


def image_rows(**more):
    """The image arguments, wherever they are taken."""
    rows = {
        "pixel_values": tensor(
            PIXELS,
            device=True,
            none=Fine(None),
            size=torch.zeros(2, 1, 3, 33, 32),
            dtype=torch.zeros(2, 1, 3, 32, 32, dtype=torch.uint8),
        ),
        "image_mask": tensor(
            IMAGE_MASK, device=True, none=Fine(None), size=torch.ones(2, 3, dtype=torch.bool), dtype=IMAGE_MASK.float()
        ),
        "cross_attention_states": tensor(
            STATES, device=True, none=Fine(None), size=STATES[..., 1:], dtype=STATES.long()
        ),
        "cross_attention_mask": tensor(
            MASK, device=True, none=Fine(None), size=torch.ones(2, 6, dtype=torch.bool), dtype=MASK.float()
        ),
        "aspect_ratio_ids": tensor(
            RATIO_IDS, none=Wrong(None, "required"), size=RATIO_IDS.repeat(1, 2), dtype=RATIO_IDS * 1.0
        ),
        "aspect_ratio_mask": tensor(
            RATIO_MASK, none=Wrong(None, "required"), size=RATIO_MASK[..., 1:], dtype=Fine(RATIO_MASK * 1.0)
        ),
        "image_attention_mask": tensor(
            torch.ones(2, 7, 1),
            none=Fine(None),
            size=torch.ones(2, 7, 3),
            dtype=Fine(torch.ones(2, 7, 1, dtype=torch.long)),
        ),
        "vision_features": tensor(
            FEATURES, device=True, none=Fine(None), size=FEATURES[..., 1:], dtype=FEATURES.long()
        ),
        "image_rows": tensor(ROWS, device=True, none=Fine(None), size=ROWS.repeat(2), dtype=ROWS.float()),
    }
    return {**rows, **more}
