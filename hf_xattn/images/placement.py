"""Finds the positions of a call's images among all images: which images are new, and how masks map to all images.

A cache keeps images in the order of the calls. A call that passes all images again may have them at other positions:
if rows have different numbers of images, one row has new images where another row has padding.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ..cache.digests import Digests, find_known, same_padding
from ..cache.image_layout import ImageLayout, rows_to
from ..utils.tensor_checks import has_values
from .image_inputs import ImageAxis, ImageInputs


@dataclass(frozen=True)
class Placement:
    """Which images of a call are new, and the positions of the others in the cache."""

    first: int = 0  # index of the first new image, in every row; not used if `index` is given
    index: torch.Tensor | None = None  # `(R, count)`, the new images of each row, if rows differ
    real: torch.Tensor | None = None  # `(R, count)`, which of the new images are real; None if all are
    places: torch.Tensor | None = None  # `(R, n)`, position among all images, -1 for padding; None: same order
    covers_cache: bool = False  # whether the call passes all images of the cache

    def count(self, num_images: int) -> int:
        """Number of new images in a row. The call passes `num_images` in a row."""
        return num_images - self.first if self.index is None else self.index.shape[1]

    def take(self, tensor: torch.Tensor) -> torch.Tensor:
        """Selects the new images from `(R, n, ...)`."""
        if self.index is None:
            return tensor[:, self.first :]
        return tensor[torch.arange(tensor.shape[0], device=tensor.device)[:, None], self.index.to(tensor.device)]

    def digests(self, digests: Digests, per_image: int) -> Digests:
        """Selects the digests of the new images, with `per_image` numbers for each image."""
        values = self.take(digests.values.unflatten(1, (-1, per_image))).flatten(1)
        real = None if self.real is None else self.real.repeat_interleave(per_image, dim=1)
        return replace(digests, values=values, real=real, sizes=(per_image,) * (values.shape[1] // per_image))

    def axes(self, cached: ImageLayout | None, new: tuple[int, ...]) -> list[ImageAxis]:
        """The image axes that a mask may have: all images, or the call's. `new`: number of tokens of each new image."""
        if cached is None:
            return [ImageAxis(new)]
        if self.places is not None:
            sizes = (*cached.sizes, *new)
            return [ImageAxis((sizes[0],) * self.places.shape[1], 0, self.places, sizes)]
        if self.covers_cache:
            return [ImageAxis((*cached.sizes, *new))]
        return [ImageAxis((*cached.sizes, *new), real=cached.image_mask), ImageAxis(new, cached.num_tokens)]

    def over_cache(self, mask: torch.Tensor, num_images: int, cached: ImageLayout, num_tokens: int) -> torch.Tensor:
        """Maps a mask `(rows, tokens)` from the images of the call to `num_tokens` tokens of all images."""
        if self.places is None:
            return mask
        axis = ImageAxis(
            (cached.sizes[0],) * num_images, 0, self.places, (cached.sizes[0],) * (num_tokens // cached.sizes[0])
        )
        if mask.shape[1] != sum(axis.sizes):
            raise ValueError(
                f"Expected `cross_attention_mask` of shape {(mask.shape[0], sum(axis.sizes))} (batch, "
                f"num_image_tokens), got {tuple(mask.shape)}."
            )
        return axis.moved(mask[:, None])[:, 0]

    def of_new_images(self, mask: torch.Tensor, count: int, cached: ImageLayout | None) -> torch.Tensor:
        """The part of a mask `(rows, tokens)` for the `count` new tokens. The rest must agree with the cache."""
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
                f"Expected `cross_attention_mask` of shape {' or '.join(str((mask.shape[0], size)) for size in sizes)} "
                f"(batch, num_image_tokens), got {tuple(mask.shape)}."
            )
        return mask


def place(
    inputs: ImageInputs, digests: Digests | None, cached: ImageLayout
) -> tuple[ImageInputs, Digests | None, Placement]:
    """Finds the images of a call in a cache. Raises a `ValueError` if it is not clear which images are new.

    Features without an image axis lose the tokens that the cache holds.
    """
    assert inputs.images is not None
    real = inputs.real_images
    if real is None and digests is not None:
        _check_no_padding(digests, cached)
    known = find_known(cached.digests, digests)
    if not known.covers_cache or digests is None:
        first = cached.num_images if real is not None and _padding_again(digests, real, cached) else 0
        rest = None if real is None else real[:, first:]
        return inputs, digests, Placement(first, real=rest, covers_cache=first > 0)
    if not inputs.pass_connector and inputs.images.shape[1] == 1:
        return *_without_tokens(inputs, digests, known.counts), Placement(real=real, covers_cache=True)
    num_images, per_image = inputs.images.shape[1], 1 if inputs.pass_connector else inputs.images.shape[2]
    if any(count % per_image for count in known.counts):
        raise ValueError(
            f"Expected `cross_attention_states` with images as large as the cached ones: each row has {known.counts} "
            f"cached tokens, got {per_image} tokens an image, which does not divide them."
        )
    counts = [count // per_image for count in known.counts]
    if _stand_in_order(counts, num_images, real, cached):
        first = cached.num_images
        return inputs, digests, Placement(first, None, None if real is None else real[:, first:], None, True)
    return inputs, digests, _row_by_row(counts, num_images, real, cached)


def _padding_again(digests: Digests | None, real: torch.Tensor, cached: ImageLayout) -> bool:
    """Whether the cache holds only padding images, and the call starts with the same ones."""
    if digests is None or cached.image_mask is None or bool(cached.image_mask.any()):
        return False
    again = same_padding(cached.digests, digests)
    return again.shape[1] == cached.num_images and bool((again & ~real[:, : cached.num_images]).all())


def _check_no_padding(digests: Digests, cached: ImageLayout) -> None:
    """Raises a `ValueError` if a padding image of the cache comes again without a word on whether it is padding."""
    again = same_padding(cached.digests, digests)
    if bool(again.any()):
        row, image = again.nonzero()[0].tolist()
        raise ValueError(
            f"Expected `{digests.of}` with `image_mask`, got none: image {image} of row {row} is padding in "
            "`cache` and comes again. False: it is padding as before. True: it is a new image, which only "
            "the text from now on may see."
        )


def _row_by_row(counts: list[int], num_images: int, real: torch.Tensor | None, cached: ImageLayout) -> Placement:
    """Finds the new images of each row, padded to the largest number."""
    if len(set(cached.sizes)) > 1:
        raise ValueError(
            "Expected images at the same positions as in `cache`, because they have different numbers of "
            f"tokens ({list(cached.sizes)}). Pass only the new images."
        )
    given = torch.ones(len(counts), num_images, dtype=torch.bool) if real is None else real.cpu()
    held = torch.ones(len(counts), cached.num_images, dtype=torch.bool)
    if cached.image_mask is not None:
        if cached.image_mask.shape[0] != len(counts):
            raise ValueError(
                f"Expected only the new images, because the `image_mask` of `cache` hides different images from text "
                f"rows that share an image row (it is {tuple(cached.image_mask.shape)} for {len(counts)} image rows), "
                f"got {num_images} images that begin with the cached ones. Pass the new images alone, or none."
            )
        held = cached.image_mask.cpu()
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
    """Whether the cached images have the same positions in the cache and in the call."""
    first = cached.num_images
    if first > num_images:
        return False
    mine = torch.ones(len(counts), first, dtype=torch.bool) if real is None else real[:, :first].cpu()
    theirs = torch.ones_like(mine) if cached.image_mask is None else cached.image_mask.cpu()
    rows = max(mine.shape[0], theirs.shape[0])
    return torch.equal(rows_to(mine, rows), rows_to(theirs, rows))


def _without_tokens(inputs: ImageInputs, digests: Digests, counts: list[int]) -> tuple[ImageInputs, Digests]:
    """Removes the cached tokens, which come first, from features without an image axis."""
    given = digests.real_or_all().any(dim=1).tolist()
    wanted = {count for count, some in zip(counts, given) if some}
    if len(wanted) > 1:
        raise ValueError(
            "Expected `cross_attention_states` to start with the same number of cached tokens in every row, got "
            f"{counts}."
        )
    assert inputs.images is not None
    first = wanted.pop() if wanted else 0
    real = None if digests.real is None else digests.real[:, first:]
    rest = replace(digests, values=digests.values[:, first:], real=real, sizes=(digests.values.shape[1] - first,))
    return replace(inputs, images=inputs.images[:, :, first:]), rest


def check_known_mask(name: str, given: torch.Tensor, cached: ImageLayout, has_text: bool = True) -> None:
    """Raises a `ValueError` if a mask contradicts the cache about cached images. Padding tokens are not compared.

    Args:
        given (`torch.BoolTensor`): `(rows, num_images)` for `image_mask`, `(rows, N)` for `cross_attention_mask`.
        has_text (`bool`): whether text has seen the images. Until then a mask may hide more.
    """
    by_image = name == "image_mask"
    size = cached.num_images if by_image else cached.num_tokens
    if given.shape[1] != size:
        raise ValueError(
            f"Expected `{name}` for the {size} {'images' if by_image else 'image tokens'} in `cache`, got "
            f"{tuple(given.shape)}."
        )
    own = cached.image_mask if by_image else cached.token_mask
    own = torch.ones_like(given) if own is None else own
    rows = max(given.shape[0], own.shape[0])
    given, own = rows_to(given, rows).to(own.device), rows_to(own, rows)
    if not by_image and cached.image_mask is not None:
        given = given & rows_to(cached.image_mask, rows)[:, cached.image_of_token]
    differs = given ^ own if has_text else given & ~own
    if (has_text or has_values(differs)) and differs.any():
        row = int(differs.any(dim=1).nonzero()[0])
        why = "the cached text has seen them with that mask" if has_text else "what was padding then was not encoded"
        raise ValueError(
            f"Expected the same `{name}` for the images in `cache` as before, because {why}. In row {row}, "
            f"{int(differs[row].sum())} of {size} entries differ. Pass the same `{name}`, or none, or start from an "
            "empty cache."
        )
