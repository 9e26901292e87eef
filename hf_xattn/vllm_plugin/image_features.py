"""Keeps what tower and connector made of pictures, so that a second question about a picture runs no tower.

vLLM 0.32 shares nothing between requests of an encoder-decoder model: each one projects its own keys and values, and
would run the tower again. The features lie in host memory, which the engine does not measure.
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
    """A name of each image's content, `(num_images, 4)` integers of a SHA-256 of its pixels `(num_images, ...)`.

    The names are made of what the tower reads: a client may give two pictures the same identifier. Tiles have an order,
    which `aspect_ratio_ids` `(num_images,)` names.
    """
    names = []
    ratios = [None] * len(pixels) if aspect_ratio_ids is None else aspect_ratio_ids.tolist()
    for image, ratio in zip(pixels.contiguous(), ratios):
        seen = hashlib.sha256(f"{tuple(image.shape)} {image.dtype} {ratio}".encode())
        seen.update(image.view(torch.uint8).numpy())
        names.append(torch.frombuffer(bytearray(seen.digest()), dtype=torch.int64))
    return torch.stack(names)


class ImageFeatures:
    """The features of the images that were asked for last.

    Args:
        max_bytes (`int`): of all features. 0 = keep none.
    """

    def __init__(self, max_bytes: int = DEFAULT_BYTES):
        self.max_bytes, self.nbytes = int(max_bytes), 0  # a text fails here, not at the first picture
        self.kept: OrderedDict[bytes, torch.Tensor] = OrderedDict()

    def read(
        self, pixels: torch.Tensor, keys: list[bytes], encode: Callable[[list[int]], torch.Tensor]
    ) -> torch.Tensor:
        """The features of images, `(num_images, tokens, context_size)`.

        Args:
            pixels (`torch.Tensor`): `(num_images, ...)`, whose device the features get.
            keys (`list[bytes]`): names of their contents.
            encode (`Callable`): makes the features of the images with these indices.
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
