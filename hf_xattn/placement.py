"""Where the images of a call stand among all images: which are new, and what that means for masks.

A cache keeps images in the order in which they came. A call that passes all its images again may have them in other places: where rows
have different numbers of images, new images of one row stand where another row has padding. Masks come in the places of the call.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from .digests import Digests, find_known
from .image_inputs import ImageAxis, ImageInputs
from .image_layout import ImageLayout, rows_to


@dataclass(frozen=True)
class Placement:
    """Which images of a call are new, and where the others are in the cache.

    Attributes:
        first (`int`): images from here on are new, in every row; or
        index (`torch.LongTensor`, *optional*): `(R, count)`, the new images of each row, where rows differ.
        real (`torch.BoolTensor`, *optional*): `(R, count)`, which of the new images are real; None where all are.
        places (`torch.LongTensor`, *optional*): `(R, n)`, for each image of the call its place among all images, -1 for padding; None
            where the images of the call stand in the order of all images.
        covers_cache (`bool`): the call brings all images that the cache holds.
    """

    first: int = 0
    index: torch.Tensor | None = None
    real: torch.Tensor | None = None
    places: torch.Tensor | None = None
    covers_cache: bool = False

    def count(self, num_images: int) -> int:
        """Number of new images a row, of `num_images` that the call brings."""
        return num_images - self.first if self.index is None else self.index.shape[1]

    def take(self, tensor: torch.Tensor) -> torch.Tensor:
        """`(R, n, ...)`: what belongs to the new images."""
        if self.index is None:
            return tensor[:, self.first :]
        return tensor[torch.arange(tensor.shape[0], device=tensor.device)[:, None], self.index.to(tensor.device)]

    def digests(self, digests: Digests, per_image: int) -> Digests:
        """Those of the new images, `per_image` numbers each."""
        values = self.take(digests.values.unflatten(1, (-1, per_image))).flatten(1)
        real = None if self.real is None else self.real.repeat_interleave(per_image, dim=1)
        return replace(digests, values=values, real=real, sizes=(per_image,) * (values.shape[1] // per_image))

    def axes(self, cached: ImageLayout | None, new: tuple[int, ...]) -> list[ImageAxis]:
        """Image axes that a mask may have: all images, and those of the call. `new`: the tokens of each new image."""
        if cached is None:
            return [ImageAxis(new)]
        if self.places is not None:
            sizes = (*cached.sizes, *new)
            return [ImageAxis((sizes[0],) * self.places.shape[1], 0, self.places, sizes)]
        axes = [ImageAxis((*cached.sizes, *new))]
        if not self.covers_cache:
            axes.append(ImageAxis(new, cached.num_tokens))
        return axes

    def over_cache(self, mask: torch.Tensor, num_images: int, cached: ImageLayout, num_tokens: int) -> torch.Tensor:
        """A mask `(rows, tokens)` over the images of the call, as one over `num_tokens` tokens of all images."""
        if self.places is None:
            return mask
        axis = ImageAxis(
            (cached.sizes[0],) * num_images, 0, self.places, (cached.sizes[0],) * (num_tokens // cached.sizes[0])
        )
        if mask.shape[1] != sum(axis.sizes):
            raise ValueError(
                f"Expected `cross_attention_mask` of shape {(mask.shape[0], sum(axis.sizes))} (batch, num_image_tokens), got "
                f"{tuple(mask.shape)}."
            )
        return axis.moved(mask[:, None])[:, 0]

    def of_new_images(self, mask: torch.Tensor, count: int, cached: ImageLayout | None) -> torch.Tensor:
        """The part of a mask `(rows, tokens)` for the `count` tokens of new images. What it says of others must agree with the cache."""
        known = 0 if cached is None else cached.num_tokens
        if cached is not None and self.places is not None:
            mask = self.over_cache(mask, self.places.shape[1], cached, known + count)
        if mask.shape[1] == known + count:
            if cached is not None:
                check_known_mask("cross_attention_mask", mask[:, :known], cached)
            return mask[:, known:]
        if mask.shape[1] != count or self.covers_cache:
            sizes = sorted({known + count} if self.covers_cache else {count, known + count})
            raise ValueError(
                f"Expected `cross_attention_mask` of shape {' or '.join(str((mask.shape[0], size)) for size in sizes)} (batch, "
                f"num_image_tokens), got {tuple(mask.shape)}."
            )
        return mask


def place(
    inputs: ImageInputs, digests: Digests | None, cached: ImageLayout
) -> tuple[ImageInputs, Digests | None, Placement]:
    """Finds the images of a call in a cache.

    Returns:
        the inputs and digests, without those tokens of features on a single axis that the cache holds, and the [`Placement`].

    Raises:
        ValueError: where it cannot be told which images are new.
    """
    assert inputs.images is not None
    known = find_known(cached.digests, digests)
    real = inputs.real_images
    if not known.covers_cache or digests is None:
        first = cached.num_images if _padding_again(inputs, real, cached) else 0
        rest = None if real is None else real[:, first:]
        return inputs, digests, Placement(first, real=rest, covers_cache=first > 0)
    if inputs.states is not None and inputs.states.shape[1] == 1:
        return *_without_tokens(inputs, digests, known.counts), Placement(real=real, covers_cache=True)
    num_images, per_image = inputs.images.shape[1], 1 if inputs.states is None else inputs.states.shape[2]
    if any(count % per_image for count in known.counts):
        raise ValueError(
            f"Expected the tokens of the cached images (of each row: {known.counts}) to be whole images of `cross_attention_states`, "
            f"got images of {per_image} tokens."
        )
    counts = [count // per_image for count in known.counts]
    if _stand_in_order(counts, num_images, real, cached):
        first = cached.num_images
        return inputs, digests, Placement(first, None, None if real is None else real[:, first:], None, True)
    return inputs, digests, _row_by_row(counts, num_images, real, cached)


def _padding_again(inputs: ImageInputs, real: torch.Tensor | None, cached: ImageLayout) -> bool:
    """Whether the cache holds padding images alone, and the call starts with them."""
    first = cached.num_images
    if real is None or real.shape[1] < first or cached.image_mask is None:
        return False
    if inputs.states is not None and set(cached.sizes) != {inputs.states.shape[2]}:
        return False
    return not bool(cached.image_mask.any()) and not bool(real[:, :first].any())


def _row_by_row(counts: list[int], num_images: int, real: torch.Tensor | None, cached: ImageLayout) -> Placement:
    """The new images of each row, padded to the most that a row has."""
    if len(set(cached.sizes)) > 1:
        raise ValueError(
            f"Expected the images in the places that they have in `past_key_values`, as they have different numbers of tokens "
            f"({list(cached.sizes)}). Pass only the new images."
        )
    given = torch.ones(len(counts), num_images, dtype=torch.bool) if real is None else real.cpu()
    held = torch.ones(len(counts), cached.num_images, dtype=torch.bool)
    if cached.image_mask is not None:
        held = rows_to(cached.image_mask.cpu(), max(len(counts), cached.image_mask.shape[0]))[
            :: max(1, cached.mask_rows // len(counts))
        ]
    width = max(int(row.sum()) - count for row, count in zip(given, counts))
    index = torch.zeros(len(counts), width, dtype=torch.long)
    new = torch.zeros(len(counts), width, dtype=torch.bool)
    places = torch.full((len(counts), num_images), -1)
    for row, count in enumerate(counts):
        mine = given[row].nonzero()[:, 0]
        rest = mine[count:]
        index[row, : len(rest)], new[row, : len(rest)] = rest, True
        places[row, mine[:count]] = held[row].nonzero()[:count, 0]
        places[row, rest] = cached.num_images + torch.arange(len(rest))
    device = cached.image_of_token.device
    return Placement(num_images, index.to(device), None if new.all() else new.to(device), places.to(device), True)


def _stand_in_order(counts: list[int], num_images: int, real: torch.Tensor | None, cached: ImageLayout) -> bool:
    """Whether the cached images have the places in the cache that they have among the given ones."""
    first = cached.num_images
    if first > num_images:
        return False
    mine = torch.ones(len(counts), first, dtype=torch.bool) if real is None else real[:, :first].cpu()
    theirs = torch.ones_like(mine) if cached.image_mask is None else cached.image_mask.cpu()
    rows = max(mine.shape[0], theirs.shape[0])
    return torch.equal(rows_to(mine, rows), rows_to(theirs, rows))


def _without_tokens(inputs: ImageInputs, digests: Digests, counts: list[int]) -> tuple[ImageInputs, Digests]:
    """Features of one axis of tokens, without the first ones, which the cache holds."""
    given = digests.real_or_all().any(dim=1).tolist()
    wanted = {count for count, some in zip(counts, given) if some}
    if len(wanted) > 1:
        raise ValueError(
            f"Expected `cross_attention_states` to start with the same number of cached tokens in every row, got {counts}."
        )
    assert inputs.states is not None
    first = wanted.pop() if wanted else 0
    real = None if digests.real is None else digests.real[:, first:]
    rest = replace(digests, values=digests.values[:, first:], real=real, sizes=(digests.values.shape[1] - first,))
    return replace(inputs, states=inputs.states[:, :, first:]), rest


def check_known_mask(name: str, given: torch.Tensor, cached: ImageLayout) -> None:
    """Raises a `ValueError` where a mask says other things of cached images than the cache. Padding images may say anything.

    Args:
        name (`"image_mask"` or `"cross_attention_mask"`), given (`torch.BoolTensor`): `(rows, num_images)` or `(rows, N)`.
    """
    by_image = name == "image_mask"
    size = cached.num_images if by_image else cached.num_tokens
    if given.shape[1] != size:
        raise ValueError(
            f"Expected `{name}` for the {size} {'images' if by_image else 'image tokens'} in `past_key_values`, got {tuple(given.shape)}."
        )
    own = cached.image_mask if by_image else cached.token_mask
    if own is None:
        differs = ~given
    else:
        rows = max(given.shape[0], own.shape[0])
        given, own = rows_to(given, rows).to(own.device), rows_to(own, rows)
        if not by_image and cached.image_mask is not None:
            given = given & rows_to(cached.image_mask, rows)[:, cached.image_of_token]
        differs = given ^ own
    if differs.any():
        row = int(differs.any(dim=1).nonzero()[0])
        raise ValueError(
            f"Expected `{name}` as the images in `past_key_values` came with it, because the text in it was read with that one: in row "
            f"{row}, {int(differs[row].sum())} of {size} entries differ. Pass the same `{name}`, or none, or start from an empty cache."
        )
