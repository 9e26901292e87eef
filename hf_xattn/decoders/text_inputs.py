"""Checks the text arguments of a call, before an image is encoded.

The checks read types, dtypes and shapes, and no values. A decode step skips them. They leave out what the text model or
torch refuses anyway, such as ids outside of the vocabulary, or positions outside of the text model's table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig
from transformers.masking_utils import BlockMask

from ..utils.tensor_checks import INTEGERS, check_floating, check_integers, check_tensor, has_values


PREFIXES = ("PREFIX_TUNING", "CARTRIDGE")  # methods of PEFT that learn keys and values of the text's cache


def check_text(text: Mapping[str, Any], starts: bool, find_embedding: Callable[[], nn.Module]) -> None:
    """Checks the text arguments of a forward: ids or embeddings, mask, positions, `logits_to_keep`.

    Args:
        text (`Mapping`): The arguments of the text model.
        starts (`bool`): Whether there is no cache, and so no earlier text that a mask has to cover.
        find_embedding (`Callable`): Returns the embedding of the text model. It is called only if it is needed.

    Raises:
        TypeError: for anything but tensors, or a wrong dtype.
        ValueError: for ids and embeddings together, or neither, an empty text, or a wrong rank or size.
    """
    input_ids, inputs_embeds = text.get("input_ids"), text.get("inputs_embeds")
    if (input_ids is None) == (inputs_embeds is None):
        raise ValueError(
            f"Expected exactly one of `input_ids` and `inputs_embeds`, got {'none' if input_ids is None else 'both'}."
        )
    if torch.compiler.is_compiling():
        return
    if not starts and isinstance(input_ids, torch.Tensor) and input_ids.dim() == 2 and input_ids.shape[1] == 1:
        if input_ids.dtype in INTEGERS:
            return  # `generate` passes one token after a cache thousands of times, so this call is not checked further
    if input_ids is not None:
        check_ids("input_ids", input_ids)
        rows, length = input_ids.shape
    else:
        rows, length = check_embeds(text["inputs_embeds"], find_embedding())
    if (mask := text.get("attention_mask")) is not None:
        check_attention_mask(mask, rows, length, starts)
    if (positions := text.get("position_ids")) is not None:
        check_tensor("position_ids", positions)
        check_integers("position_ids", positions)
        if positions.dim() not in (2, 3) or positions.shape[-1] != length or positions.shape[-2] not in (1, rows):
            raise ValueError(
                f"Expected `position_ids` of shape (batch={rows}, text_len={length}), got {tuple(positions.shape)}."
            )
    kept = text.get("logits_to_keep")
    if kept is not None and not isinstance(kept, torch.Tensor) and not (isinstance(kept, int) and kept >= 0):
        raise ValueError(f"Expected `logits_to_keep` to be at least 0, the number of last positions, got {kept!r}.")


def check_ids(name: str, ids: torch.Tensor) -> None:
    """Raises an error if token ids are not integers of shape `(batch, text_len)`, or if there are none."""
    if isinstance(ids, torch.Tensor) and ids.dtype in INTEGERS and ids.dim() == 2 and 0 not in ids.shape:
        return
    check_tensor(name, ids)
    check_integers(name, ids)
    if ids.dim() != 2:
        raise ValueError(f"Expected `{name}` of shape (batch, text_len), got {tuple(ids.shape)}.")
    raise ValueError(f"`{name}` holds no token: its shape is {tuple(ids.shape)}.")


def check_embeds(embeds: torch.Tensor, embedding: nn.Module) -> tuple[int, int]:
    """Returns batch and length of embeddings `(batch, text_len, width)`, and raises an error for anything else."""
    check_tensor("inputs_embeds", embeds)
    check_floating("inputs_embeds", embeds)
    width = getattr(embedding, "embedding_dim", None)
    if embeds.dim() != 3 or (width is not None and embeds.shape[2] != width):
        raise ValueError(
            f"Expected `inputs_embeds` of shape (batch, text_len, {'hidden_size' if width is None else width}), got "
            f"{tuple(embeds.shape)}."
        )
    if 0 in embeds.shape:
        raise ValueError(f"`inputs_embeds` holds no token: its shape is {tuple(embeds.shape)}.")
    return embeds.shape[0], embeds.shape[1]


def check_attention_mask(
    mask: torch.Tensor | BlockMask | Mapping[str, Any], rows: int, length: int, starts: bool
) -> None:
    """Raises an error for a mask that does not cover the text of the call, or also earlier text if not `starts`."""
    if isinstance(mask, Mapping) or (not isinstance(mask, torch.Tensor) and isinstance(mask, BlockMask)):
        return  # transformers has made it: a mask for each kind of layer, or one for flex attention
    check_tensor("attention_mask", mask)
    shape = tuple(mask.shape)
    if len(shape) == 2:
        fits = shape[0] == rows and (shape[1] == length if starts else shape[1] >= length)
    else:
        fits = len(shape) == 4 and shape[2] == length
    if not fits:
        covered = f"text_len={length}" if starts else f"text so far + text_len={length}"
        raise ValueError(f"Expected `attention_mask` of shape (batch={rows}, {covered}), got {shape}.")


def check_options(model: Any, options: GenerationConfig, sees: bool, masked: bool) -> None:
    """Raises a `ValueError` for options of `generate` with which it would leave out images, or what PEFT has learned.

    PEFT's `generate` replaces `prepare_inputs_for_generation` of the model, by which this function finds PEFT.

    Args:
        model ([`XAttnForConditionalGeneration`]): The model.
        options (`GenerationConfig`): The options.
        sees (`bool`): Whether the call has images.
        masked (`bool`): Whether it has an `attention_mask`. Without one, transformers finds padding by its token.
    """
    wrapper = getattr(vars(model).get("prepare_inputs_for_generation"), "__self__", None)
    kind = getattr(getattr(wrapper, "active_peft_config", None), "peft_type", None)
    if getattr(kind, "value", kind) in PREFIXES:
        raise ValueError(
            f"`generate` does not work with {getattr(kind, 'value', kind)} of PEFT, which puts keys and values into a "
            "cache of its own. Use LoRA or prompt tuning."
        )
    if not sees:
        return
    marker = model.config.image_token_id
    if options.token_healing:
        raise ValueError(
            f"Expected `token_healing=False` beside images, got {options.token_healing!r}: it asks for the last token "
            "of the text anew, without the images."
        )
    if not masked and marker is not None and options.pad_token_id == marker:
        raise ValueError(
            f"Expected an `attention_mask`, because token {marker} is both `image_token_id` and `pad_token_id`, got "
            "none: image markers would be hidden as padding."
        )


def check_labels(
    name: str, labels: torch.Tensor, text: object, logits_to_keep: int | torch.Tensor, ignored: int = -100
) -> None:
    """Checks that `labels` or `shift_labels` have the shape of the text, or of the positions whose logits are kept.

    `ignored` is the label that the loss ignores.

    Raises:
        TypeError: for labels that are not integers.
        ValueError: for another shape.
    """
    check_tensor(name, labels)
    check_integers(name, labels, (torch.int64,))
    if torch.compiler.is_compiling() or not isinstance(text, torch.Tensor) or text.dim() < 2:
        return
    rows, length = text.shape[:2]
    if isinstance(logits_to_keep, torch.Tensor):
        length = logits_to_keep.numel()
    elif logits_to_keep:
        length = min(length, logits_to_keep)
    if tuple(labels.shape) != (rows, length):
        raise ValueError(
            f"Expected `{name}` of shape {(rows, length)} (batch, text_len), got {tuple(labels.shape)}. A position "
            f"that has no label takes {ignored}."
        )


def check_side_by_side(logits_to_keep: int | torch.Tensor) -> None:
    """Raises a `ValueError` for kept positions with gaps, because `labels` train each on the label of the next one."""
    if isinstance(logits_to_keep, torch.Tensor) and logits_to_keep.dim() == 1 and has_values(logits_to_keep):
        if bool((logits_to_keep.diff() != 1).any()):
            raise ValueError(
                "Expected `logits_to_keep` with `labels` to be positions side by side, as each is trained on the label "
                f"of the next one, got {logits_to_keep.tolist()}. Pass the next tokens as `shift_labels`."
            )
