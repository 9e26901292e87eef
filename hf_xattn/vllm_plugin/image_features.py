"""Keeps the image tokens of images, so that a second question about an image does not run the vision tower again.

vLLM 0.32 shares nothing between requests of an encoder-decoder model. Each request projects keys and values of its own,
and would also run the tower again. The image tokens are kept in host memory, which the engine does not measure.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable

import torch


# Default of `additional_config={"hf_xattn_image_bytes": ...}`.
DEFAULT_BYTES = 2**28
OPTION = "hf_xattn_image_bytes"


def keys_of(pixels: torch.Tensor, aspect_ratio_ids: torch.Tensor | None = None) -> torch.Tensor:
    """Returns a name for the content of each image: the SHA-256 of its pixels, as `(num_images, 4)` integers.

    A name from the client would not be safe, because a client may give two images the same identifier.

    Args:
        pixels (`torch.Tensor`): `(num_images, ...)`.
        aspect_ratio_ids (`torch.LongTensor`, *optional*): `(num_images,)`, the arrangement of the tiles of each image.
    """
    names = []
    ratios = [None] * len(pixels) if aspect_ratio_ids is None else aspect_ratio_ids.tolist()
    for image, ratio in zip(pixels.contiguous(), ratios):
        seen = hashlib.sha256(f"{tuple(image.shape)} {image.dtype} {ratio}".encode())
        seen.update(image.view(torch.uint8).numpy())
        names.append(torch.frombuffer(bytearray(seen.digest()), dtype=torch.int64))
    return torch.stack(names)


class ImageFeatures:
    """Keeps the image tokens of the images that were used last.

    Args:
        max_bytes (`int`): largest number of bytes of all image tokens. 0 = keep none.
    """

    def __init__(self, max_bytes: int = DEFAULT_BYTES):
        self.max_bytes, self.nbytes = int(max_bytes), 0  # `int` raises here for a text, and not at the first image.
        self.kept: OrderedDict[bytes, torch.Tensor] = OrderedDict()

    def read(
        self, pixels: torch.Tensor, keys: list[bytes], encode: Callable[[list[int]], torch.Tensor]
    ) -> torch.Tensor:
        """Returns the image tokens of images, `(num_images, tokens, context_size)`.

        Args:
            pixels (`torch.Tensor`): `(num_images, ...)`. The image tokens are returned on the device of the pixels.
            keys (`list[bytes]`): names of the contents of the images.
            encode (`Callable`): takes indices of images, and computes the image tokens of these images.
        """
        known = {key: self.kept[key] for key in keys if key in self.kept}
        missing = [index for index, key in enumerate(keys) if key not in known and key not in keys[:index]]
        if missing:
            for index, features in zip(missing, encode(missing)):
                known[keys[index]] = features
        for key in keys:
            self._keep(key, known[key])
        return torch.stack([known[key].to(pixels.device) for key in keys])

    def _keep(self, key: bytes, features: torch.Tensor) -> None:
        if key in self.kept:
            self.kept.move_to_end(key)
            return
        size = features.numel() * features.element_size()
        if size > self.max_bytes:
            return
        self.kept[key] = features.detach().cpu().clone()
        self.nbytes += size
        while self.nbytes > self.max_bytes:
            _, oldest = self.kept.popitem(last=False)
            self.nbytes -= oldest.numel() * oldest.element_size()
