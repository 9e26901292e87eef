"""Restores a cache if a call fails.

After an exception inside a forward (out of memory, an interrupt, a hook that raises), some layers of the text half hold the new text and
others do not. A retry would append the text to some layers twice. So a forward records what it needs to remove the text again: lengths
for layers that grow by concatenation, and the tensors of sliding windows, which drop their oldest entries. Nothing is copied.

States of state-space layers, quantized layers and full static windows are overwritten in place. They can be restored only if they were
empty before. Otherwise the cache is marked as broken, and the next call that uses it raises an error.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from transformers.cache_utils import (
    Cache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionCacheLayerMixin,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from ..utils.transformers_api import BaseQuantizedLayer
from .xattn_cache import XAttnCache


BROKEN = (
    "An earlier call with `past_key_values` failed, and its {} cannot be restored to the text before that call. Start from an empty cache "
    "(`past_key_values.reset()`)."
)


@contextlib.contextmanager
def whole_or_not_at_all(cache: XAttnCache | None) -> Iterator[None]:
    """Restores a cache if the body of the `with` statement raises.

    Under `torch.compile` there is nothing to restore: the body is one graph, and its failure does not change Python's state.
    """
    if cache is None or torch.compiler.is_compiling():
        yield
        return
    images, text = cache.cross_attention_cache.state(), _TextMark(cache)
    length, padding = cache.text_length, cache.text_padding
    conversation = (cache.progress, cache.text_rows, length, padding, dict(cache.is_updated))
    try:
        yield
    except BaseException:
        cache.cross_attention_cache.restore(images)
        cache.progress, cache.text_rows, cache.text_length, cache.text_padding, cache.is_updated = conversation
        cache.broken = text.take_back(cache.self_attention_cache)
        raise


class _TextMark:
    """The state of the text half before a call."""

    def __init__(self, cache: XAttnCache):
        text = cache.self_attention_cache
        self.num_layers = len(text.layers)
        length = cache.get_seq_length()
        self.length = length.clone() if isinstance(length, torch.Tensor) else length
        self.sliding = {
            index: (layer.keys, layer.values, layer.cumulative_length)
            for index, layer in enumerate(text.layers)
            if isinstance(layer, DynamicSlidingWindowLayer)
        }

    def take_back(self, text: Cache) -> str | None:
        """Restores the layers. Returns a reason if that is impossible, and None otherwise."""
        broken = None
        for index, layer in enumerate(text.layers[: self.num_layers]):
            broken = self._take_back_layer(index, layer) or broken
        if text.layer_class_to_replicate is not None:  # layers that are created when they are first written
            del text.layers[self.num_layers :]
        return None if broken is None else BROKEN.format(broken)

    def _take_back_layer(self, index: int, layer: Any) -> str | None:
        has_keys = isinstance(layer, (DynamicLayer, StaticLayer))  # a hybrid layer has keys and a state
        if isinstance(layer, LinearAttentionCacheLayerMixin):
            broken = None
            if any(layer.has_previous_state.values()):
                if self._had_text():
                    broken = "state-space layers"
                else:
                    LinearAttentionCacheLayerMixin.reset(layer)
            if has_keys:
                broken = self._take_back_keys(index, layer) or broken
            return broken
        return self._take_back_keys(index, layer)

    def _take_back_keys(self, index: int, layer: Any) -> str | None:
        if isinstance(layer, DynamicSlidingWindowLayer):
            layer.keys, layer.values, layer.cumulative_length = self.sliding[index]
            layer.is_initialized = layer.keys is not None
        elif isinstance(layer, BaseQuantizedLayer):
            return self._reset(layer)
        elif isinstance(layer, DynamicLayer):
            _cut(layer, int(self.length))
        elif isinstance(layer, StaticSlidingWindowLayer):
            length = int(self.length)
            if length and layer.cumulative_length_int != length and layer.cumulative_length_int > layer.max_cache_len:
                return "full static windows"
            layer.cumulative_length_int = length
            layer.cumulative_length.fill_(length)
        elif isinstance(layer, StaticLayer):  # nothing behind its length is read
            for name in ("cumulative_length", "indexer_cumulative_length"):
                if (counter := getattr(layer, name, None)) is not None:
                    counter.fill_(self.length)
        elif hasattr(layer, "keys"):
            return self._reset(layer)
        return None

    def _reset(self, layer: Any) -> str | None:
        if self._had_text():
            return f"{type(layer).__name__}s"
        layer.reset()
        return None

    def _had_text(self) -> bool:
        return bool(self.length)


def _cut(layer: Any, length: int) -> None:
    if layer.is_initialized:
        layer.keys, layer.values = layer.keys[..., :length, :], layer.values[..., :length, :]
    # Of sparse attention. Keys and indexer keys are written one after the other, so only one of them may be too long.
    if getattr(layer, "indexer_keys", None) is not None:
        layer.indexer_keys = layer.indexer_keys[:, :length]
    if getattr(layer, "indexer_position_ids", None) is not None:
        layer.indexer_position_ids = layer.indexer_position_ids[..., :length]
