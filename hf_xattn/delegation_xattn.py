"""The image side of a model with a head: each method is that of the model inside it."""

from __future__ import annotations

from pathlib import Path

from transformers.modeling_outputs import BaseModelOutputWithPooling

from .cache.xattn_cache import XAttnCache
from .images.image_store import ImageStore
from .images_xattn import XAttnImagesMixin
from .layers.block import GatedCrossAttentionBlock
from .utils.distributed import fsdp_forward


class XAttnDelegationMixin:
    """What [`XAttnForConditionalGeneration`] leaves to its `model`."""

    model: XAttnImagesMixin

    @fsdp_forward
    def get_image_features(self, *args, **kwargs) -> BaseModelOutputWithPooling | tuple:
        """See [`XAttnModel.get_image_features`]."""
        return self.model.get_image_features(*args, **kwargs)

    @fsdp_forward
    def encode_images(self, *args, **kwargs) -> XAttnCache:
        """See [`XAttnModel.encode_images`]."""
        return self.model.encode_images(*args, **kwargs)

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

    def image_identity(self) -> str:
        """See [`XAttnModel.image_identity`]."""
        return self.model.image_identity()

    def load_cross_attention(self, folder: str | Path, name: str, **load_kwargs) -> None:
        """See [`XAttnModel.load_cross_attention`]."""
        self.model.load_cross_attention(folder, name, **load_kwargs)

    def set_cross_attention(self, name: str | None) -> None:
        """See [`XAttnModel.set_cross_attention`]."""
        self.model.set_cross_attention(name)

    def delete_cross_attention(self, name: str) -> None:
        """See [`XAttnModel.delete_cross_attention`]."""
        self.model.delete_cross_attention(name)

    @property
    def cross_attention_names(self) -> list[str]:
        """See [`XAttnModel.cross_attention_names`]."""
        return self.model.cross_attention_names

    @property
    def active_cross_attention(self) -> str | None:
        """See [`XAttnModel.active_cross_attention`]."""
        return self.model.active_cross_attention

    @property
    def blocks(self) -> list[GatedCrossAttentionBlock]:
        """The cross-attention blocks, in the order of the layers."""
        return self.model.blocks
