"""The cache of a conversation: text in one half, images in the other half.

The cache is transformers' `EncoderDecoderCache` with three additions. They are needed because several text rows may
share an image row.

- The cache knows the number of text rows.
- It records what the text has seen of the images (`cache/text_progress.py`).
- If text rows are reordered or selected, their images follow.

A failed call leaves the cache as it was, or marks it as broken.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    EncoderDecoderCache,
)
from transformers.utils import logging

from ..utils.tensor_checks import type_name
from ..utils.transformers_api import DummyLayer, empty_dynamic_layers
from .cross_cache import CrossCache, is_empty
from .pytrees import UnexportedValue
from .text_progress import History, TextProgress


logger = logging.get_logger(__name__)

REMOVED = (
    "Expected no new images, because `cache` holds images of text that was removed (by `crop`, or a call "
    "that failed): a marker would show these images in the place of the new ones. Continue with a copy of the cache "
    "that was made before these images came, or pass all text and images to an empty cache."
)
LOST_MARKER = (
    "New images come into `cache` after `crop` has removed text with an image marker. The images of that text are "
    "still in the cache. The next markers show these images and not the new ones, unless the call passes these images "
    "again. Continue with a copy of the cache that was made before these images came, or pass all text and images to "
    "an empty cache."
)
REMOVED_PARTLY = (
    "Expected no new images, because `crop` has removed a part of the text that came with the images in `cache`, and "
    'with `image_visibility="all"` all text still sees these images. If the text is still about them, pass all images, '
    "those in `cache` first. Otherwise pass all text and its images to an empty cache."
)
BROKEN = (
    "An earlier call with `cache` failed and may have left a part of its text there. Start from an empty "
    "cache (`cache.reset()`, which drops its images, too)."
)
OF_BEAMS = (
    "`cache` comes from a beam search and cannot be continued: it holds the text of other beams than the returned "
    "ones. Take its images with `select_images(cache, [0])` and pass the whole text with them, or generate without "
    "beams."
)


class XAttnCache(EncoderDecoderCache):
    """An `EncoderDecoderCache` whose cross half holds images.

    Args:
        self_attention_cache (`Cache`): the text half, of any kind.
        cross_attention_cache ([`CrossCache`], *optional*): the images; empty by default.

    Attributes:
        progress ([`TextProgress`]): what the text has seen of the images.
        text_rows (`int`, *optional*): batch size of the cached text. None if there is no text yet.
        text_length (`torch.LongTensor`, *optional*): number of cached text tokens. Only set if the text half does not
            know this number.
        text_padding (`torch.LongTensor`, *optional*): `(B or 1, 1)`, number of padding tokens among them. The position
            encoding of the blocks needs it.
        broken (`str`, *optional*): the error for the next call, if the cache cannot be continued: a call has failed
            and its text cannot be removed, or a beam search has ended. None if the cache is intact.
    """

    cross_attention_cache: CrossCache

    def __init__(self, self_attention_cache: Cache, cross_attention_cache: CrossCache | None = None):
        super().__init__(self_attention_cache, CrossCache() if cross_attention_cache is None else cross_attention_cache)
        self._begin()

    def _begin(self) -> None:
        self.progress = TextProgress(history=History(None, (), 0))
        self._rows: UnexportedValue[int | None] = UnexportedValue(None)
        # The text positions at which the text of the last images begins and ends.
        self._images_at: UnexportedValue[tuple[int, int]] = UnexportedValue((-1, 0))
        self._lost_marker = False  # whether text with an image marker was removed
        self.text_length: torch.Tensor | None = None
        self.text_padding: torch.Tensor | None = None
        self.broken: str | None = None

    @classmethod
    def adopt(cls, cache: EncoderDecoderCache) -> XAttnCache:
        """Turns a caller's `EncoderDecoderCache` into an [`XAttnCache`].

        This changes the object in place, because the caller passes the same object to the next call.

        The cross half is replaced by a [`CrossCache`]. The caller's own cross half would be reordered with the beams,
        or would have the length of the text or of a sliding window.

        Raises:
            TypeError: for anything but an `EncoderDecoderCache`.
            ValueError: for a subclass of `EncoderDecoderCache`, or if another model has filled the cross half.
        """
        if isinstance(cache, XAttnCache):
            return cache
        if not isinstance(cache, EncoderDecoderCache):
            raise TypeError(
                f"Expected `cache` to be an `EncoderDecoderCache`, got {type_name(cache)}. Pass "
                "`EncoderDecoderCache(DynamicCache(), DynamicCache())`."
            )
        if type(cache) is not EncoderDecoderCache:
            raise ValueError(
                f"Expected `cache` to be an `EncoderDecoderCache`, got its subclass {type(cache).__name__}. "
                "Pass `EncoderDecoderCache(DynamicCache(), DynamicCache())`."
            )
        cross = cache.cross_attention_cache
        if not is_empty(cross):
            raise ValueError(
                "Expected `cache.cross_attention_cache` to be empty or filled by this model, got "
                f"{len(cross.layers)} layers of {type(cross.layers[0]).__name__}."
            )
        vars(cache).update(vars(cls(cache.self_attention_cache)))
        cache.__class__ = cls  # The class comes last: Ctrl-C must not leave a cache of this class without its state.
        assert isinstance(cache, XAttnCache)
        return cache

    @property
    def text_rows(self) -> int | None:
        note = self._rows
        return note.value if hasattr(note, "value") else _rows_of_text(self.self_attention_cache)

    @text_rows.setter
    def text_rows(self, rows: int | None) -> None:
        self._rows = UnexportedValue(rows)

    def note_images(self, text_len: int, coming: int = 0) -> None:
        """Records that images came with the last `text_len` text tokens, and with the next `coming` tokens.

        Images of `encode_images` come without a text. They count as part of the text before them, so they stay when
        later text is removed.
        """
        for index in range(len(self.cross_attention_cache.layers)):
            self.is_updated[index] = True  # transformers reads from this that the cross half is filled
        if not self.is_stateful() and not torch.compiler.is_compiling():
            length = int(self.get_seq_length())
            self._images_at = UnexportedValue((length - text_len, length + coming))

    def check_images_read(self, all_see: bool) -> None:
        """Checks that the text of the last images is still there, before new images come.

        Warns if a marker of an image was removed.

        Args:
            all_see (`bool`): whether all text sees all images.

        Raises:
            ValueError: if the text of the last images was removed. With `all_see` also if a part of it was removed.
        """
        if self.is_stateful() or torch.compiler.is_compiling():
            return
        length = int(self.get_seq_length())
        start, end = getattr(self._images_at, "value", (-1, 0))
        if length <= start:
            raise ValueError(REMOVED)
        if all_see and length < end:
            raise ValueError(REMOVED_PARTLY)
        if self._lost_marker or self._removes_markers(length):
            logger.warning_once(LOST_MARKER)

    def _removes_markers(self, length: int) -> bool:
        """Whether the text after the first `length` tokens has image markers that count."""
        history = self.progress.known_history
        return history is not None and history.counted is not None and bool(history.counted[:, length:].any())

    def check_usable(self, batch_size: int, text_len: int) -> None:
        """Raises a `ValueError` if the cache is broken, or if its rows do not fit the rows of the new text."""
        if self.broken:
            raise ValueError(self.broken)
        seen = self.progress.counts is not None or self.progress.held is not None
        if text_len > 1 and seen and not (self.can_be_cropped or self.is_stateful() or torch.compiler.is_compiling()):
            if int(self.get_seq_length()) == 0:  # the caller has reset a static text half alone, so its text is gone
                self.progress = TextProgress(coming=self.progress.coming)
        text_rows = self.text_rows
        if text_rows is not None and batch_size != text_rows:
            raise ValueError(
                f"Expected text of batch {text_rows}, as in `cache`, got {batch_size}. To continue with "
                "other rows, call `cache.batch_select_indices` or `cache.batch_repeat_interleave` first."
            )
        image_rows = self.cross_attention_cache.rows
        if image_rows and batch_size % image_rows:
            raise ValueError(
                f"Expected a text batch that is a multiple of {image_rows}, the number of image rows in "
                f"`cache`, got {batch_size}. To choose the image row of each text, call `select_images`."
            )

    @property
    def offloads(self) -> bool:
        """Whether keys and values are offloaded to the host."""
        return bool(getattr(self.self_attention_cache, "offloading", False))

    def is_stateful(self) -> bool:
        """Whether the text half holds only recurrent states (state-space decoders).

        Such a text half does not know the length of the text.
        """
        for layer in self.self_attention_cache.layers:
            if isinstance(layer, CacheLayerMixin):
                return False
        return len(self.self_attention_cache.layers) > 0

    @property
    def is_linear(self) -> list[bool]:
        """As in transformers, but False for all layers of a cache that holds only recurrent states.

        transformers 5.24 would read the whole text again beside such a cache, because the cache has no length.
        """
        return [False] * len(self.self_attention_cache.layers) if self.is_stateful() else super().is_linear

    def get_seq_length(self, layer_idx: int = 0) -> Any:
        if self.is_stateful():
            return 0 if self.text_length is None else self.text_length
        return super().get_seq_length(layer_idx)

    def count_text(self, text_len: int, device: torch.device, positions: torch.Tensor | None) -> None:
        """Counts text tokens, for a text half that does not count them.

        The count is a tensor, because compiled code would be compiled again for each value of an integer. Decoders
        with such a text half get no mask after the prompt, so the padding of the prompt is also recorded here.

        Args:
            text_len (`int`): number of new text tokens.
            device (`torch.device`): device of the count.
            positions (`torch.LongTensor`, *optional*): `(B or 1, T)`, positions of the new text. None if the blocks
                have no position encoding, so that no padding is recorded.
        """
        if self.text_length is None:
            self.text_length = torch.zeros((), dtype=torch.long, device=device)
        self.text_length = self.text_length + text_len
        if positions is not None:
            self.text_padding = self.text_length - 1 - positions[:, -1:]

    @property
    def can_be_cropped(self) -> bool:
        """Whether text can be removed from the end of the text half."""
        return isinstance(self.self_attention_cache, DynamicCache) and not self.is_stateful()

    def current_progress(self) -> TextProgress:
        """Returns the progress for the present length of the text half, which `crop` may have shortened."""
        if not self.can_be_cropped:
            return self.progress if self.progress.history is None else replace(self.progress, history=None)
        return self.progress.at(self.get_seq_length())

    def leave_graph(self) -> None:
        """Copies what the last call has recorded about the text.

        A CUDA graph of that call overwrites its results when it runs again. A cache that can be cropped is never part
        of a CUDA graph, so this does nothing for it.
        """
        if self.can_be_cropped:
            return
        self.progress = self.progress.copied()
        if self.text_length is not None:
            self.text_length = self.text_length.clone()
        if self.text_padding is not None:
            self.text_padding = self.text_padding.clone()

    def _take_text_rows(self, indices: torch.Tensor, may_share: bool) -> None:
        """Selects the images and the progress of the text rows `indices`.

        Args:
            may_share (`bool`): whether text rows may continue to share image rows.
        """
        rows = self.cross_attention_cache.rows
        batch_size = self.text_rows or rows
        if not batch_size:
            return
        if indices.dtype == torch.bool:
            indices = indices.nonzero()[:, 0]
        self.progress = self.progress.take(indices, batch_size)
        if self.text_padding is not None:
            self.text_padding = self.text_padding.expand(batch_size, 1)[indices]
        self.text_rows = indices.shape[0]
        if not rows:
            return
        cross, count = self.cross_attention_cache, indices.shape[0]
        wanted = indices // (batch_size // rows)
        assert cross.layout is not None
        if may_share and cross.layout.mask_rows <= rows and count % rows == 0:
            kept = torch.arange(rows, device=wanted.device).repeat_interleave(count // rows)
            if rows == 1 or torch.equal(wanted, kept):  # Each text row stays with its image row.
                return
        cross.select(wanted, cross.layout.select_text_rows(indices, batch_size, rows))

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Reorders text rows, for beam search. Images are not copied if each beam stays within its sample."""
        self.self_attention_cache.reorder_cache(beam_idx)
        self._take_text_rows(beam_idx, may_share=True)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats text rows. The copies share the image rows."""
        self.check_dynamic_cache(self.batch_repeat_interleave.__name__)
        self.self_attention_cache.batch_repeat_interleave(repeats)
        batch_size = self.text_rows or self.cross_attention_cache.rows
        if batch_size:
            self.text_rows = batch_size * repeats
        if self.text_padding is not None and self.text_padding.shape[0] > 1:
            self.text_padding = self.text_padding.repeat_interleave(repeats, dim=0)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keeps the text rows `indices`. Each of them gets an image row of its own."""
        self.check_dynamic_cache(self.batch_select_indices.__name__)
        self.self_attention_cache.batch_select_indices(indices)
        self._take_text_rows(indices, may_share=False)

    def crop(self, tokens_to_remove: int) -> None:
        """Removes text from the end, and resets what the remaining text has seen of the images.

        Args:
            tokens_to_remove (`int`): as in transformers: the number of tokens to remove, as a negative number.

        Raises:
            ValueError: if the cache comes from an exported program, which does not keep what earlier text has seen.
        """
        if self.can_be_cropped and self.progress.known_history is None and not self.progress.is_blank:
            raise ValueError(
                "The text in `cache` cannot be cropped: the cache comes from an exported program, which does "
                "not keep what earlier text has seen of the images. Start from an empty cache."
            )
        super().crop(tokens_to_remove)
        if self.can_be_cropped:
            self._lost_marker = self._lost_marker or self._removes_markers(int(self.get_seq_length()))
            self.progress = self.current_progress()

    def reset(self) -> None:
        super().reset()
        empty_dynamic_layers(self.self_attention_cache)
        self._begin()


@contextlib.contextmanager
def whole_or_not_at_all(cache: XAttnCache | None) -> Iterator[None]:
    """Undoes a call if the body of the `with` statement raises: new images, new text, and what the text has seen.

    After an exception inside a forward, some layers of the text half hold the new text and others do not. If each of
    them can be cropped exactly, the text is removed. Otherwise the cache is marked as broken, and the next call with
    it raises an error.

    Under `torch.compile` there is nothing to undo: the body is one graph, which changes no state of Python if it
    fails.
    """
    if cache is None or torch.compiler.is_compiling():
        yield
        return
    images, length = copy.copy(cache.cross_attention_cache), cache.get_seq_length()
    length = length.clone() if isinstance(length, torch.Tensor) else length  # A static layer counts in place.
    text = (cache.progress, cache.text_rows, cache.text_length, cache.text_padding, dict(cache.is_updated))
    images_at = cache._images_at, cache._lost_marker
    try:
        yield
    except BaseException:
        cache.broken = BROKEN  # in case a second exception interrupts what follows
        cache.cross_attention_cache.take_over(images)
        cache._images_at, cache._lost_marker = images_at
        cache.progress, cache.text_rows, cache.text_length, cache.text_padding, cache.is_updated = text
        cache.broken = None if _crop_text(cache, int(length)) else BROKEN
        raise


def _crop_text(cache: XAttnCache, length: int) -> bool:
    """Removes the text after the first `length` tokens. Returns False if that is not possible."""
    if length or cache.is_stateful():  # Layers of recurrent states do not tell whether they held text.
        return all(_crop_layer(layer, length) for layer in cache.self_attention_cache.layers)
    cache.self_attention_cache.reset()
    empty_dynamic_layers(cache.self_attention_cache)
    return True


def _crop_layer(layer: Any, length: int) -> bool:
    if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):  # A subclass may hold more than `crop` removes.
        return isinstance(layer, DummyLayer)
    found = layer.get_seq_length()
    if found <= length:
        return True
    # Cropping is not exact after an update that stopped half-way, or if a sliding window has dropped its oldest tokens.
    is_whole = layer.keys.shape[-2] == layer.values.shape[-2] == found
    if is_whole:
        layer.crop(length - found)
    return is_whole


def _rows_of_text(cache: Cache) -> int | None:
    """Returns the batch size of the text in a cache. None if the cache holds no text."""
    for layer in cache.layers:
        for value in vars(layer).values():
            for tensor in value.values() if isinstance(value, dict) else (value,):
                if isinstance(tensor, torch.Tensor) and tensor.dim() > 1:
                    return tensor.shape[0]
    return None
