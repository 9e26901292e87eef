"""Encoded images kept by their content, for `generate` and `encode_images` of one model.

A chat client passes every image again at every turn, in a new conversation each time. A store lets the second call about a picture run
neither the vision tower nor a K/V projection. Its unit is one image: the keys and values of every block. A call's images are put together
from stored ones and newly encoded ones, wherever they stand in the call.

- Images are told apart by SHA-256 over their values in the dtype that the model computes in. The sums of `digests.py` compare images of
  one conversation; here a collision would show one user's picture to another.
- Images belong to one state of the weights and of the devices (see `model_identity.py`). The first call after a change drops them all.
- Least recently used images go first, and the bytes of all storages never pass the budget. A larger image is encoded and not kept.
"""

from __future__ import annotations

import hashlib
import operator
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, SupportsIndex

import torch

from .cross_cache import CrossCache, KeyValue
from .image_inputs import ImageInputs
from .tensor_checks import type_name


@dataclass(frozen=True, eq=False)
class StoredImage:
    """One encoded image.

    Attributes:
        keys_values (`tuple[KeyValue, ...]`): of every block, `(1, num_key_value_heads, tokens, head_dim)` each, without a null key.
        device (`torch.device`): of its features, where the layout of a call is made.
    """

    keys_values: tuple[KeyValue, ...]
    device: torch.device

    @property
    def tokens(self) -> int:
        return self.keys_values[0][0].shape[2]

    @property
    def nbytes(self) -> int:
        """Bytes of the values; of the storages too where the image is `owned`."""
        return sum(tensor.nbytes for pair in self.keys_values for tensor in pair)

    def owned(self) -> StoredImage:
        """The same image in storages of its own: a view would keep the whole batch alive that it was encoded in."""
        return replace(self, keys_values=tuple((_owned(key), _owned(value)) for key, value in self.keys_values))


class ImageStore:
    """Encoded images of one model, least recently used first out. Any number of threads may use it.

    A copy, also by pickle, is empty and has the same budget: it belongs to another model.

    Args:
        max_bytes (`int`): budget for keys and values, in bytes.

    Attributes:
        nbytes (`int`): bytes that are held now; at most `max_bytes`.
        num_images (`int`): images that are held now.
        hits (`int`): images that a call did not have to encode. An image that comes twice in a call is encoded once.
        misses (`int`): images that had to be encoded.

    Raises:
        TypeError: for a `max_bytes` that is no integer.
        ValueError: for one below 1.
    """

    def __init__(self, max_bytes: int):
        self.max_bytes = _checked_budget(max_bytes)
        self.hits = self.misses = self.nbytes = 0
        self._images: OrderedDict[bytes, StoredImage] = OrderedDict()
        self._maker: str | None = None
        self._lock = threading.Lock()  # held for bookkeeping only, never while images are encoded or copied

    @property
    def num_images(self) -> int:
        return len(self._images)

    def resize(self, max_bytes: int) -> None:
        """Changes the budget. Images that do not fit any more are dropped."""
        max_bytes = _checked_budget(max_bytes)
        with self._lock:
            self.max_bytes = max_bytes
            self._make_room(0)

    def clear(self) -> None:
        """Drops all images and counts from zero."""
        with self._lock:
            self._drop_all()
            self.hits = self.misses = 0

    def look_up(self, maker: str, keys: Iterable[bytes]) -> dict[bytes, StoredImage]:
        """Those of the images `keys` that are held. Images that another `maker` encoded are dropped."""
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
        """Holds an image that `maker` encoded, if that is still the model and the image fits the budget."""
        size = image.nbytes
        if size > self.max_bytes:
            return
        image = image.owned()
        with self._lock:
            # Another thread may have changed the weights, the budget, or encoded the same image meanwhile.
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

    def __reduce__(self) -> tuple[type[ImageStore], tuple[int]]:
        return ImageStore, (self.max_bytes,)

    def __repr__(self) -> str:
        return (
            f"ImageStore(num_images={self.num_images}, nbytes={self.nbytes}, max_bytes={self.max_bytes}, "
            f"hits={self.hits}, misses={self.misses})"
        )


@dataclass(frozen=True, eq=False)
class ImageGrid:
    """The images of a call, from the store or encoded just now.

    Attributes:
        rows (`list[list[StoredImage | None]]`): R rows of equally many images; None = a padding image.
    """

    rows: list[list[StoredImage | None]]

    @property
    def first(self) -> StoredImage:
        """Any of the images: all have the same shapes, dtypes and devices."""
        return next(image for row in self.rows for image in row if image is not None)

    def keys_values(self, cross: CrossCache, null_key: bool) -> list[KeyValue]:
        """Every block's keys and values of the images in a cache and of these behind them: what [`CrossCache.fill`] takes.

        Args:
            cross ([`CrossCache`]): the cache; not changed.
            null_key (`bool`): put the null key of quiet softmax in front, where the cache is empty.
        """
        result = []
        for index in range(len(self.first.keys_values)):
            pair = [self._joined(index, part, null_key and not cross.layers) for part in (0, 1)]
            if cross.layers:
                pair = [torch.cat(parts, dim=2) for parts in zip(cross.layers[index].read(), pair)]
            result.append((pair[0], pair[1]))
        return result

    def _joined(self, block: int, part: int, null_key: bool) -> torch.Tensor:
        """Keys (`part` 0) or values (1) of one block. Padding images, which nobody sees, are zeros, and so is the null key."""
        like, tokens, null = self.first.keys_values[block][part], self.first.tokens, int(null_key)
        _, heads, _, width = like.shape
        joined = like.new_zeros(len(self.rows), heads, null + len(self.rows[0]) * tokens, width)
        for row, images in enumerate(self.rows):
            for place, image in enumerate(images):
                if image is not None:
                    start = null + place * tokens
                    joined[row, :, start : start + tokens] = image.keys_values[block][part][0]
        return joined


class StoreReader:
    """A store as one call reads it.

    Args:
        store ([`ImageStore`]): the model's.
        find_maker (`Callable`): identity of the model, its weights and devices. Called only where images have to be found.
        precision (`str`): what makes keys and values of another precision with the same weights.
        project (`Callable`): `(images, tokens, context_size)` to every block's keys and values.
        null_key (`bool`): these have a null key in front.
    """

    def __init__(
        self,
        store: ImageStore,
        find_maker: Callable[[], str],
        precision: str,
        project: Callable[[torch.Tensor], list[KeyValue]],
        null_key: bool,
    ):
        self._store = store
        self._find_maker = find_maker
        self._precision = precision
        self._project = project
        self._null_key = null_key

    def read(
        self,
        images: ImageInputs,
        real: torch.Tensor | None,
        dtype: torch.dtype,
        encode: Callable[[ImageInputs], torch.Tensor],
    ) -> ImageGrid | None:
        """Finds images in the store, and encodes those that are not there, each once and all together.

        Args:
            images ([`ImageInputs`]): the images to find.
            real (`torch.BoolTensor`, *optional*): `(R, n)`, False = padding, which is neither looked for nor encoded.
            dtype (`torch.dtype`): the dtype that the model turns images into.
            encode (`Callable`): images to features, `(R, n, tokens, context_size)`.

        Returns:
            [`ImageGrid`]; None where all are padding, or hold no values.
        """
        assert images.images is not None
        num_rows, num_images = images.images.shape[:2]
        given = torch.ones(num_rows, num_images, dtype=torch.bool) if real is None else real.cpu()
        places = [(row, image) for row, image in given.nonzero().tolist()]
        if not places or images.images.is_meta:
            return None
        keys = dict(zip(places, content_keys(images, dtype, places, self._precision)))
        maker = self._find_maker()
        found = self._store.look_up(maker, keys.values())
        missing: dict[bytes, tuple[int, int]] = {}
        for place, key in keys.items():
            if key not in found:
                missing.setdefault(key, place)
        if missing:
            encoded = self._encode(images.at(list(missing.values())), encode)
            for key, image in zip(missing, encoded):
                found[key] = image
                self._store.keep(maker, key, image)
        return ImageGrid(
            [
                [found[keys[row, image]] if (row, image) in keys else None for image in range(num_images)]
                for row in range(num_rows)
            ]
        )

    def _encode(self, images: ImageInputs, encode: Callable[[ImageInputs], torch.Tensor]) -> list[StoredImage]:
        """Images `(count, 1, ...)`, each as a value. The tensors are views into those of all."""
        features = encode(images)
        null = int(self._null_key)
        projected = [(key[:, :, null:], value[:, :, null:]) for key, value in self._project(features.flatten(1, 2))]
        return [
            StoredImage(tuple((key[i : i + 1], value[i : i + 1]) for key, value in projected), features.device)
            for i in range(features.shape[0])
        ]


def content_keys(
    images: ImageInputs, dtype: torch.dtype, places: list[tuple[int, int]], precision: str = ""
) -> list[bytes]:
    """SHA-256 of the images at `places` (row, image): kind, shape, device, arrangement of tiles and values in `dtype`.

    Images on a GPU are copied to the host for it, once a call.
    """
    assert images.images is not None
    content = images.images.detach().to(dtype).cpu().contiguous()
    tiles = None if images.tiles is None else [part.cpu().to(torch.float64) for part in images.tiles]
    # What a wrong device raises without a store, it raises with one; and masks of a call lie beside its images.
    facts = f"{images.name} {dtype} {tuple(content.shape[2:])} {images.images.device} {precision}"
    keys = []
    for row, image in places:
        arrangement = None if tiles is None else [part[row, image].tolist() for part in tiles]
        digest = hashlib.sha256(f"{facts} {arrangement}\n".encode())
        digest.update(content[row, image].view(torch.uint8).numpy())
        keys.append(digest.digest())
    return keys


def _owned(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.untyped_storage().nbytes() == tensor.nbytes:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def _checked_budget(max_bytes: Any) -> int:
    if isinstance(max_bytes, (bool, torch.Tensor)) or not isinstance(max_bytes, SupportsIndex):
        raise TypeError(
            f"Expected `max_bytes` to be an integer, the bytes that encoded images may take, got {max_bytes!r} "
            f"({type_name(max_bytes)})."
        )
    if operator.index(max_bytes) < 1:
        raise ValueError(
            f"Expected `max_bytes` to be 1 or more, got {max_bytes}. `disable_image_store()` turns the store off."
        )
    return operator.index(max_bytes)


__all__ = ["ImageStore"]
