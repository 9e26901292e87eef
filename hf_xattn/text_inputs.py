"""The text arguments of a call, checked before an image is encoded.

Only types, dtypes and shapes are read, so a decode step pays for a few comparisons. Whether ids are in the vocabulary would make a
GPU wait for them: on a CPU, where the embedding itself refuses such ids, the refusal is put into words ([`explain`]).
"""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from typing import Any

import torch
from transformers.masking_utils import BlockMask

from .tensor_checks import check_floating, check_integers, check_tensor


def check_text(text: Mapping[str, Any], starts: bool) -> torch.Tensor:
    """Checks the text arguments of a forward.

    Args:
        text (`Mapping`): `input_ids` or `inputs_embeds`, `attention_mask`, `position_ids`, `logits_to_keep`.
        starts (`bool`): there is no cache, so no earlier text that a mask would cover.

    Returns:
        `torch.Tensor`: `input_ids` or `inputs_embeds`.

    Raises:
        TypeError: for anything but tensors, or a wrong dtype.
        ValueError: for none or both of the two, an empty text, or a wrong rank or size.
    """
    input_ids, inputs_embeds = text.get("input_ids"), text.get("inputs_embeds")
    if (input_ids is None) == (inputs_embeds is None):
        raise ValueError(
            f"Expected exactly one of `input_ids` and `inputs_embeds`, got {'none' if input_ids is None else 'both'}."
        )
    if torch.compiler.is_compiling():
        return input_ids if input_ids is not None else inputs_embeds
    text_tensor = _check_embeds(inputs_embeds) if input_ids is None else check_ids("input_ids", input_ids)
    rows, length = text_tensor.shape[:2]
    if (mask := text.get("attention_mask")) is not None:
        _check_attention_mask(mask, rows, length, starts)
    if (positions := text.get("position_ids")) is not None:
        check_tensor("position_ids", positions)
        check_integers("position_ids", positions)
        if positions.dim() not in (2, 3) or positions.shape[-1] != length:
            raise ValueError(
                f"Expected `position_ids` of shape (batch, text_len={length}), got {tuple(positions.shape)}."
            )
    keep = text.get("logits_to_keep")
    if keep is not None and not isinstance(keep, torch.Tensor) and (not isinstance(keep, numbers.Integral) or keep < 0):
        raise ValueError(
            f"Expected `logits_to_keep` to be a tensor of positions or an integer of at least 0, got {keep!r}."
        )
    return text_tensor


def check_ids(name: str, ids: Any) -> torch.Tensor:
    """Raises where token ids are not integers of shape `(batch, text_len)`, or there are none."""
    check_tensor(name, ids)
    check_integers(name, ids)
    if ids.dim() != 2:
        raise ValueError(f"Expected `{name}` of shape (batch, text_len), got {tuple(ids.shape)}.")
    _check_not_empty(name, ids)
    return ids


def _check_embeds(embeds: Any) -> torch.Tensor:
    check_tensor("inputs_embeds", embeds)
    check_floating("inputs_embeds", embeds)
    if embeds.dim() != 3:
        raise ValueError(
            f"Expected `inputs_embeds` of shape (batch, text_len, hidden_size), got {tuple(embeds.shape)}."
        )
    _check_not_empty("inputs_embeds", embeds)
    return embeds


def _check_not_empty(name: str, text: torch.Tensor) -> None:
    if 0 in text.shape:
        raise ValueError(f"`{name}` holds no token: its shape is {tuple(text.shape)}.")


def _check_attention_mask(mask: Any, rows: int, length: int, starts: bool) -> None:
    if isinstance(mask, Mapping) or (not isinstance(mask, torch.Tensor) and isinstance(mask, BlockMask)):
        return  # made by transformers: one for each kind of layer, or for flex attention
    check_tensor("attention_mask", mask)
    shape = tuple(mask.shape)
    if len(shape) == 2:
        fits = shape[0] == rows and (shape[1] == length if starts else shape[1] >= length)
    else:
        fits = len(shape) == 4 and shape[2] == length
    if not fits:
        covered = f"text_len={length}" if starts else f"text so far and text_len={length}"
        raise ValueError(f"Expected `attention_mask` of shape (batch={rows}, {covered}), got {shape}.")


def check_labels(labels: Any, rows: int, length: int, logits_to_keep: Any) -> None:
    """Checks labels against the text, or against the positions whose logits are kept.

    Raises:
        TypeError: for anything but integers.
        ValueError: for another shape.
    """
    check_tensor("labels", labels)
    check_integers("labels", labels)
    if isinstance(logits_to_keep, torch.Tensor):
        length = logits_to_keep.numel()
    elif logits_to_keep:
        length = min(length, logits_to_keep)
    if tuple(labels.shape) != (rows, length):
        raise ValueError(
            f"Expected `labels` of shape {(rows, length)} (batch, text_len), got {tuple(labels.shape)}. A position that has no label "
            "takes -100."
        )


def explain(error: IndexError, text: Mapping[str, Any], vocab_size: int, head_size: int) -> Exception:
    """What to raise for an `IndexError` inside a decoder.

    Args:
        error (`IndexError`): of a table that was read at an index that it does not have.
        text (`Mapping`): the decoder's arguments.
        vocab_size (`int`): ids that the embedding has rows for.
        head_size (`int`): ids that the head has rows for.

    Returns:
        `Exception`: a `ValueError` that names the argument, or the error itself where it is not about ids.
    """
    for name, size in (("input_ids", vocab_size), ("labels", head_size)):
        ids = text.get(name)
        if not isinstance(ids, torch.Tensor):
            continue
        outside = (ids < 0) | (ids >= size)
        if name == "labels":
            outside &= ids != -100
        if outside.any():
            found = sorted(set(ids[outside].tolist()))[:5]
            return ValueError(f"Expected `{name}` from 0 to {size - 1}, the model's vocabulary, got {found}.")
    return error
