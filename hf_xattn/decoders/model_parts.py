"""The four parts of a model that are frozen and trained separately, found by the names of their weights."""

from __future__ import annotations

from .insertion import BLOCKS


# Keyword arguments of `freeze` too. The blocks lie inside the text model, but are a part of their own.
PARTS = ("text", "vision", "connector", "blocks")
ROOTS = {"text_model": "text", "vision_tower": "vision", "connector": "connector"}


def part_of(name: str) -> str:
    """The part of a weight, by its name in an [`XAttnModel`], also with PEFT's modules inside."""
    root, *rest = name.split(".")
    return "blocks" if any(each in BLOCKS for each in rest) else ROOTS[root]
