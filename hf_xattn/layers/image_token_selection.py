"""Chooses the image tokens that the blocks after the first keep: `keep_image_tokens=0.5`.

A text looks at few of an image's tokens, and blocks agree about which. So when the first block has looked at the images, the tokens that
nobody looks at are dropped: later blocks project, cache and attend only the others. The idea is "trimmed" cross-attention features (Lee et
al., "Efficient LLaMA-3.2-Vision by Trimming Cross-attended Visual Features", 2025): the attention weights of the first cross-attention
layer tell how important an image token is; each head names its most important tokens, and the union of all heads is kept. Two things differ:

- There a head sums its weights over the text. Here the largest counts: a word of the question that needs a token is not outvoted by a long
  prompt that looks elsewhere. `examples/benchmarks/README.md` has the accuracy of both.
- There the union has any size. Here a share is kept exactly: each token gets its best rank in any head, and the tokens of the best ranks
  are kept. That is the union of as many tokens a head as fit; its last places go to the largest sums over heads.

What holds for the choice:

- The first block keeps all tokens. Its keys and values exist before anything can be chosen, so the plain path is unchanged up to and
  with this block, and a later text looks at whole images before new ones are chosen.
- A share is kept of every image in every image row, of its real tokens, rounded up. Text rows that share an image row (beams, questions)
  choose together.
- The text decides, without its padding. What is generated later does not.
- An image that no text of the call sees keeps all tokens, and the first text with `keep_image_tokens` that sees it decides.

What is kept depends on the text. So such keys and values stay in the cache of one conversation: no image store, file or other text gets
them.

Letters: R image rows, K K/V heads, G query heads for each K/V head, P text positions that share an image row, D head width, N image tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch

from .norms import at_least_float32


# Attention weights that exist at a time while the largest are found: 16 MiB in float32.
WEIGHTS_AT_A_TIME = 2**22
# A share times a size is rounded up, but not for the rounding of the product: 0.1 of 30 tokens are 3.
SLACK = 1e-9


@dataclass(eq=False)  # not frozen: see `cache/image_layout.py`
class KeptShare:
    """The argument `keep_image_tokens`, checked.

    Attributes:
        share (`float`): above 0, below 1.
        length (`int`, *optional*): number of text tokens that decide. `generate` sets it: its first forward may hold candidates of an
            assistant behind the prompt. None: all of the call.
        prompt (`torch.BoolTensor`, *optional*): `(batch, length)`, False = padding. `generate` sets it: its first forward may have a
            mask that does not tell padding. None: as `attention_mask` says.
    """

    share: float
    length: int | None = None
    prompt: torch.Tensor | None = None

    def to(self, *args: Any, **kwargs: Any) -> KeptShare:
        return self


def read_share(keep_image_tokens: Any) -> KeptShare | None:
    """Checks the argument. None and 1 drop nothing, so they give None.

    Raises:
        ValueError: for anything but a number above 0 and at most 1.
    """
    if keep_image_tokens is None or isinstance(keep_image_tokens, KeptShare):
        return keep_image_tokens
    is_number = isinstance(keep_image_tokens, Real) and not isinstance(keep_image_tokens, bool)
    if not is_number or not 0 < keep_image_tokens <= 1:
        raise ValueError(
            "Expected `keep_image_tokens` to be a number above 0 and at most 1, the share of image tokens that blocks after the first "
            f"keep, got {keep_image_tokens!r}."
        )
    return None if keep_image_tokens == 1 else KeptShare(float(keep_image_tokens))


def check_can_choose(training: bool, num_blocks: int, is_split: bool) -> None:
    """Raises a `ValueError` for a model that cannot drop image tokens.

    Args:
        training (`bool`): whether the model is in training mode.
        num_blocks (`int`): number of cross-attention blocks.
        is_split (`bool`): whether this process holds only some of the heads (tensor parallelism).
    """
    if training:
        raise ValueError(
            "Expected `keep_image_tokens` in evaluation mode, got it in training mode: weights of later blocks would not learn from the "
            "dropped tokens. Call `model.eval()`, or leave it out."
        )
    if num_blocks < 2:
        raise ValueError(
            f"Expected `keep_image_tokens` for a model of 2 or more cross-attention blocks, got {num_blocks}: the first block keeps all "
            "tokens. Leave it out."
        )
    if is_split:
        raise ValueError(
            "Expected `keep_image_tokens` for a model that is not split over ranks (tensor parallelism), because ranks would choose by "
            "different heads. Leave it out."
        )


def quota(share: float, size: int) -> int:
    """Number of tokens that an image of `size` tokens keeps, at least 1."""
    return max(1, math.ceil(share * size - SLACK))


def importance(
    query: torch.Tensor,
    key: torch.Tensor,
    mask: torch.Tensor | None,
    counted: torch.Tensor | None,
    *,
    group: int,
    scaling: float,
    position_bias: torch.Tensor | None,
    null_key: bool,
) -> torch.Tensor:
    """Finds the largest attention weight of the text on each image token, for each query head. Computes them part by part.

    Args:
        query (`torch.Tensor`): `(R, K, P * G, D)`, folded.
        key (`torch.Tensor`): `(R, K, N, D)`; with the null key N + 1 tokens.
        mask (`torch.BoolTensor`, *optional*): `(R, 1, 1, P or P * G, N)`, see [`FoldedMask`].
        counted (`torch.BoolTensor`, *optional*): `(R, P)`, the text positions that count; None if all do.
        group (`int`): G.
        scaling (`float`), position_bias (`torch.Tensor`, *optional*): as in attention.
        null_key (`bool`): whether keys and mask start with a null key.

    Returns:
        `torch.Tensor`: `(R, K * G, N)`, in float32 or float64.
    """
    rows, kv_heads, num_queries = query.shape[:3]
    positions, num_keys = num_queries // group, key.shape[2]
    at_a_time = max(1, WEIGHTS_AT_A_TIME // (rows * kv_heads * group * num_keys))
    largest: torch.Tensor | None = None
    for first in range(0, positions, at_a_time):
        last = min(first + at_a_time, positions)
        part = slice(first * group, last * group)
        scores = torch.matmul(query[:, :, part].to(key.dtype), key.transpose(-1, -2)) * scaling
        scores = scores.to(at_least_float32(scores.dtype))
        if position_bias is not None:
            scores = scores + position_bias[:, :, part]
        if mask is not None:
            seen = mask
            if mask.shape[2] == num_queries:
                seen = mask[:, :, part]
            elif mask.shape[2] == positions:  # shared by the heads of a group
                seen = mask[:, :, first:last].repeat_interleave(group, dim=2)
            scores = scores.masked_fill(~seen, torch.finfo(scores.dtype).min)
        weights = scores.softmax(dim=-1)[..., int(null_key) :].unflatten(2, (last - first, group))
        if counted is not None:
            counts = counted[:, None, first:last, None, None].to(weights.device)
            weights = weights.masked_fill(~counts, 0.0)
        of_part = weights.amax(dim=2)
        largest = of_part if largest is None else torch.maximum(largest, of_part)
    assert largest is not None
    return largest.flatten(1, 2)


def most_important(
    weights: torch.Tensor, real: torch.Tensor | None, share: float
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Chooses the tokens of one image.

    Args:
        weights (`torch.Tensor`): `(R, heads, tokens)`, from [`importance`].
        real (`torch.BoolTensor`, *optional*): `(R, tokens)`, False = padding, which is never chosen.
        share (`float`): the share of real tokens to choose, rounded up.

    Returns:
        the chosen tokens in their order `(R, count)`; and which of them count, `(R, count)`, None if all do. Rows with fewer real tokens
        have places that do not.
    """
    size = weights.shape[-1]
    if real is not None:
        weights = weights.masked_fill(~real[:, None], -1.0)
    in_head = weights.argsort(dim=-1, descending=True, stable=True)
    ranks = torch.empty_like(in_head).scatter_(
        -1, in_head, torch.arange(size, device=weights.device).expand_as(in_head)
    )
    by_sum = weights.sum(dim=1).argsort(dim=-1, descending=True, stable=True)
    best = ranks.amin(dim=1).gather(-1, by_sum)
    order = by_sum.gather(-1, best.argsort(dim=-1, stable=True))
    chosen = order[:, : quota(share, size)]
    if real is None:
        return chosen.sort(dim=-1).values, None
    count = (real.sum(dim=-1, keepdim=True).double() * share - SLACK).ceil()
    place = torch.arange(chosen.shape[1], device=chosen.device)
    counts = (place < count.clamp(min=1)) & real.gather(-1, chosen)
    in_order = torch.where(counts, chosen, chosen + size).sort(dim=-1).values  # empty places go to the end
    return in_order % size, in_order < size
