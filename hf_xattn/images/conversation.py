"""Compares the image inputs of a call with the cache of the conversation.

A call may pass images that the cache already holds, new images, or none. Its masks may cover all images or only the
new ones, and the whole text or only the text of the call. The result is: the images to encode, a layout of all images,
and a mask for the text of the call.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from transformers.utils import logging

from ..cache.cross_cache import CrossCache
from ..cache.image_layout import ImageLayout
from ..cache.pytrees import dataclass_node
from ..cache.text_progress import CallersMask
from ..cache.xattn_cache import XAttnCache
from .image_encoder import ImageEncoder, ImageSource, NewImages, StoredImages
from .image_inputs import ImageInputs
from .known_images import check_known_mask, check_markers


logger = logging.get_logger(__name__)

UNSEEN = (
    "New images come behind text in `cache`, which was read without them. With `image_visibility='all'` and "
    "without a cache all text sees them: read the whole text anew for the same answers."
)


class TextOfCall(NamedTuple):
    """The text that the images of a call belong to."""

    rows: int | None  # batch of the text; None if images are encoded without a text
    new: int  # tokens that the cache does not hold
    cached: int = 0  # cached tokens that a caller's mask may also cover
    packed: Any = None  # None if no row is packed
    markers: torch.Tensor | None = None  # `(B, T)` of the new text; None where they are unknown or decide nothing


class ImagesOfCall(NamedTuple):
    """Images and mask of a call, next to those of the cache."""

    new: NewImages | None  # images to encode
    layout: ImageLayout | None  # of all images, the cached ones first; None if there are no images
    mask: CallersMask | None  # the caller's decision for the text that follows
    stored: StoredImages | None = None  # in place of `new`, where a source knows the images
    rows: torch.Tensor | None = None  # see [`ImageInputs.rows_of_text`]
    zero: torch.Tensor | None = None  # of weights that other processes use (`XAttnImagesMixin.zero_of_others`)
    unseen: bool = False  # these are stand-in images that no text sees (`XAttnImagesMixin.images_of_nobody`)
    ready: CrossCache | None = None  # their keys and values, if nothing has to be computed

    @property
    def layout_of_text(self) -> ImageLayout:
        """The layout with masks in the rows of the text, or in fewer rows that the text shares in order."""
        assert self.layout is not None
        return self.layout if self.rows is None else self.layout.of_text(self.rows)


def read_images(
    encoder: ImageEncoder,
    inputs: ImageInputs,
    cache: XAttnCache | None,
    text: TextOfCall,
    record_content: bool,
    source: ImageSource | None = None,
) -> ImagesOfCall:
    """Encodes the new images of a call, and extends its masks to all images. The cache is not changed."""
    cross = None if cache is None else cache.cross_attention_cache
    cached = None if cross is None else cross.layout
    if inputs.is_empty:
        return ImagesOfCall(None, cached, None)
    inputs.check_rows(text.rows, 0 if cross is None else cross.rows)
    if cache is not None:
        inputs = inputs.with_own_masks()
    rows = None
    if inputs.images is not None:
        inputs.check_device(inputs.images.device, "images")
        rows = inputs.rows_of_text()
        if text.packed is not None and encoder.numbering is not None:
            inputs = encoder.numbering.in_samples(encoder.config, inputs, text.packed, rows)
    new, axes, again = encoder.read(inputs, cached, record_content, source)
    layout = cached
    if cache is not None and new is not None and inputs.images is not None:
        all_see = encoder.config.image_visibility == "all"
        if not again:
            cache.check_images_read(all_see)
        elif cached is not None and text.markers is not None and inputs.text_mask is None:
            check_markers(text.markers, cached, new.layout, cache.current_progress())
        if all_see and cache.text_rows is not None:
            if not torch.compiler.is_compiling() and int(cache.get_seq_length()):
                logger.warning_once(UNSEEN)
    if cached is not None and inputs.images is None:
        has_text = cache is not None and cache.text_rows is not None
        layout = _narrowed(encoder, cached, inputs, has_text)
    if new is not None:
        layout = new.layout if cached is None else cached.append(new.layout)
    mask = inputs.callers_mask(axes, (text.new, text.new + text.cached))
    if mask is not None and mask.text_len != text.new:  # the cached text has been read: its rows decide nothing
        mask = mask.rows_after(text.cached)
    if isinstance(new, StoredImages):
        return ImagesOfCall(None, layout, mask, new)
    return ImagesOfCall(new, layout, mask, rows=rows)


def _narrowed(encoder: ImageEncoder, cached: ImageLayout, inputs: ImageInputs, has_text: bool) -> ImageLayout:
    """Applies the masks of a call without images to the cached images. They may hide more, until text is cached."""
    for name, given in (("image_mask", inputs.image_mask), ("cross_attention_mask", inputs.token_mask)):
        if given is not None:
            check_known_mask(name, given, cached, has_text)
    if has_text or (inputs.image_mask is None and inputs.token_mask is None):
        return cached
    if inputs.image_mask is not None and encoder.numbering is not None:
        encoder.numbering.check_hidden(inputs.image_mask, cached)
    return cached.narrowed(inputs.image_mask, inputs.token_mask)


@dataclass_node
@dataclass(eq=False)
class PreparedImages:
    """Images that `generate` has encoded once, for decoding without a cache of text."""

    cross: CrossCache  # text rows share its rows
    mask: CallersMask | None  # the caller's decision for the first part of the text
