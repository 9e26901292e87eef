"""The cross-attention half of an `EncoderDecoderCache`: keys and values of images, projected once.

It differs from a self-attention cache in what its rows are. A row is an image row, not a text row: beams, return sequences
and many questions about one image share it, and attention folds them into one query axis. So a beam search reorders nothing
here (beams never leave their sample), and repeating the batch repeats nothing. Its length is the number of image tokens,
whatever the decoder's sliding window or the length of the text.
"""

from __future__ import annotations

import copy

import torch
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    EncoderDecoderCache,
    StaticCache,
)

from .visibility import ImageTokens


class CrossAttentionLayer(DynamicLayer):
    """Keys and values of one block.

    Tensors are only ever replaced, never written into, so that caches which share an image may share them.

    Attributes:
        keys, values (`torch.Tensor`): `(image rows, num_key_value_heads, num_image_tokens, head_dim)`.
        images ([`ImageTokens`]): what the tokens are; shared by the layers of a cache.
        repeats (`int`): text rows an image row.
    """

    is_compileable = True

    def __init__(self, **kwargs):
        super().__init__()
        self.images: ImageTokens | None = None
        self.repeats = 1

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
        """Appends images. Returns all keys and values."""
        if not self.is_initialized or self.keys.numel() == 0:
            self.dtype, self.device = key_states.dtype, key_states.device
            self.keys, self.values = key_states, value_states
            self.is_initialized = True
        else:
            self.keys = torch.cat([self.keys, key_states], dim=-2)
            self.values = torch.cat([self.values, value_states], dim=-2)
        return self.keys, self.values

    def reset(self) -> None:
        # Dropped, never zeroed: other caches may share the tensors.
        self.keys = self.values = None
        self.is_initialized = False
        self.images, self.repeats = None, 1

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Nothing to do: all beams of a sample look at the sample's image row."""

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.repeats *= repeats

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keeps the text rows `indices`; from here on each has an image row of its own."""
        if not self.is_initialized:
            return
        if indices.dtype == torch.bool:
            indices = indices.nonzero()[:, 0]
        rows = indices // self.repeats
        if self.images is not None:
            images, text_rows = self.images, self.keys.shape[0] * self.repeats
            self.images = images.select(rows)
            for name in ("text_mask", "markers_seen"):
                tensor = getattr(images, name)
                if tensor is not None and tensor.shape[0] == text_rows:
                    setattr(self.images, name, tensor[indices.to(tensor.device)])
        self.keys, self.values = self.keys[rows.to(self.keys.device)], self.values[rows.to(self.values.device)]
        self.repeats = 1


class StaticCrossAttentionCache(StaticCache):
    """Cross half beside a static self-attention half. Sized by the image tokens it holds, not by the text."""

    def __init__(self, layers: list[CrossAttentionLayer]):
        Cache.__init__(self, layers=layers)
        for layer in layers:
            if layer.is_initialized:
                # Read at every step of a CUDA graph: their address must not look like an input's.
                torch._dynamo.mark_static_address(layer.keys)
                torch._dynamo.mark_static_address(layer.values)


class XAttnCache(EncoderDecoderCache):
    """An `EncoderDecoderCache` that knows the length of its text also beside a state-space decoder, whose states do not
    tell it.

    Attributes:
        text_length (`int`): text tokens so far, counted by the model.
    """

    def __init__(self, *caches: Cache):
        super().__init__(*caches)
        self.text_length = 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        layers = getattr(self.self_attention_cache, "layers", [])
        if layers and not any(isinstance(layer, CacheLayerMixin) for layer in layers):
            return self.text_length
        return super().get_seq_length(layer_idx)

    def reset(self) -> None:
        super().reset()
        self.text_length = 0


class ImageCache(XAttnCache):
    """Images that were encoded once: an `EncoderDecoderCache` with an empty self-attention half.

    `generate(past_key_values=image_cache)` works on a fork and leaves this object as it is, so it can be asked again.
    """

    def fork(self, self_attention_cache: Cache) -> XAttnCache:
        """The same images, not copied, beside another self-attention half."""
        layers = [_share(layer) for layer in self.cross_attention_cache.layers]
        return XAttnCache(self_attention_cache, cross_cache_like(self_attention_cache, layers))


def cross_cache_like(self_attention_cache: Cache, layers: list[CrossAttentionLayer]) -> Cache:
    """A cross half of the kind of the self-attention half beside it: static or dynamic."""
    if isinstance(self_attention_cache, StaticCache):
        return StaticCrossAttentionCache(layers)
    cache = DynamicCache()
    cache.layers = layers
    return cache


def _share(layer: CrossAttentionLayer) -> CrossAttentionLayer:
    shared = copy.copy(layer)
    shared.images = copy.copy(layer.images)
    return shared


def encoded_images(cache: Cache | None) -> ImageTokens | None:
    """The images that the cross half of a cache holds; None where it is empty."""
    if cache is None or not cache.layers:
        return None
    return getattr(cache.layers[0], "images", None)


def image_rows(cache: Cache) -> int:
    """Number of image rows of a filled cross half."""
    return cache.layers[0].keys.shape[0]


def prepare_cross_cache(cache: Cache, num_blocks: int) -> None:
    """Gives an empty cache, also one the caller built, the layers that hold images.

    A caller's `DynamicCache()` would follow beams, and a `StaticCache(config)` is sized by text or by a sliding window;
    their containers stay, their empty layers are replaced.

    Raises:
        ValueError: where the cache was filled by something else.
    """
    if len(cache.layers) == num_blocks and all(isinstance(layer, CrossAttentionLayer) for layer in cache.layers):
        return
    if any(layer.is_initialized for layer in cache.layers):
        raise ValueError(
            f"`past_key_values.cross_attention_cache` was filled by another model: it has {len(cache.layers)} layers of "
            f"{type(cache.layers[0]).__name__}, this model has {num_blocks} cross-attention blocks."
        )
    cache.layers = [CrossAttentionLayer() for _ in range(num_blocks)]


def check_cross_cache(cache: Cache, num_blocks: int, num_key_value_heads: int, head_dim: int, batch_size: int) -> None:
    """Raises a `ValueError` where a filled cross half does not fit the model or the text's batch."""
    if len(cache.layers) != num_blocks:
        raise ValueError(
            f"`past_key_values` holds images for {len(cache.layers)} cross-attention blocks, this model has {num_blocks}."
        )
    rows, heads, _, width = cache.layers[0].keys.shape
    # Under tensor parallelism a rank holds some of the heads.
    if num_key_value_heads % heads or width != head_dim:
        raise ValueError(
            f"`past_key_values` holds images of another model: {heads} K/V heads of width {width}, this model has "
            f"{num_key_value_heads} of width {head_dim}."
        )
    if batch_size % rows:
        raise ValueError(
            f"`past_key_values` holds {rows} image rows, which {batch_size} text rows cannot share evenly: the batch must "
            f"be a multiple of {rows}."
        )


def write_key_value(
    cache: Cache, layer_idx: int, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Appends a block's keys and values. Returns all of the block's."""
    return cache.layers[layer_idx].update(key, value)


def read_key_value(cache: Cache, layer_idx: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A block's keys and values. An offloading cache brings them from the host and keeps them there."""
    layer = cache.layers[layer_idx]
    if layer.keys.device != layer.device:
        return layer.keys.to(layer.device, non_blocking=True), layer.values.to(layer.device, non_blocking=True)
    return layer.keys, layer.values
