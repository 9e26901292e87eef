"""From image inputs to the source of keys and values: vision tower, connector, layout, and which images are new.

It knows the configuration, the tower and the connector, not the model around them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from .configuration_xattn import XAttnConfig
from .connector import XAttnConnector
from .digests import Digests, Known, digests_of, find_known
from .image_inputs import ImageInputs
from .image_layout import ImageLayout, rows_to
from .vision import Tiles, blank_image, run_tower, token_mask_of


@dataclass(frozen=True)
class NewImages:
    """Images that a cache does not hold yet.

    Attributes:
        states (`torch.Tensor`): `(R, N, context_size)`.
        layout ([`ImageLayout`]): what the N tokens are.
    """

    states: torch.Tensor
    layout: ImageLayout


class Reading(NamedTuple):
    """The images of a call, as far as they are new.

    Attributes:
        new ([`NewImages`], *optional*): None where the cache holds all of them.
        axes (`list[tuple]`): image axes that a caller's mask for each text token may have; see `ImageInputs.callers_mask`.
    """

    new: NewImages | None
    axes: list[tuple[tuple[int, ...], int]]


class _Slots(NamedTuple):
    """Which of the given images are new: from `first` on, or `index` `(R, count)` where rows differ; and which of them are real."""

    first: int
    index: torch.Tensor | None
    real: torch.Tensor | None
    as_given: bool  # images of the cache and new ones together are in the order in which they were given

    def take(self, tensor: torch.Tensor | None) -> torch.Tensor | None:
        """`(R, n, ...)`: what belongs to the new images."""
        if tensor is None:
            return None
        if self.index is None:
            return tensor[:, self.first :]
        return tensor[torch.arange(tensor.shape[0], device=tensor.device)[:, None], self.index.to(tensor.device)]


class ImageEncoder:
    """Reads images for one model.

    Args:
        config ([`XAttnConfig`]): the model's configuration.
        vision_tower (`PreTrainedModel`, *optional*), connector ([`XAttnConnector`], *optional*): None where the model takes features.
        find_like (`Callable`): gives a weight that keys and values are projected with: their device and dtype. Called only where it
            is needed, as it looks through the decoder.
    """

    def __init__(
        self,
        config: XAttnConfig,
        vision_tower: PreTrainedModel | None,
        connector: XAttnConnector | None,
        find_like: Callable[[], torch.Tensor],
    ):
        self.config = config
        self.vision_tower = vision_tower
        self.connector = connector
        self._find_like = find_like

    def features(self, pixel_values: torch.Tensor, tiles: Tiles | None = None) -> torch.Tensor:
        """`(R, num_images, ...)` pixels to `(R, num_images, tokens an image, context_size)`."""
        drop_first = self.config.vision_feature_select_strategy == "default"
        assert self.vision_tower is not None and self.connector is not None
        return run_tower(self.vision_tower, self.connector, pixel_values, tiles, drop_first)

    def read(self, inputs: ImageInputs, cached: ImageLayout | None, record_content: bool) -> Reading:
        """Encodes the images of a call that a cache does not hold yet.

        Args:
            inputs ([`ImageInputs`]): the call's.
            cached ([`ImageLayout`], *optional*): of the images in the cache.
            record_content (`bool`): take digests of the new images, so that they are known when they come again.

        Raises:
            ValueError: where it cannot be told which images are new, or a mask contradicts the cache.
        """
        if inputs.images is None:
            return Reading(None, [] if cached is None else [(cached.sizes, 0)])
        digests = self._digests(inputs) if record_content or cached is not None else None
        slots, covers_cache = _Slots(0, None, inputs.real_images, True), False
        if cached is not None:
            known = find_known(cached.digests, digests)
            covers_cache = known.covers_cache
            num_images, per_image = inputs.images.shape[1], 1
            if inputs.states is not None:
                per_image = inputs.states.shape[2]
            if covers_cache and inputs.states is not None and num_images == 1 and digests is not None:
                inputs, digests = _without_tokens(inputs, digests, known.counts)
            elif covers_cache:
                slots = _new_slots(known, num_images, per_image, inputs.real_images, cached)
        assert inputs.images is not None
        count = inputs.images.shape[1] - slots.first if slots.index is None else slots.index.shape[1]
        new = None
        if count and (inputs.states is None or inputs.states.shape[2]):
            new = self._encode(inputs, slots, digests if record_content else None, cached, covers_cache)
        elif inputs.token_mask is not None and cached is not None:
            check_known_mask("cross_attention_mask", inputs.token_mask, cached.token_mask, cached.num_tokens)
        return Reading(new, _axes(cached, new, covers_cache, slots.as_given))

    def _encode(
        self,
        inputs: ImageInputs,
        slots: _Slots,
        digests: Digests | None,
        cached: ImageLayout | None,
        covers_cache: bool,
    ) -> NewImages:
        if inputs.pixel_values is not None:
            tiles = inputs.tiles
            if tiles is not None:
                tiles = Tiles(*(slots.take(value) for value in tiles))
            pixels = slots.take(inputs.pixel_values)
            assert pixels is not None
            features = self.features(pixels, tiles)
        else:
            tiles, features = None, slots.take(inputs.states)
            assert features is not None
        rows, num_images, tokens = features.shape[:3]
        token_mask = token_mask_of(tiles, slots.real, tokens)
        given = inputs.token_mask
        if given is not None:
            count = num_images * tokens
            if cached is not None and given.shape[1] == cached.num_tokens + count and slots.as_given:
                check_known_mask("cross_attention_mask", given[:, :-count], cached.token_mask, cached.num_tokens)
                given = given[:, -count:]
            elif given.shape[1] != count or (covers_cache and cached is not None and cached.num_tokens):
                sizes = {count} if cached is None else {count, cached.num_tokens + count}
                raise ValueError(
                    f"Expected `cross_attention_mask` of shape {' or '.join(str((given.shape[0], size)) for size in sorted(sizes))} "
                    f"(batch, num_image_tokens), got {tuple(given.shape)}."
                )
            both = max(given.shape[0], rows)
            token_mask = given if token_mask is None else rows_to(given, both) & rows_to(token_mask, both)
        content = None if digests is None else (_of_slots(digests, slots, tokens, inputs.states is not None),)
        layout = ImageLayout.of((tokens,) * num_images, features.device, token_mask, slots.real, content)
        return NewImages(features.flatten(1, 2), layout)

    def _digests(self, inputs: ImageInputs) -> Digests:
        images, name = inputs.images, inputs.name
        assert images is not None and name is not None
        tower = self.vision_tower if name == "pixel_values" else None
        dtype = self._find_like().dtype if tower is None else tower.dtype
        if not dtype.is_floating_point:  # a quantized projection computes in the dtype of its input
            dtype = images.dtype
        ids = None if inputs.tiles is None else inputs.tiles.aspect_ratio_ids
        return digests_of(name, images, dtype, inputs.real_images, ids)

    def learns(self) -> bool:
        """Whether any weight that images pass wants a gradient."""
        parts = [part for part in (self.vision_tower, self.connector) if part is not None]
        return self._find_like().requires_grad or any(
            weight.requires_grad for part in parts for weight in part.parameters()
        )

    def placeholder(self, batch_size: int) -> NewImages:
        """An image that nobody sees. Lets a rank without images call every module that the others call, so that
        collectives match and all gradients exist."""
        like = self._find_like()
        if self.vision_tower is None:
            states = like.new_zeros(batch_size, 1, self.config.cross_attention_config.context_size)
        else:
            blank = blank_image(self.config.vision_config, like)
            states = self.features(*blank).flatten(1, 2).expand(batch_size, -1, -1)
        nothing = torch.zeros(states.shape[:2], dtype=torch.bool, device=states.device)
        return NewImages(states, ImageLayout.of((states.shape[1],), states.device, token_mask=nothing))


def check_known_mask(name: str, given: torch.Tensor, cached: torch.Tensor | None, size: int) -> None:
    """Raises a `ValueError` where a mask says other things of cached images than the cache."""
    if given.shape[1] != size:
        raise ValueError(f"`{name}` is for {given.shape[1]} images or tokens, but `past_key_values` holds {size}.")
    same = bool(given.all())
    if cached is not None:
        rows = max(given.shape[0], cached.shape[0])
        same = torch.equal(rows_to(given, rows), rows_to(cached, rows).to(given.device))
    if not same:
        raise ValueError(
            f"`{name}` differs from the one that the images in `past_key_values` came with, and the text in it has been read with that "
            f"one. Pass the same `{name}`, or none, or start from an empty cache."
        )


def _new_slots(known: Known, num_images: int, per_image: int, real: torch.Tensor | None, cached: ImageLayout) -> _Slots:
    """Which of the given images come after those that the cache holds."""
    if any(count % per_image for count in known.counts):
        raise ValueError(
            f"Expected the tokens of the cached images (of each row: {known.counts}) to be whole images of `cross_attention_states`, "
            f"got images of {per_image} tokens."
        )
    counts = [count // per_image for count in known.counts]
    if _same_slots(counts, num_images, real, cached):
        return _Slots(cached.num_images, None, None if real is None else real[:, cached.num_images :], True)
    if real is None and len(set(counts)) == 1:
        return _Slots(counts[0], None, None, False)
    mask = torch.ones(len(counts), num_images, dtype=torch.bool) if real is None else real.cpu()
    places = [row.nonzero()[count:, 0] for row, count in zip(mask, counts)]
    width = max(place.shape[0] for place in places)
    index = torch.zeros(len(places), width, dtype=torch.long)
    new = torch.zeros(len(places), width, dtype=torch.bool)
    for row, place in enumerate(places):
        index[row, : place.shape[0]] = place
        new[row, : place.shape[0]] = True
    return _Slots(num_images, index, new if real is None else new.to(real.device), False)


def _same_slots(counts: list[int], num_images: int, real: torch.Tensor | None, cached: ImageLayout) -> bool:
    """Whether the cached images have the places in the cache that they have among the given ones."""
    first = cached.num_images
    if first > num_images:
        return False
    mine = torch.ones(len(counts), first, dtype=torch.bool) if real is None else real[:, :first].cpu()
    theirs = torch.ones_like(mine) if cached.image_mask is None else cached.image_mask.cpu()
    rows = max(mine.shape[0], theirs.shape[0])
    return torch.equal(rows_to(mine, rows), rows_to(theirs, rows))


def _axes(
    cached: ImageLayout | None, new: NewImages | None, covers_cache: bool, as_given: bool
) -> list[tuple[tuple[int, ...], int]]:
    """Image axes that a caller's mask may have: all images, and those of the call."""
    before = () if cached is None else cached.sizes
    after = () if new is None else new.layout.sizes
    if covers_cache and before and not as_given:
        return []  # the caller's places of images are not the cache's
    axes = [((*before, *after), 0)]
    if before and not covers_cache:
        axes.append((after, sum(before)))
    return axes


def _without_tokens(inputs: ImageInputs, digests: Digests, counts: list[int]) -> tuple[ImageInputs, Digests]:
    """Features of one axis of tokens, without the first ones, which the cache holds."""
    if len(set(counts)) > 1:
        raise ValueError(
            f"Expected `cross_attention_states` to start with the same number of cached tokens in every row, got {counts}."
        )
    assert inputs.states is not None
    first = counts[0]
    real = None if digests.real is None else digests.real[:, first:]
    rest = Digests(digests.of, digests.dtype, digests.values[:, first:], real, (digests.values.shape[1] - first,))
    return replace(inputs, states=inputs.states[:, :, first:]), rest


def _of_slots(digests: Digests, slots: _Slots, tokens: int, of_tokens: bool) -> Digests:
    """The digests of the new images."""
    if not of_tokens:
        values = slots.take(digests.values)
        real = slots.real
    else:
        values = slots.take(digests.values.unflatten(1, (-1, tokens)))
        assert values is not None
        values = values.flatten(1)
        real = None if slots.real is None else slots.real.repeat_interleave(tokens, dim=1)
    assert values is not None
    per_image = tokens if of_tokens else 1
    return Digests(digests.of, digests.dtype, values, real, (per_image,) * (values.shape[1] // per_image))
