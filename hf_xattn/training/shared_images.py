"""Rearranges the images of a batch: the same images once for all rows that show them, or the images of all rows in one row."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

import torch

from ..layers.image_rows import NO_IMAGE


def share_images(images: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Keeps one row of images for all rows of a batch that have the same images in the same order. Rows without images get none.

    Args:
        images (`Mapping`): the processor's image inputs, each `(batch, num_images, ...)`; empty if no row has an image.

    Returns:
        `dict`: the same names, with a row for each different row of images, and `image_rows` `(batch,)`; unchanged if there is nothing
        to share.
    """
    if not images:
        return {}
    mask = images.get("image_mask")
    rows_of: dict[bytes, int] = {}
    kept: list[int] = []
    index: list[int] = []
    for row in range(len(next(iter(images.values())))):
        if mask is not None and not mask[row].any():
            index.append(NO_IMAGE)
            continue
        content = _digest(tensor[row] for tensor in images.values())
        if content not in rows_of:
            rows_of[content] = len(kept)
            kept.append(row)
        index.append(rows_of[content])
    if len(kept) == len(index):
        return dict(images)
    shared = {name: tensor[kept] for name, tensor in images.items()}
    if mask is not None and shared["image_mask"].all():
        del shared["image_mask"]
    return {**shared, "image_rows": torch.tensor(index)}


def in_one_row(images: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Puts the real images of all rows into one row, in their order: `(1, images of the batch, ...)`."""
    mask = images.get("image_mask")
    tensors = {name: tensor for name, tensor in images.items() if name != "image_mask"}
    return {name: (tensor.flatten(0, 1) if mask is None else tensor[mask])[None] for name, tensor in tensors.items()}


def _digest(tensors: Iterable[torch.Tensor]) -> bytes:
    content = hashlib.blake2b()
    for tensor in tensors:
        content.update(tensor.contiguous().view(torch.uint8).numpy())
    return content.digest()
