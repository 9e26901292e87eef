"""The image store as a part of the models: when it is asked, and what makes its images invalid."""

from __future__ import annotations

from typing import Any

import torch
from transformers.utils import logging

from ..cache.cross_cache import CrossCache
from ..utils.distributed import is_distributed
from .image_files import device_of
from .image_store import ImageStore, StoreReader


logger = logging.get_logger(__name__)


class XAttnStoreMixin:
    """The image store of [`XAttnModel`]."""

    _image_store: ImageStore | None = None

    def enable_image_store(self, max_bytes: int = 2**30, dtype: str | None = None) -> None:
        """Keeps encoded images by content: `generate` and `encode_images` encode an image once, ever. Off by default.

        Images are stored one by one, so a call may combine stored and new images, in any rows and places. The results
        are equal to those without a store, up to the rounding of a batch of another size. Features
        (`cross_attention_states`) without an axis of images are one image a row.

        The store is left aside in training mode, where gradients are recorded (`encode_images` outside of
        `torch.no_grad()`), in compiled code and in a run of several processes, whose collectives must match.

        The first call after a change of weights, adapters, dtype or devices drops all images (see
        `checkpoints/model_identity.py`). Some changes are not noticed: a write to a weight through `.data` or a NumPy
        view, a hook on the vision tower, the connector or a K/V projection. After such a
        change, call `model.image_store.clear()`.

        Args:
            max_bytes (`int`): bytes that keys and values may take. An existing store keeps the images that fit.
            dtype (`str`, *optional*): `"int8"` stores images in int8 (see `storage/int8_states.py`): about half as many
                bytes as in bfloat16. New caches of calls that use the store are in int8, too. None: the dtype that the
                model computes in. A store that exists drops all images if its dtype changes.

        Raises:
            TypeError, ValueError: for another `dtype`.
        """
        if self._image_store is None:
            self._image_store = ImageStore(max_bytes, dtype)
        else:
            self._image_store.resize(max_bytes, dtype)

    def disable_image_store(self) -> None:
        """Drops the store of [`enable_image_store`] with all its images."""
        self._image_store = None

    @property
    def image_store(self) -> ImageStore | None:
        """The [`ImageStore`] of [`enable_image_store`], with `nbytes`, `hits` and `misses`; None if it is off."""
        return self._image_store

    def find_source(self: Any, made_by: str | None) -> StoreReader | None:
        """The store for one call; None where it must be left aside. `made_by`: this model's identity, if known."""
        if self._image_store is None or torch.is_grad_enabled() or torch.compiler.is_compiling():
            return None
        if any(module.training for part in self._image_parts().values() for module in part.modules()):
            return None  # dropout
        if is_distributed():
            logger.warning_once("The image store is left aside in a run of several processes.")
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
            lambda states, layout: self.project_images(states, CrossCache(dtype), layout),
            self.config.cross_attention_config.quiet_softmax,
            dtype,
        )


class XAttnStoreDelegationMixin:
    """The image store of [`XAttnForConditionalGeneration`]: that of the model inside it."""

    model: Any

    def enable_image_store(self, max_bytes: int = 2**30, dtype: str | None = None) -> None:
        """See [`XAttnModel.enable_image_store`]."""
        self.model.enable_image_store(max_bytes, dtype)

    def disable_image_store(self) -> None:
        """See [`XAttnModel.disable_image_store`]."""
        self.model.disable_image_store()

    @property
    def image_store(self) -> ImageStore | None:
        """See [`XAttnModel.image_store`]."""
        return self.model.image_store
