"""The cross-attention half of an `EncoderDecoderCache`: keys and values of images, projected once.

The usual cross-attention cache has one row for each text row. A row of this cache is an image row instead. Beams,
return sequences and many questions about one image share an image row, and attention folds them into one query axis.
The length of this cache is the number of image tokens.

Either the cache is empty, or it holds keys and values for all blocks and the layout of the images. Only
[`CrossCache.fill`] adds images, for all blocks at once. Tensors are replaced and never written into, so several caches
can share the keys and values of an image. Keys and values are in the dtype of the model, or in another form (see
`cache/states.py`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import NoReturn

import torch
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from .image_layout import ImageLayout
from .pytrees import UnexportedValue
from .states import FORMS, States, StoredStates, concatenate, map_states


KeyValue = tuple[States, States]


class CrossAttentionLayer(DynamicLayer):
    """Keys and values of one block.

    Attributes:
        keys, values (`torch.Tensor`): `(image rows, num_key_value_heads, num_image_tokens, head_dim)`. With
            `quiet_softmax`, the null key comes before the image tokens. If `cache_dtype` is given, these are the steps
            of [`StoredStates`].
        key_scales, value_scales (`torch.FloatTensor`, *optional*): the scales of these steps.
        cache_dtype (`str`, *optional*): name of the form in which keys and values are stored. None means the dtype
            that the model computed in.
        dtype (`torch.dtype`): dtype of the keys and values that attention receives.
        device (`torch.device`): device on which the block runs.
    """

    keys: torch.Tensor
    values: torch.Tensor
    is_compileable = True

    def __init__(self, key: States, value: States):
        super().__init__()
        self.dtype, self.device = key.dtype, key.device
        self.key_scales: torch.Tensor | None = None
        self.value_scales: torch.Tensor | None = None
        self.cache_dtype: str | None = None
        if isinstance(key, StoredStates) and isinstance(value, StoredStates):
            self.keys, self.key_scales, self.cache_dtype = key.steps, key.scales, key.form
            self.values, self.value_scales = value.steps, value.scales
        else:
            self.keys, self.values = key, value  # type: ignore[assignment]  # both are tensors
        self.is_initialized = True

    @property
    def tensors(self) -> list[torch.Tensor]:
        every = (self.keys, self.values, self.key_scales, self.value_scales)
        return [tensor for tensor in every if tensor is not None]

    def _change(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.keys, self.values = change(self.keys), change(self.values)
        if self.key_scales is not None and self.value_scales is not None:
            self.key_scales, self.value_scales = change(self.key_scales), change(self.value_scales)

    def update(self, *args, **kwargs) -> NoReturn:
        raise RuntimeError(
            "Images cannot be added to one layer. The model adds them to all blocks at once, with `CrossCache.fill`."
        )

    def stored(self) -> KeyValue:
        """Returns keys and values on the device and in the form in which they are stored."""
        if self.cache_dtype is None or self.key_scales is None or self.value_scales is None:
            return self.keys, self.values
        form = FORMS[self.cache_dtype]
        return form(self.keys, self.key_scales, self.dtype), form(self.values, self.value_scales, self.dtype)

    def read(self) -> KeyValue:
        """Returns keys and values on the block's device. If they are offloaded, a copy is returned."""
        if self.keys.device == self.device:
            return (self.keys, self.values) if self.cache_dtype is None else self.stored()
        key, value = (map_states(states, self._to_block) for states in self.stored())
        return key, value

    def select(self, rows: torch.Tensor) -> CrossAttentionLayer:
        """Returns the image rows `rows`, in that order."""
        chosen = copy.copy(self)
        chosen._change(lambda tensor: tensor[rows.to(tensor.device)])
        return chosen

    def offload(self) -> None:
        self._change(lambda tensor: tensor.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        self._change(self._to_block)

    def _to_block(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.device, non_blocking=True)


class CrossCache(DynamicCache):
    """The images of a batch, for all blocks.

    Attributes:
        layers (`list[CrossAttentionLayer]`): one for each block. Empty if there are no images.
        layout ([`ImageLayout`], *optional*): describes the image tokens. None if there are no images.
        made_by (`str`, *optional*): identity of the model and the weights that encoded the images (see
            `checkpoints/model_identity.py`).
        read_by (`str`, *optional*): identity of the `adapter_only=True` folder from which the model was loaded that
            has read the images with a text. Empty if the model does not come from such a folder. None if no text has
            been read with the images yet.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers: list[CrossAttentionLayer] = []  # type: ignore[assignment]  # of any kind there
        self.layout: ImageLayout | None = None
        self._maker: UnexportedValue[str | None] = UnexportedValue(None)
        self._reader: UnexportedValue[str | None] = UnexportedValue(None)

    @property
    def made_by(self) -> str | None:
        return getattr(self._maker, "value", None)

    @made_by.setter
    def made_by(self, identity: str | None) -> None:
        self._maker = UnexportedValue(identity)

    @property
    def read_by(self) -> str | None:
        return getattr(self._reader, "value", None)

    @read_by.setter
    def read_by(self, folder: str | None) -> None:
        self._reader = UnexportedValue(folder)

    @property
    def cache_dtype(self) -> str | None:
        """Form of keys and values, such as `"int8"`. None for the dtype of the model, and if there are no images."""
        return self.layers[0].cache_dtype if self.layers else None

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values, with their scales."""
        return sum(tensor.nbytes for layer in self.layers for tensor in layer.tensors)

    @property
    def rows(self) -> int:
        """Number of image rows; 0 if there are no images."""
        return self.layers[0].keys.shape[0] if self.layers else 0

    def fill(self, layout: ImageLayout, keys_values: list[KeyValue], made_by: str | None = None) -> None:
        """Appends images, for all blocks.

        Args:
            layout ([`ImageLayout`]): layout of the new images.
            keys_values (`list[tuple]`): keys and values of all images, those of the cached images first. One tuple for
                each block, in the order of the blocks.
            made_by (`str`, *optional*): identity of the model and the weights. If the cache holds images already, its
                own `made_by` stays.
        """
        layers = [CrossAttentionLayer(key, value) for key, value in keys_values]
        appended = layout if self.layout is None else self.layout.append(layout)
        if self.layers:
            made_by = self.made_by
        self.layers, self.layout, self.made_by = layers, appended, made_by

    def take_over(self, other: CrossCache) -> None:
        """Replaces the images by those of another cache, such as a copy that was made before images came."""
        self.layers, self.layout = other.layers, other.layout
        self.made_by, self.read_by = other.made_by, other.read_by

    def plus_zero(self, zero: torch.Tensor) -> CrossCache:
        """Returns a cache with the same images, and `zero` added to the keys of the first block.

        The values do not change. A backward pass through the keys reaches the weights from which `zero` was computed.
        """
        other = self.shared()
        key, value = other.layers[0].read()
        assert isinstance(key, torch.Tensor)
        other.layers[0] = CrossAttentionLayer(key + zero.to(key.device, key.dtype), value)
        return other

    def shared(self) -> CrossCache:
        """Returns a cache with the same images for another conversation. Nothing is copied."""
        other = CrossCache()
        other.layers = [copy.copy(layer) for layer in self.layers]
        other.layout, other.made_by, other.read_by = self.layout, self.made_by, self.read_by
        return other

    def show(self, layout: ImageLayout) -> None:
        """Replaces the layout, for this conversation only. The image tokens stay the same."""
        self.layout = layout

    def select(self, rows: torch.Tensor, layout: ImageLayout) -> None:
        """Keeps the image rows `rows`, in that order. `layout` describes them."""
        self.layers = [layer.select(rows) for layer in self.layers]
        self.layout = layout

    def reset(self) -> None:
        # Drop the tensors and do not zero them: other caches may share them.
        self.layers, self.layout, self.made_by, self.read_by = [], None, None, None

    def offload_all(self) -> None:
        """Moves keys and values to the host. Each block copies its own back while it runs."""
        for layer in self.layers:
            layer.offload()

    def mark_static(self) -> None:
        """Tells `torch.compile` that the addresses of keys and values do not change. A CUDA graph requires this."""
        for layer in self.layers:
            for tensor in layer.tensors:
                torch._dynamo.mark_static_address(tensor)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        raise _needs_text_rows("reorder_cache")

    def batch_repeat_interleave(self, repeats: int) -> None:
        raise _needs_text_rows("batch_repeat_interleave")

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        raise _needs_text_rows("batch_select_indices")

    def crop(self, tokens_to_remove: int) -> None:
        raise ValueError("Images cannot be cropped. To crop the text, call `crop` of the whole cache.")


def _needs_text_rows(method: str) -> RuntimeError:
    return RuntimeError(
        f"The image half of a cache does not know which text row looks at which image row. Call `{method}` of the "
        "whole cache."
    )


def append(cached: KeyValue, new: KeyValue) -> KeyValue:
    """Returns the cached keys and values of a block, followed by new ones in the same dtype."""
    return concatenate([cached[0], new[0]], dim=2), concatenate([cached[1], new[1]], dim=2)


def is_empty(cache: Cache) -> bool:
    """Whether a cache of any kind is empty."""
    return not any(getattr(layer, "is_initialized", False) for layer in cache.layers)
