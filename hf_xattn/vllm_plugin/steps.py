"""Decides what the tokens of one step of the engine see.

A step computes tokens of many requests: all tokens of prompts that begin, and one token of each request that continues.
In contrast to `cache/visibility.py`, no progress is stored between steps. Each step reads what a token sees from the
data that the engine keeps for the request:

- A request that continues sees the image tokens that its cache holds. The engine knows their number. If the number is
  0, the request has no images, and its tokens keep their hidden states.
- A prompt that begins brings its images. Its markers and `image_visibility` decide for each of its tokens.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..cache.text_progress import count_markers
from ..cache.visibility import image_order, visible_images


class Masked(NamedTuple):
    """A prompt whose tokens see different images."""

    text: slice  # the tokens of the prompt among those of the step
    images: slice  # the image tokens of the prompt in `Step.states`
    mask: torch.Tensor  # `(text_len, image tokens)`, True = attend


class Images(NamedTuple):
    """The settings of a model that decide what its text sees of the images."""

    rule: str  # `image_visibility`
    image_token_id: int | None
    tokens: int  # number of tokens of an image, with its padding tiles
    tiled: bool = False  # whether image tokens have one more column, which says if they belong to a real tile
    unseeing_reads_all: bool = False  # Mllama: text that sees no image attends to all tokens, and skips the MLP


class Step(NamedTuple):
    """What the tokens of one step see."""

    visible: torch.Tensor  # `(tokens, 1)`, False for a token that sees no image
    attends: torch.Tensor  # `(tokens, 1)`, True for a token that attends: `visible`, or `Images.unseeing_reads_all`
    states: torch.Tensor | None = None  # `(image tokens, context_size)` of all prompts that begin. None without any
    stored: torch.Tensor | None = None  # indices of the image tokens that the cache keeps. None: all of them, in order
    masked: tuple[Masked, ...] = ()  # the prompts that need a mask


def read_step(metadata: Any, num_tokens: int) -> Step:
    """Reads a step without new images. `metadata` is the engine's metadata of a cross-attention layer."""
    starts = metadata.query_start_loc
    places = torch.arange(num_tokens, device=starts.device, dtype=starts.dtype)
    # No value is read on the host, so that the step could be recorded as a CUDA graph.
    requests = torch.searchsorted(starts[1:], places, right=True).clamp(max=starts.shape[0] - 2)
    visible = (metadata.seq_lens > 0)[requests][:, None]
    return Step(visible, visible)


def read_step_with_images(
    metadata: Any, input_ids: torch.Tensor, positions: torch.Tensor, given: list[torch.Tensor], images: Images
) -> Step:
    """Reads a step in which prompts with images begin.

    Args:
        metadata: the engine's metadata of a cross-attention layer.
        input_ids, positions (`torch.LongTensor`): `(tokens,)`.
        given (`list[torch.Tensor]`): image tokens `(image tokens, context_size)` of each prompt with images that
            begins, in the order of the batch.
        images ([`Images`]): settings of the model.

    Raises:
        RuntimeError: if images and prompts do not fit together. Otherwise a prompt would be answered with the images of
            another one.
    """
    step = read_step(metadata, input_ids.shape[0])
    visible, attends = step.visible.clone(), step.visible.clone()
    starts, lengths = metadata.query_start_loc.tolist(), metadata.seq_lens.tolist()
    begins = [
        request
        for request, length in enumerate(lengths)
        if length > 0 and starts[request + 1] > starts[request] and int(positions[starts[request]]) == 0
    ]
    if len(begins) != len(given):
        raise RuntimeError(
            f"Expected images for the {len(begins)} prompts with images that begin in this step, got images of "
            f"{len(given)} prompts from the engine."
        )
    read, stored, masked, first = [], [], [], 0
    for request, states in zip(begins, given):
        states, real = (states[..., :-1], states[..., -1] != 0) if images.tiled else (states, None)  # see `with_real`
        text, count = slice(starts[request], starts[request + 1]), states.shape[0]
        mask = _tokens_seen(images, input_ids[text], count, real)
        # Text after the prompt sees what the last token of the prompt sees. The cache only keeps these image tokens.
        kept = mask[-1].nonzero()[:, 0]
        if len(kept) != lengths[request]:
            raise RuntimeError(
                f"Expected the engine to keep the {len(kept)} image tokens that the text after a prompt sees, got "
                f"{lengths[request]}."
            )
        seeing = mask.any(dim=-1)
        if images.unseeing_reads_all:
            mask = mask | ~seeing[:, None]
        visible[text, 0], attends[text, 0] = seeing, mask.any(dim=-1)
        if not bool((mask == mask[-1])[attends[text, 0]].all()):
            masked.append(Masked(text, slice(first, first + count), mask))
        read.append(states)
        stored.append(kept + first)
        first += count
    keeps_all = sum(len(each) for each in stored) == first
    return Step(visible, attends, torch.cat(read), None if keeps_all else torch.cat(stored), tuple(masked))


def with_real(features: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    """Appends a column to image tokens `(..., context_size)`: 1 for a token of a real tile, 0 for padding.

    The engine carries only one tensor for each request, so there is no other place for this mask.
    """
    return torch.cat([features, real[..., None].to(features.dtype)], dim=-1)


def _tokens_seen(images: Images, input_ids: torch.Tensor, count: int, real: torch.Tensor | None) -> torch.Tensor:
    """Returns which of `count` image tokens each token of a prompt sees, `(text_len, count)`."""
    markers = input_ids.eq(-1 if images.image_token_id is None else images.image_token_id)
    sees = images_seen(images.rule, markers, count // images.tokens).repeat_interleave(images.tokens, dim=1)
    return sees if real is None else sees & real


def images_seen(rule: str, markers: torch.Tensor, num_images: int) -> torch.Tensor:
    """Returns which images each token of a prompt sees, `(text_len, num_images)`."""
    order = image_order(markers.new_ones(1, num_images))
    if rule == "all":
        return (order > 0).expand(markers.shape[0], -1)
    total = torch.full((1, 1), num_images, device=markers.device)
    _, seen, before_group, _ = count_markers(None, markers[None], total)
    return visible_images(order, seen, before_group, rule)[0]
