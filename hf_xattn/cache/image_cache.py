"""Encoded images: the cache that `encode_images` returns, and the selection of its rows.

Encoded images carry the identity of the model and the weights that encoded them (see `checkpoints/model_identity.py`).
`storage/image_files.py` writes encoded images to files, and combines those of several calls into one batch.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Sequence
from typing import Any, SupportsIndex

import torch
from transformers.cache_utils import Cache, EncoderDecoderCache

from ..utils.tensor_checks import check_integers, type_name
from ..utils.transformers_api import empty_all_layers
from .cross_cache import CrossCache
from .image_layout import ImageLayout
from .xattn_cache import XAttnCache


class ImageCache(XAttnCache):
    """Encoded images: an `EncoderDecoderCache` with an empty self-attention half.

    `generate(cache=image_cache)` uses a fork of the cache and does not change this object, so the images can be used
    again.

    Example:

    ```python
    >>> import hf_xattn
    >>> import torch
    >>> from transformers import AutoModelForImageTextToText

    >>> model = AutoModelForImageTextToText.from_pretrained("seeing")
    >>> with torch.no_grad():
    ...     images = model.encode_images(pixel_values=torch.rand(2, 3, 224, 224))  # two images, one a row
    >>> isinstance(images, hf_xattn.ImageCache), images.nbytes > 0
    (True, True)
    ```
    """

    @property
    def cache_dtype(self) -> str | None:
        """`"int8"`, or None if keys and values are in the dtype that the model computes in."""
        return self.cross_attention_cache.cache_dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the keys and values of all blocks."""
        return self.cross_attention_cache.nbytes

    def fork(self, self_attention_cache: Cache) -> XAttnCache:
        """Returns a cache with the same images and another self-attention half. The images are not copied."""
        return XAttnCache(self_attention_cache, self.cross_attention_cache.shared())


def select_images(cache: XAttnCache, rows: list[int] | torch.Tensor) -> ImageCache:
    """Returns the image rows `rows` of a cache, in that order. A row may be selected more than once.

    The cache of a conversation also works, if `forward` or `generate` has encoded its images. Such a cache does not
    record which weights encoded them, so [`save_image_cache`] refuses the result.

    Args:
        cache (`XAttnCache`): a cache with images.
        rows (`list[int]` or `torch.Tensor`): indices of image rows.

    Returns:
        [`ImageCache`]: the selected images, without text.

    Raises:
        TypeError: if `cache` is not a cache, or `rows` not a list or tensor of integers.
        ValueError: if the cache holds no images, or `rows` is empty or has more than one axis.
        IndexError: if the cache does not have a row.

    Example:

    ```python
    >>> import hf_xattn
    >>> import torch
    >>> from transformers import AutoModelForImageTextToText

    >>> model = AutoModelForImageTextToText.from_pretrained("seeing")
    >>> with torch.no_grad():
    ...     images = model.encode_images(pixel_values=torch.rand(2, 3, 224, 224))  # two images, one a row
    >>> second = hf_xattn.select_images(images, [1])
    >>> twice = hf_xattn.select_images(images, [0, 0])  # for two questions about the first image
    ```
    """
    cross, layout = images_of("cache", cache)
    count = cross.rows
    rows = _integers("rows", rows)
    if rows.dim() != 1 or rows.numel() == 0:
        raise ValueError(f"Expected `rows` to be a list of at least one row, got {rows.tolist()}.")
    if outside := [row for row in rows.tolist() if not 0 <= row < count]:
        raise IndexError(f"Expected `rows` from 0 to {count - 1}, the image rows of `cache`, got {outside}.")
    chosen = cross.shared()
    chosen.select(rows, layout.select(rows, count))
    return ImageCache(empty_like(cache.self_attention_cache), chosen)


def empty_like(cache: Cache) -> Cache:
    """Returns an empty text half of the same kind as `cache`, whose layers fit the decoder."""
    empty = copy.deepcopy(cache)
    empty.reset()
    empty_all_layers(empty)
    return empty


def images_of(name: str, cache: object) -> tuple[CrossCache, ImageLayout]:
    """Returns the image half of `cache` and its layout. Errors call the argument `name`.

    Raises:
        TypeError: for anything but a cache.
        ValueError: for a cache without images, or one whose masks differ between text rows of an image row.
    """
    if not isinstance(cache, EncoderDecoderCache):
        raise TypeError(f"Expected `{name}` to be a cache of `encode_images`, got {type_name(cache)}.")
    cross = cache.cross_attention_cache
    if not isinstance(cross, CrossCache) or cross.layout is None:
        raise ValueError(
            f"Expected `{name}` to be a cache of `encode_images`, got {type_name(cache)} that holds no images."
        )
    if cross.layout.mask_rows > cross.rows:
        raise ValueError(
            f"Expected `{name}` with one mask for each of its {cross.rows} image rows, got {cross.layout.mask_rows} "
            "masks: text rows that share an image row see different images. Encode the images again."
        )
    return cross, cross.layout


def _integers(name: str, values: Any) -> torch.Tensor:
    if isinstance(values, torch.Tensor):
        check_integers(name, values)
        return values.long()
    if not isinstance(values, Sequence) or isinstance(values, str):
        raise TypeError(f"Expected `{name}` to be a list of integers, got {type_name(values)}.")
    if not all(isinstance(value, SupportsIndex) and not isinstance(value, bool) for value in values):
        raise TypeError(f"Expected `{name}` to be a list of integers, got {list(values)!r}.")
    return torch.tensor([operator.index(value) for value in values], dtype=torch.long)


__all__ = ["ImageCache", "select_images"]
