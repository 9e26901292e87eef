"""Compares the images of a call with those of the cache, and encodes the new ones.

A chat client passes all images again in every turn. Cached images must not be encoded twice, and a new image must not
be mistaken for a cached one. So a call with a cache may pass one of these:

- All images of the cache, in every row, each in its old slot and with the same padding, followed by new images. An
  image after those of the cache is new, even if it has the same content as one of them.
- Only new images: no image is equal to a cached image of its row.
- No images.

Anything else is refused. Images of another form than all cached images (such as features, if pixels are cached) cannot
be compared, so all of them are new. Features without an image axis, `(batch, num_image_tokens, context_size)`, count as
one image, whose first tokens are compared.

The masks of a call may cover all images or only the new ones, and the whole text or only the text of the call.
[`read_images`] returns the new images, a layout of all images, and a mask for the text of the call.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from transformers.utils import logging

from ..cache.cross_cache import CrossCache
from ..cache.digests import Digests
from ..cache.image_layout import ImageLayout, rows_to
from ..cache.pytrees import dataclass_node
from ..cache.text_progress import CallersMask, TextProgress
from ..cache.xattn_cache import XAttnCache
from ..utils.tensor_checks import has_values
from .image_encoder import FoundImages, ImageEncoder, ImageSource, without_padding_tokens
from .image_inputs import MASKS, NO_IMAGES, ImageAxis, ImageInputs


logger = logging.get_logger(__name__)

UNSEEN = (
    "The text in `cache` was read before the new images came, so it has not seen them. Without a cache, all text would "
    "see them, because of `image_visibility='all'`. For the same answers, read the whole text with an empty cache."
)
SEND = (
    "Pass only the new images, or all images of the conversation from the first on, in their order and with their old "
    "padding (`image_mask`), followed by the new images."
)


class TextOfCall(NamedTuple):
    """The text that the images of a call belong to."""

    rows: int | None  # batch size of the text; None if images are encoded without a text
    new: int  # number of tokens that the cache does not hold
    cached: int = 0  # number of cached tokens, which a mask of the caller may also cover
    packed: Any = None  # the samples of packed rows; None if no row is packed
    markers: torch.Tensor | None = None  # `(B, T)`, markers of the new text; None if unknown, or if they decide nothing


class NewImages(NamedTuple):
    """Images that a cache does not hold yet."""

    layout: ImageLayout
    states: torch.Tensor | None  # `(R, N, context_size)`
    stored: FoundImages | None = None  # in place of `states`, if a source knows the images


class ImagesOfCall(NamedTuple):
    """Images and mask of a call, next to those of the cache."""

    new: NewImages | None  # images that the cache does not hold
    layout: ImageLayout | None  # layout of all images, the cached ones first; None if there are no images
    mask: CallersMask | None  # the caller's mask for the text that follows
    rows: torch.Tensor | None = None  # see [`ImageInputs.rows_of_text`]
    zero: torch.Tensor | None = None  # see [`XAttnImagesMixin.zero_of_others`]
    unseen: bool = False  # whether these are images that no text sees (see [`XAttnImagesMixin.images_of_nobody`])
    ready: CrossCache | None = None  # keys and values, if nothing has to be computed


@dataclass_node
@dataclass(eq=False)
class PreparedImages:
    """Images that `generate` has encoded once, for decoding without a cache of text."""

    cross: CrossCache  # keys and values; text rows share its rows
    mask: CallersMask | None  # the caller's mask for the first part of the text


def read_images(
    encoder: ImageEncoder,
    inputs: ImageInputs,
    cache: XAttnCache | None,
    text: TextOfCall,
    record_content: bool,
    source: ImageSource | None = None,
) -> ImagesOfCall:
    """Encodes the new images of a call, and extends its masks to all images. The cache is not changed.

    Args:
        encoder ([`ImageEncoder`]): Encodes new images.
        inputs ([`ImageInputs`]): The images and masks of the call.
        cache ([`XAttnCache`], *optional*): The cache of the call.
        text ([`TextOfCall`]): The text that the images belong to.
        record_content (`bool`): Whether to take digests of the new images, by which a later call recognizes them.
        source ([`ImageSource`], *optional*): Where to look for images that were encoded in earlier calls.

    Raises:
        ValueError: if it is not clear which images are new, or if a mask contradicts the cache.
    """
    cross = None if cache is None else cache.cross_attention_cache
    cached = None if cross is None else cross.layout
    if inputs is NO_IMAGES:
        return ImagesOfCall(None, cached, None)
    inputs.check_rows(text.rows, 0 if cross is None else cross.rows)
    if cache is not None:  # it keeps the masks, and the caller may change theirs
        own = {name: mask.clone() for name in MASKS if (mask := getattr(inputs, name)) is not None}
        inputs = replace(inputs, **own)
    new = found = rows = None
    if inputs.images is None:
        assert cache is not None and cached is not None
        layout = _narrowed(encoder, cached, inputs, has_text=cache.text_rows is not None)
    else:
        inputs.check_device(inputs.images.device, "images")
        rows = None if inputs.image_rows is None else inputs.rows_of_text()
        if text.packed is not None and encoder.numbering is not None:
            inputs = encoder.numbering.in_samples(encoder.config, inputs, text.packed, rows)
        digests = encoder.digests(inputs) if record_content or cached is not None else None
        found = UncachedImages(inputs, digests) if cached is None else find_new(inputs, digests, cached)
        assert found.inputs.images is not None
        if cached is not None and 0 in found.inputs.images.shape:
            layout = cached
            if inputs.token_mask is not None:
                check_known_mask("cross_attention_mask", inputs.token_mask, cached)
        else:
            new = _encode(encoder, found, record_content, cached, source)
            if cache is not None and (cached is not None or cache.text_rows is not None):
                _check_place(encoder, inputs, found, new, cache, text)
            layout = new.layout if cached is None else cached.append(new.layout)
    if inputs.text_mask is None:
        return ImagesOfCall(new, layout, None, rows)
    if found is None:
        axes = [ImageAxis(layout.sizes, real=layout.image_mask if inputs.image_mask is None else None)]
    else:
        axes = found.axes(cached, () if new is None else new.layout.sizes)
    mask = inputs.callers_mask(axes, (text.new, text.new + text.cached))
    # The mask may also have rows for cached text, which has been read already.
    return ImagesOfCall(new, layout, mask if mask.text_len == text.new else mask.part(text.cached), rows)


def _encode(
    encoder: ImageEncoder,
    found: UncachedImages,
    record_content: bool,
    cached: ImageLayout | None,
    source: ImageSource | None,
) -> NewImages:
    real, given_mask = found.inputs.real_images, found.inputs.token_mask
    images = found.inputs
    if encoder.numbering is not None:
        images = encoder.numbering.in_row(images, real, cached)
    assert images.images is not None
    rows, num_images = images.images.shape[:2]
    if source is not None and given_mask is not None and not images.pass_connector:
        given = found.part_of(given_mask, num_images * images.images.shape[2], cached)
        shown = without_padding_tokens(images.images, given)
        # Finite padding stays as it is, so that the same features are found again if they come with another mask.
        images = replace(images, images=torch.where(images.images.isfinite(), images.images, shown))
    stored = None
    if source is not None:
        stored = source.read(images, real, encoder.dtype_of(images), encoder.features_of)
    if stored is None:
        features = encoder.features_of(images, real)
        tokens, device = features.shape[2], features.device
    else:
        tokens, device = stored.tokens, stored.device
    token_mask = None if real is None else real.repeat_interleave(tokens, dim=1)
    if images.tiles is not None:
        token_mask = images.tiles.token_mask(real, tokens)
    if given_mask is not None:
        given = found.part_of(given_mask, num_images * tokens, cached)
        both = max(given.shape[0], rows)
        token_mask = given if token_mask is None else rows_to(given, both) & rows_to(token_mask, both)
    content = (found.digests,) if record_content and found.digests is not None else None
    layout = ImageLayout.of((tokens,) * num_images, device, token_mask, real, content)
    if stored is not None:
        return NewImages(layout, None, stored)
    # Padding becomes zero even if only tokens without padding are projected later, because compiled code reads padding.
    features = features if token_mask is None else without_padding_tokens(features, token_mask)
    return NewImages(layout, features.flatten(1, 2))


def _check_place(
    encoder: ImageEncoder,
    inputs: ImageInputs,
    found: UncachedImages,
    new: NewImages,
    cache: XAttnCache,
    text: TextOfCall,
) -> None:
    """Checks new images that come to a cache with images or text.

    Warns of new images after text that was read without them.

    Raises:
        ValueError: if the text of earlier images was removed, or if their markers come again in the new text.
    """
    cached, all_see = cache.cross_attention_cache.layout, encoder.config.image_visibility == "all"
    if not found.again:
        cache.check_images_read(all_see)
    elif cached is not None and text.markers is not None and inputs.text_mask is None:
        check_markers(text.markers, cached, new.layout, cache.current_progress())
    if all_see and cache.text_rows is not None:
        if not torch.compiler.is_compiling() and int(cache.get_seq_length()):
            logger.warning_once(UNSEEN)


def _narrowed(encoder: ImageEncoder, cached: ImageLayout, inputs: ImageInputs, has_text: bool) -> ImageLayout:
    """Applies the masks of a call without images to the cached images.

    As long as no text is cached, the masks may hide more than before.
    """
    for name, given in (("image_mask", inputs.image_mask), ("cross_attention_mask", inputs.token_mask)):
        if given is not None:
            check_known_mask(name, given, cached, has_text)
    if has_text or (inputs.image_mask is None and inputs.token_mask is None):
        return cached
    if inputs.image_mask is not None and encoder.numbering is not None:
        encoder.numbering.check_hidden(inputs.image_mask, cached)
    return cached.narrowed(inputs.image_mask, inputs.token_mask)


class UncachedImages(NamedTuple):
    """The images of a call that a cache does not hold."""

    inputs: ImageInputs  # only the images that the cache does not hold; `token_mask` and `text_mask` of the call
    digests: Digests | None  # digests of these images
    first: int = 0  # index of the first new image in the call
    again: bool = False  # whether the call passes all images of the cache in front of the new ones

    def axes(self, cached: ImageLayout | None, new: tuple[int, ...]) -> list[ImageAxis]:
        """Returns the image axes that a mask may have: all images, or those of the call.

        `new` has the number of tokens of each new image.
        """
        if cached is None:
            return [ImageAxis(new)]
        if self.again:
            return [ImageAxis((*cached.sizes, *new))]
        return [ImageAxis((*cached.sizes, *new), real=cached.image_mask), ImageAxis(new, cached.num_tokens)]

    def part_of(self, mask: torch.Tensor, count: int, cached: ImageLayout | None) -> torch.Tensor:
        """Returns the part of a mask `(rows, tokens)` for `count` new tokens. The rest must agree with the cache."""
        known = 0 if cached is None else cached.num_tokens
        if mask.shape[1] == known + count:
            if cached is not None:
                check_known_mask("cross_attention_mask", mask[:, :known], cached)
            return mask[:, known:]
        if mask.shape[1] != count or self.again:
            sizes = sorted({known + count} if self.again else {count, known + count})
            raise ValueError(
                f"Expected `cross_attention_mask` of shape {' or '.join(str((mask.shape[0], size)) for size in sizes)} "
                f"(batch, num_image_tokens), got {tuple(mask.shape)}."
            )
        return mask


def find_new(inputs: ImageInputs, digests: Digests | None, cached: ImageLayout) -> UncachedImages:
    """Finds the images of a call that a cache does not hold, by the rule at the top of this file.

    Raises:
        ValueError: if images cannot be compared, or if the call passes only some of the cached images, or in another
            order.
    """
    if digests is None or cached.digests is None:
        raise ValueError(
            "Expected `cache` to hold images whose content was recorded, got a cache whose content was not recorded: "
            "it was filled in training, or combined from caches of different kinds. New images cannot be compared with "
            "such images. Start from an empty cache, or from a cache of `encode_images`."
        )
    known = next((part for part in cached.digests if part.of == digests.of), None)
    if known is None:
        return UncachedImages(inputs, digests)
    if known.dtype != digests.dtype:
        raise ValueError(
            f"Expected `{digests.of}` in {known.dtype}, the dtype of the images in `cache`, got {digests.dtype}. "
            "Images of different dtypes cannot be compared."
        )
    assert inputs.images is not None
    count, size = known.values.shape[1], digests.sizes[0]
    as_one = len(digests.sizes) == 1 and not inputs.pass_connector
    if (as_one or count % size == 0) and len(cached.digests) == 1 and _begins_with(digests, known, cached):
        rest, first = digests.behind(count, 0 if as_one else size), 0 if as_one else count // size
        cut = replace(inputs, image_mask=None if inputs.image_mask is None else inputs.image_mask[:, first:])
        of_images = inputs.each_image(lambda images: images[:, :, count:] if as_one else images[:, first:])
        return UncachedImages(replace(cut, images=of_images.images, tiles=of_images.tiles), rest, first, True)
    # If the call has no mask, a padding image of the cache that comes again would count as a real image.
    held, given = known.images(with_padding=inputs.real_images is None), digests.images()
    for row, (ours, theirs) in enumerate(zip(held, given)):
        if any(_is_part(image, b"".join(theirs)) for image in ours) or any(
            _is_part(image, b"".join(ours)) for image in theirs
        ):
            raise ValueError(
                f"Expected `{digests.of}` to hold all images of `cache` in their slots, followed by new images, or "
                f"only new images. In row {row} the cache holds {len(ours)} images, got {len(theirs)} images, of which "
                f"some are in the cache. {SEND}"
            )
    return UncachedImages(inputs, digests)


def _begins_with(given: Digests, known: Digests, cached: ImageLayout) -> bool:
    """Whether the images of a call begin with those of a cache in every row. `known` are the cache's digests."""
    values, count = known.values.cpu(), known.values.shape[1]
    if given.values.shape[1] < count:
        return False
    first, real = given.values[:, :count].cpu(), given.real_or_all()[:, :count].cpu()
    held = torch.ones(1, count, dtype=torch.bool)
    if cached.image_mask is not None:  # which may have more rows than the digests
        held = cached.image_mask.cpu().repeat_interleave(torch.tensor(known.sizes), dim=1)
    rows = max(len(real), len(held))
    return torch.equal(rows_to(real, rows), rows_to(held, rows)) and bool(((first == values) | ~real).all())


def _is_part(part: bytes, whole: bytes) -> bool:
    """Whether the 8-byte numbers in `part` occur in `whole`, one after another."""
    at = whole.find(part)
    while at != -1 and at % 8:
        at = whole.find(part, at + 1)
    return at != -1


def check_markers(markers: torch.Tensor, cached: ImageLayout, new: ImageLayout, progress: TextProgress) -> None:
    """Raises a `ValueError` if the new text has a marker for each image of the call, also for cached images.

    A new image would then be shown at the marker of a cached image, which the caller has sent once more.

    Args:
        markers (`torch.BoolTensor`): `(B, T)`, True at each marker of the new text.
        cached, new ([`ImageLayout`]): Layouts of the images in the cache, and of the new images of the call.
        progress ([`TextProgress`]): What the cached text has seen.
    """
    if progress.counts is None or not has_values(markers):
        return
    seen = progress.counts[:, 0]
    rows = max(len(seen), len(markers))
    found, seen, held, fresh = (
        rows_to(each.to(markers.device), rows) for each in (markers.sum(dim=-1), seen, cached.counts, new.counts)
    )
    wrong = (found == held + fresh) & (seen > 0) & (fresh > 0)
    if bool(wrong.any()):
        row = int(wrong.nonzero()[0])
        raise ValueError(
            f"Row {row}: expected one image marker in the new text for each image that has none yet "
            f"({int((held + fresh - seen)[row])}), got {int(found[row])}. The call passes {int(found[row])} images, of "
            f"which the first are those of `cache`, so they need no new marker. {SEND}"
        )


def check_known_mask(name: str, given: torch.Tensor, cached: ImageLayout, has_text: bool = True) -> None:
    """Raises a `ValueError` if a mask contradicts the cache about cached images. Padding tokens are not compared.

    Args:
        name (`str`): Name of the mask, `"image_mask"` or `"cross_attention_mask"`.
        given (`torch.BoolTensor`): `(rows, num_images)` for `image_mask`, `(rows, N)` for `cross_attention_mask`.
        cached ([`ImageLayout`]): Layout of the images in the cache.
        has_text (`bool`, defaults to `True`): Whether text has seen the images. Until then a mask may hide more.
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
