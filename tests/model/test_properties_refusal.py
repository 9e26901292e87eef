"""What does not fit is refused by this package, with an error that is its own: never an IndexError, never torch's word
on shapes.

A case starts from a call that works and damages some of its arguments: another rank, size, dtype or type, swapped
axes, values out of range, an argument that contradicts another. The call may still work. Otherwise the error must be a
`ValueError` or `TypeError`, and the line that raised it must stand in this package. Values of the text model's
arguments (token ids, labels, positions, ...) are left to the text model: only it knows which are in range.
"""

import random
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

import hf_xattn
from helpers.conversations.bank import MARKER, bank
from helpers.inputs.properties import slow_seed, tensor


PACKAGE = str(Path(hf_xattn.__file__).parent)
THEIRS = ("transformers/generation",)  # what transformers checks of its own arguments
TEXT = {"input_ids", "attention_mask", "position_ids", "labels", "logits_to_keep"}  # arguments of the text model


def check_refusal(error: Exception, theirs: tuple[str, ...] = ()) -> None:
    """Raises an `AssertionError` for an error that is not one of ours."""
    last = traceback.extract_tb(error.__traceback__)[-1].filename
    ours = last.startswith(PACKAGE) or any(part in last for part in theirs)
    if not (ours and isinstance(error, (ValueError, TypeError))):
        raise AssertionError(f"{type(error).__name__} from {last}: {error}") from error
    assert str(error), "an error without a word"


def damaged(draw: random.Random, value: Any) -> Any:
    """A tensor with another shape, dtype or content; or something else in its place."""
    if not isinstance(value, torch.Tensor):
        return draw.choice([None, [], "many", 3, -1, 2.5, True, torch.zeros(())])
    axis = draw.randrange(max(1, value.dim()))
    half = value.shape[axis] // 2 if value.dim() else 0
    made = {
        "none": lambda: None,
        "list": value.tolist,
        "array": value.numpy,
        "rank": lambda: value[None],
        "flat": lambda: value.flatten(),
        "scalar": lambda: value.flatten()[0],
        "first": lambda: value.select(axis, 0),
        "empty": lambda: value.narrow(axis, 0, 0),
        "shorter": lambda: value.narrow(axis, 0, half),
        "longer": lambda: torch.cat([value, value], dim=axis),
        "swapped": lambda: value.transpose(0, -1),
        "float": value.float,
        "double": value.double,
        "half": value.half,
        "long": value.long,
        "bool": value.bool,
        "uint8": lambda: value.to(torch.uint8),
        "complex": lambda: value.to(torch.complex64),
        "negative": lambda: -value.float().to(value.dtype) if value.dtype != torch.bool else ~value,
        "huge": lambda: (value.double() * 10**6).to(value.dtype),
    }
    return made[draw.choice(list(made))]()


def call_of(draw: random.Random) -> tuple[Any, dict[str, Any]]:
    """A method of a model, and arguments that fit."""
    rule = draw.choice(["all", "all", "latest"])
    decoder = draw.choice(["llama", "gpt2"])
    model = bank(decoder, rule, draw.choice(["default", "one K/V head, quiet", "positions"])).model
    rows, length, images = draw.randint(1, 2), draw.randint(3, 6), draw.randint(1, 2)
    ids = torch.tensor([[MARKER] * images + [draw.randint(4, 95) for _ in range(length)] for _ in range(rows)])
    length += images
    pictures: dict[str, Any] = draw.choice(
        [
            {"pixel_values": tensor(1, rows, images, 3, 32, 32)},
            {"cross_attention_states": tensor(1, rows, images, 4, 32)},
            {"vision_features": tensor(1, rows, images, 16, 24)},
        ]
    )
    tokens = images * (4 if "cross_attention_states" in pictures else 16)
    masks = {
        "image_mask": torch.ones(rows, images, dtype=torch.bool),
        "cross_attention_mask": torch.ones(rows, tokens, dtype=torch.bool),
    }
    of_text = {
        "cross_attention_mask": torch.ones(rows, length, tokens, dtype=torch.bool),
        "image_attention_mask": torch.ones(rows, length, images, dtype=torch.long),
    }
    given = {**pictures, **{name: mask for name, mask in masks.items() if draw.random() < 0.4}}
    method = draw.choice(["forward", "forward", "forward", "encode_images", "generate"])
    if method == "encode_images":
        return model.encode_images, given
    if draw.random() < 0.3:
        name = draw.choice(list(of_text))
        given = {**{key: value for key, value in given.items() if key != "cross_attention_mask"}, name: of_text[name]}
    text = {"input_ids": ids}
    if draw.random() < 0.5:
        text["attention_mask"] = torch.ones_like(ids)
    if method == "generate":
        return model.generate, {**text, **given, "max_new_tokens": 2, "do_sample": False}
    positions = torch.arange(length).expand(rows, -1)
    optional = {
        "position_ids": positions.clone(),
        "labels": ids.clone(),
        "logits_to_keep": 1,
        "image_rows": torch.arange(rows),
        "cache": EncoderDecoderCache(DynamicCache(), DynamicCache()),
        "use_cache": True,
        "output_attentions": True,
    }
    names = draw.sample(list(optional), draw.randint(0, 2))
    if {"labels", "logits_to_keep"} <= set(names):
        optional["labels"] = optional["labels"][:, -1:]  # of the positions that are kept
    if "image_rows" in {*given, *names}:
        optional["use_cache"] = False  # rows of images are for training
    return model.forward, {**text, **given, **{name: optional[name] for name in names}}


@torch.no_grad()
def calls_are_refused_by_us(seed: int) -> None:
    """Rules out an error from deep inside torch, of a call that someone will make by mistake."""
    draw = random.Random(seed)
    method, given = call_of(draw)
    if seed % 8 == 0 and "cache" not in given:
        method(**given)  # whole, it works
    changed = draw.sample(list(given), min(len(given), draw.choice([1, 1, 2])))
    for name in changed:
        given[name] = damaged(draw, given[name])
    try:
        method(**given)
    except Exception as error:
        if isinstance(error, IndexError) and TEXT & {*changed}:
            return  # only the text model knows which values it takes
        if isinstance(error, (RuntimeError, ValueError)) and "position_ids" in changed:
            return
        theirs = THEIRS if method.__name__ == "generate" else ()
        try:
            check_refusal(error, theirs)
        except AssertionError as wrong:
            shapes = {
                name: f"{tuple(value.shape)} {value.dtype}" if isinstance(value, torch.Tensor) else type(value).__name__
                for name, value in given.items()
            }
            raise AssertionError(f"seed {seed}: {method.__name__}({shapes}): {wrong}") from error


def test_random_mistakes_get_errors_of_this_package():
    """Mistakes that no test was written for."""
    for seed in range(150):
        calls_are_refused_by_us(seed)


@pytest.mark.slow
def test_thousands_of_random_mistakes_get_errors_of_this_package():
    """The same for thousands more, other ones at every run."""
    first = slow_seed()
    print(f"PROPERTY_SEED={first}")
    for seed in range(first, first + 3000):
        calls_are_refused_by_us(seed)
