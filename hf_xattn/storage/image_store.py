"""Stores encoded images by their content, for `generate` and `encode_images` of one model.

A chat client passes every image again at every turn, in a new conversation each time. With a store, the second call
with an image runs neither the vision tower nor the K/V projections for this image. Each image is stored on its own: the
store keeps the keys and values of every block. A call may combine stored and new images in any order.

- Images are identified by the SHA-256 of their values, in the dtype that the model computes in. The digests of
  `cache/digests.py` are not enough: here a collision would show the image of one user to another user.
- Stored images are only valid for one state of the weights and the devices (see `checkpoints/model_identity.py`). The
  first call after a change drops all of them.
- With `dtype="int8"`, images are stored in int8 (see `storage/int8_states.py`). The call that encodes an image also
  uses the rounded values, so its answer equals later answers.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers.utils import logging

from ..cache.cross_cache import CrossCache, KeyValue, append
from ..cache.image_layout import ImageLayout
from ..cache.states import States, as_stored, check_cache_dtype, map_states
from ..images.image_inputs import ImageInputs
from ..utils.distributed import is_distributed
from .image_files import device_of


logger = logging.get_logger(__name__)


@dataclass(frozen=True, eq=False)
class StoredImage:
    """One encoded image."""

    # The keys and values of every block, without a null key: `(1, num_key_value_heads, tokens, head_dim)` each.
    keys_values: tuple[KeyValue, ...]
    device: torch.device  # device of the image tokens, on which the layout of a call is computed

    @property
    def tokens(self) -> int:
        return self.keys_values[0][0].shape[2]

    @property
    def nbytes(self) -> int:
        """Bytes of the keys and values. If the image is [`owned`], its storages take the same number of bytes."""
        return sum(states.nbytes for pair in self.keys_values for states in pair)

    def owned(self) -> StoredImage:
        """Returns this image in storages of its own. A view would keep the memory of a whole batch in use."""
        return replace(
            self,
            keys_values=tuple((map_states(key, _owned), map_states(value, _owned)) for key, value in self.keys_values),
        )


class ImageStore:
    """Stores encoded images of one model. When it is full, it drops the least recently used images first.

    Several threads may use a store at the same time. The stored images never take more than `max_bytes`: an image that
    is larger is encoded but not stored. A copy of a store (`deepcopy` or pickle) belongs to another model, so it is
    empty. It has the same `max_bytes`.

    Args:
        max_bytes (`int`): largest number of bytes that keys and values may take.
        dtype (`str`, *optional*): `"int8"`, or None for the dtype that the model computes in.

    Attributes:
        nbytes (`int`): bytes in use, at most `max_bytes`.
        num_images (`int`): number of stored images.
        hits (`int`): number of images that were not encoded, because the store held them or because they occurred
            twice in a call.
        misses (`int`): number of images that had to be encoded.

    Raises:
        TypeError, ValueError: for any other `dtype`.
    """

    def __init__(self, max_bytes: int, dtype: str | None = None):
        self.max_bytes = max_bytes
        self.dtype = check_cache_dtype("dtype", dtype)
        self.hits = self.misses = self.nbytes = 0
        self._images: OrderedDict[bytes, StoredImage] = OrderedDict()
        self._maker: str | None = None
        self._lock = threading.Lock()  # It only guards the fields above. No image is encoded or copied under it.

    @property
    def num_images(self) -> int:
        return len(self._images)

    def resize(self, max_bytes: int, dtype: str | None = None) -> None:
        """Changes `max_bytes` and `dtype`.

        Drops the least recently used images until the rest fits. If the dtype changes, drops all images.
        """
        dtype = check_cache_dtype("dtype", dtype)
        with self._lock:
            if dtype != self.dtype:
                self._drop_all()
            self.max_bytes, self.dtype = max_bytes, dtype
            self._make_room(0)

    def clear(self) -> None:
        """Drops all images, and sets `hits` and `misses` to zero."""
        with self._lock:
            self._drop_all()
            self.hits = self.misses = 0

    def look_up(self, maker: str, keys: Iterable[bytes]) -> dict[bytes, StoredImage]:
        """Returns the stored images among `keys`. If another `maker` encoded the stored images, drops them first."""
        found: dict[bytes, StoredImage] = {}
        missing = set()
        with self._lock:
            if maker != self._maker:
                self._drop_all()
                self._maker = maker
            for key in keys:
                image = self._images.get(key)
                if image is not None:
                    self._images.move_to_end(key)
                    found[key] = image
                elif key not in missing:
                    missing.add(key)
                    self.misses += 1
                    continue
                self.hits += 1
        return found

    def keep(self, maker: str, key: bytes, image: StoredImage) -> None:
        """Stores an image, if its `maker` still is the one of the store, and if the image fits into `max_bytes`."""
        size = image.nbytes
        if size > self.max_bytes:
            return
        image = image.owned()
        with self._lock:
            # In the meantime, another thread may have changed the weights or `max_bytes`, or stored the same image.
            if maker != self._maker or key in self._images or size > self.max_bytes:
                return
            self._make_room(size)
            self._images[key] = image
            self.nbytes += size

    def _make_room(self, size: int) -> None:
        while self.nbytes + size > self.max_bytes:
            _, image = self._images.popitem(last=False)
            self.nbytes -= image.nbytes

    def _drop_all(self) -> None:
        self._images.clear()
        self.nbytes = 0

    def __reduce__(self) -> tuple[type[ImageStore], tuple[int, str | None]]:
        return ImageStore, (self.max_bytes, self.dtype)

    def __repr__(self) -> str:
        return (
            f"ImageStore(num_images={self.num_images}, nbytes={self.nbytes}, max_bytes={self.max_bytes}, "
            f"dtype={self.dtype!r}, hits={self.hits}, misses={self.misses})"
        )


@dataclass(frozen=True, eq=False)
class ImageGrid:
    """The images of a call, from the store or newly encoded."""

    rows: list[list[StoredImage | None]]  # R rows with the same number of images. None is a padding image

    @property
    def first(self) -> StoredImage:
        """Any one of the images. All of them have the same shapes, dtypes and devices."""
        return next(image for row in self.rows for image in row if image is not None)

    @property
    def tokens(self) -> int:
        """Number of tokens of an image."""
        return self.first.tokens

    @property
    def device(self) -> torch.device:
        """Device of the image tokens."""
        return self.first.device

    def keys_values(self, cross: CrossCache, cache_dtype: str | None, null_key: bool) -> list[KeyValue]:
        """Returns keys and values of every block for [`CrossCache.fill`]: the cached ones, then those of these images.

        The cache is not changed. The new ones are stored in `cache_dtype`, that of the cached ones if there are any.
        With `null_key`, the null key of quiet softmax comes first, if the cache is empty.
        """
        result = []
        for index in range(len(self.first.keys_values)):
            pair = [self._joined(index, part, null_key and not cross.layers) for part in (0, 1)]
            new = as_stored(pair[0], cache_dtype), as_stored(pair[1], cache_dtype)
            result.append(append(cross.layers[index].read(), new) if cross.layers else new)
        return result

    def _joined(self, block: int, part: int, null_key: bool) -> States:
        """Joins the keys (`part` 0) or the values (`part` 1) of one block for all images.

        The null key and padding images are zeros. No token sees padding images.
        """
        like, tokens, null = self.first.keys_values[block][part], self.first.tokens, int(null_key)
        _, heads, _, width = like.shape
        joined = like.new_zeros(len(self.rows), heads, null + len(self.rows[0]) * tokens, width)
        for row, images in enumerate(self.rows):
            for place, image in enumerate(images):
                if image is not None:
                    start = null + place * tokens
                    states: Any = image.keys_values[block][part]
                    joined[row, :, start : start + tokens] = states[0]
        return joined


@dataclass(eq=False)
class StoreReader:
    """Reads the images of one call from a store, and encodes those that the store does not hold.

    Args:
        store ([`ImageStore`]): the store.
        find_maker (`Callable`): returns the identity of the model, its weights and its devices. It is not called if
            there are no images.
        precision (`str`): settings that change keys and values although the weights are the same, such as autocast.
        project (`Callable`): computes keys and values of every block from image tokens `(images, tokens, context_size)`
            and their layout, in the dtype of the store.
        null_key (`bool`): whether these keys and values begin with a null key.
        dtype (`str`, *optional*): the dtype of the store.
    """

    store: ImageStore
    find_maker: Callable[[], str]
    precision: str
    project: Callable[[torch.Tensor, ImageLayout], list[KeyValue]]
    null_key: bool
    dtype: str | None = None

    def read(
        self,
        images: ImageInputs,
        real: torch.Tensor | None,
        dtype: torch.dtype,
        encode: Callable[[ImageInputs], torch.Tensor],
    ) -> ImageGrid | None:
        """Finds images in the store. Encodes the missing ones in one batch, each of them once.

        Args:
            images ([`ImageInputs`]): the images of the call.
            real (`torch.BoolTensor`, *optional*): `(R, n)`. False is a padding image, which is neither looked up nor
                encoded.
            dtype (`torch.dtype`): the dtype to which the model converts images.
            encode (`Callable`): computes image tokens `(R, n, tokens, context_size)` from images.

        Returns:
            [`ImageGrid`], or None if all images are padding or on the meta device.
        """
        assert images.images is not None
        num_rows, num_images = images.images.shape[:2]
        given = torch.ones(num_rows, num_images, dtype=torch.bool) if real is None else real.cpu()
        places = [(row, image) for row, image in given.nonzero().tolist()]
        if not places or images.images.is_meta:
            return None
        keys = dict(zip(places, content_keys(images, dtype, places, self.precision)))
        maker = self.find_maker()
        found = self.store.look_up(maker, keys.values())
        missing: dict[bytes, tuple[int, int]] = {}
        for place, key in keys.items():
            if key not in found:
                missing.setdefault(key, place)
        if missing:
            encoded = self._encode(images.at(list(missing.values())), encode)
            for key, image in zip(missing, encoded):
                found[key] = image
                self.store.keep(maker, key, image)
        return ImageGrid(
            [
                [found[keys[row, image]] if (row, image) in keys else None for image in range(num_images)]
                for row in range(num_rows)
            ]
        )

    def _encode(self, images: ImageInputs, encode: Callable[[ImageInputs], torch.Tensor]) -> list[StoredImage]:
        """Encodes images `(count, 1, ...)` in one batch. Returns one entry for each, with views into the batch."""
        features = encode(images)
        tokens, null = features.shape[2], int(self.null_key)
        token_mask = None if images.tiles is None else images.tiles.token_mask(None, tokens)
        layout = ImageLayout.of((tokens,), features.device, token_mask)
        projected = self.project(features.flatten(1, 2), layout)
        projected = [(key[:, :, null:], value[:, :, null:]) for key, value in projected]
        return [
            StoredImage(tuple((key[i : i + 1], value[i : i + 1]) for key, value in projected), features.device)
            for i in range(features.shape[0])
        ]


def content_keys(
    images: ImageInputs, dtype: torch.dtype, places: list[tuple[int, int]], precision: str = ""
) -> list[bytes]:
    """Returns a SHA-256 for each image at `places`, which are pairs of a row and an image.

    The SHA-256 covers the kind of the image, its shape, device, tiles, position and values. Values are converted to
    `dtype` first. Images on a GPU are copied to the host once per call.
    """
    assert images.images is not None
    content = images.images.detach().to(dtype).cpu().contiguous()
    tiles = None if images.tiles is None else [part.cpu().to(torch.float64) for part in images.tiles]
    # The device is part of the key. So images on a wrong device raise the same error as without a store.
    positions = None if images.positions is None else images.positions.tolist()
    facts = f"{images.name} {dtype} {tuple(content.shape[2:])} {images.images.device} {precision}"
    keys = []
    for row, image in places:
        arrangement = None if tiles is None else [part[row, image].tolist() for part in tiles]
        position = "" if positions is None else f" image {positions[row][image]}"
        digest = hashlib.sha256(f"{facts} {arrangement}{position}\n".encode())
        digest.update(content[row, image].view(torch.uint8).numpy())
        keys.append(digest.digest())
    return keys


def _owned(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.untyped_storage().nbytes() == tensor.nbytes:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


class XAttnStoreMixin:
    """The image store of both models. It belongs to the [`XAttnModel`] inside the other model."""

    _image_store: ImageStore | None = None

    def enable_image_store(self: Any, max_bytes: int = 2**30, dtype: str | None = None) -> None:
        """Stores encoded images by their content, so that `generate` and `encode_images` encode an image only once.

        The store is off by default. Images are stored one by one, so a call may combine stored and new images, in any
        rows and places. The results equal those without a store, up to the rounding of a batch of another size.
        Features (`cross_attention_states`) without an axis of images count as one image per row.

        The store is not used in training mode, while gradients are recorded (`encode_images` outside of
        `torch.no_grad()`), in compiled code, or in a run of several processes, because all processes must make the same
        collective calls.

        The first call after a change of weights, adapters, dtype or devices drops all images (see
        `checkpoints/model_identity.py`). Two kinds of changes are not noticed: a write to a weight through `.data` or a
        NumPy view, and a hook on the vision tower, the connector or a K/V projection. After such a change, call
        `model.image_store.clear()`.

        Args:
            max_bytes (`int`): largest number of bytes that keys and values may take. An existing store keeps the images
                that fit.
            dtype (`str`, *optional*): `"int8"` stores images in int8 (see `storage/int8_states.py`), which takes about
                half as many bytes as bfloat16. New caches of calls that use the store are then in int8, too. None
                means the dtype that the model computes in. An existing store drops all images if its dtype changes.

        Raises:
            TypeError, ValueError: for any other `dtype`.

        Example:

        ```python
        >>> import torch
        >>> from transformers import AutoModelForImageTextToText

        >>> model = AutoModelForImageTextToText.from_pretrained("seeing")
        >>> model.enable_image_store(max_bytes=2**30)
        >>> pixels = torch.rand(1, 3, 224, 224)
        >>> for _ in range(2):  # the vision tower runs once
        ...     tokens = model.generate(torch.tensor([[1, 2, 3]]), pixel_values=pixels, max_new_tokens=2)
        >>> model.image_store.hits
        1
        ```
        """
        if (store := self.image_store) is None:
            self.base_model._image_store = ImageStore(max_bytes, dtype)
        else:
            store.resize(max_bytes, dtype)

    def disable_image_store(self: Any) -> None:
        """Turns the store of [`enable_image_store`] off, and drops all its images."""
        self.base_model._image_store = None

    @property
    def image_store(self: Any) -> ImageStore | None:
        """The [`ImageStore`] of [`enable_image_store`], with `nbytes`, `hits` and `misses`. None if it is off."""
        return self.base_model._image_store

    def find_source(self: Any, made_by: str | None) -> StoreReader | None:
        """Returns a reader of the store for one call. None if the store must not be used.

        Args:
            made_by (`str`, *optional*): the identity of this model, if the caller knows it already.
        """
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            return None
        if any(module.training for part in self._image_parts().values() for module in part.modules()):
            return None  # Dropout would become a part of the stored images.
        if is_distributed():
            logger.warning_once("The image store is not used in a run of several processes.")
            return None
        devices = [device_of(block.attn.k_proj) for block in self.blocks]
        tower_device = None if self.vision_tower is None else self.vision_tower.device
        kinds = sorted({device.type for device in devices})
        dtype = self._image_store.dtype
        precision = [str(torch.get_autocast_dtype(kind)) for kind in kinds if torch.is_autocast_enabled(kind)]
        return StoreReader(
            self._image_store,
            lambda: f"{self.image_identity() if made_by is None else made_by} {devices} {tower_device}",
            f"autocast {precision} {dtype}",
            lambda states, layout: self.project_images(states, CrossCache(), layout, dtype),
            self.config.cross_attention_config.quiet_softmax,
            dtype,
        )


__all__ = ["ImageStore"]
