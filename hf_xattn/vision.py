"""How a vision tower is called, and what its output means.

Most towers read one square image at a time. Mllama's reads an image as tiles: a large image is cut into up to `max_num_tiles`
squares, and the arrangement (the aspect ratio) goes in with them. An image with fewer tiles is padded, and the tokens of
padding tiles must not be seen.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from transformers import AutoModel, PreTrainedConfig, PreTrainedModel

from .sizes import TILED_VISION_TYPES


class Tiles(NamedTuple):
    """What a tiled tower wants to know beside the pixels.

    Attributes:
        aspect_ratio_ids (`torch.LongTensor`): `(batch, num_images)`, 0 = no image.
        aspect_ratio_mask (`torch.Tensor`): `(batch, num_images, max_num_tiles)`, 1 = a tile, 0 = padding.
    """

    aspect_ratio_ids: torch.Tensor
    aspect_ratio_mask: torch.Tensor

    def drop(self, count: int) -> Tiles:
        """Without the first `count` images."""
        return Tiles(self.aspect_ratio_ids[:, count:], self.aspect_ratio_mask[:, count:])


def build_tower(config: PreTrainedConfig) -> PreTrainedModel:
    """A vision tower with random weights."""
    if config.model_type in TILED_VISION_TYPES:
        from transformers import MllamaVisionModel

        return MllamaVisionModel._from_config(config)  # not registered with AutoModel
    return AutoModel.from_config(config)


def follow_tower(connector: torch.nn.Module, tower: PreTrainedModel) -> None:
    """Brings a new connector to the device and dtype of the tower whose features it gets."""
    weight = next(tower.parameters())
    if not weight.is_meta:
        connector.to(device=weight.device, dtype=weight.dtype)


def is_tiled(config: PreTrainedConfig) -> bool:
    """Whether a vision tower reads tiles."""
    return config.model_type in TILED_VISION_TYPES


def check_pixels(
    config: PreTrainedConfig,
    pixel_values: torch.Tensor,
    aspect_ratio_ids: torch.Tensor | None,
    aspect_ratio_mask: torch.Tensor | None,
) -> tuple[torch.Tensor, Tiles | None]:
    """Pixels with one entry an image on axis 1, and how its tiles lie.

    Raises:
        TypeError: for pixels that are not floating point.
        ValueError: for a wrong rank or size, or aspect ratios where the tower takes none or wants some.
    """
    shape = tuple(pixel_values.shape)
    if not pixel_values.is_floating_point():
        raise TypeError(
            f"`pixel_values` must be floating point, got {pixel_values.dtype}: run the image processor first."
        )
    tiles = None
    if is_tiled(config):
        tiles = _check_tiles(config, pixel_values, aspect_ratio_ids, aspect_ratio_mask)
    else:
        for name, value in (("aspect_ratio_ids", aspect_ratio_ids), ("aspect_ratio_mask", aspect_ratio_mask)):
            if value is not None:
                raise ValueError(f"`{name}` was given, but the vision tower ({config.model_type}) reads no tiles.")
        if pixel_values.dim() == 4:
            pixel_values = pixel_values[:, None]
        if pixel_values.dim() != 5:
            raise ValueError(
                "`pixel_values` must be (batch, num_images, channels, height, width) or (batch, channels, height, width), "
                f"got shape {shape}."
            )
    channels = getattr(config, "num_channels", None)
    if channels is not None and pixel_values.shape[-3] != channels:
        raise ValueError(
            f"`pixel_values` has {pixel_values.shape[-3]} channels, the vision tower takes {channels} (shape {shape})."
        )
    if pixel_values.shape[1] == 0:
        raise ValueError(f"`pixel_values` holds no image (shape {shape}).")
    return pixel_values, tiles


def _check_tiles(
    config: Any,
    pixel_values: torch.Tensor,
    aspect_ratio_ids: torch.Tensor | None,
    aspect_ratio_mask: torch.Tensor | None,
) -> Tiles:
    shape, tiles = tuple(pixel_values.shape), config.max_num_tiles
    if pixel_values.dim() != 6 or pixel_values.shape[2] != tiles:
        raise ValueError(
            f"`pixel_values` must be (batch, num_images, max_num_tiles={tiles}, channels, height, width) for a "
            f"{config.model_type}, got shape {shape}. The image processor of the checkpoint makes them."
        )
    for name, value, expected in (
        ("aspect_ratio_ids", aspect_ratio_ids, shape[:2]),
        ("aspect_ratio_mask", aspect_ratio_mask, shape[:3]),
    ):
        if value is None:
            raise ValueError(f"`{name}` is required with `pixel_values`: the vision tower reads tiles.")
        if tuple(value.shape) != expected:
            raise ValueError(f"`{name}` must have shape {expected}, got {tuple(value.shape)}.")
    assert aspect_ratio_ids is not None and aspect_ratio_mask is not None
    return Tiles(aspect_ratio_ids, aspect_ratio_mask)


def run_tower(
    tower: PreTrainedModel,
    connector: torch.nn.Module,
    pixel_values: torch.Tensor,
    tiles: Tiles | None,
    drop_first: bool = False,
) -> torch.Tensor:
    """`(R, num_images, ...)` pixels to `(R, num_images, tokens an image, context_size)`; `drop_first`: without the tower's
    first token, the class token."""
    rows, num_images = pixel_values.shape[:2]
    if tiles is not None:
        features = tower(pixel_values=pixel_values.to(tower.dtype), **tiles._asdict()).last_hidden_state
        return connector(features).flatten(2, 3)  # a tile's tokens follow one another
    features = tower(pixel_values=pixel_values.flatten(0, 1).to(tower.dtype)).last_hidden_state
    if features.dim() == 4:  # convolutional towers: (batch, channels, height, width)
        features = features.flatten(2).transpose(1, 2)
    return connector(features[:, 1:] if drop_first else features).unflatten(0, (rows, num_images))


def token_mask_of(tiles: Tiles | None, image_mask: torch.Tensor | None, tokens: int) -> torch.Tensor | None:
    """Which of an image's tokens are real, `(batch, num_images * tokens)`; None where all are.

    Args:
        tiles ([`Tiles`], *optional*), image_mask (`torch.BoolTensor`, *optional*): padding tiles and padding images.
        tokens (`int`): tokens an image.
    """
    if tiles is None:
        return None if image_mask is None else image_mask.repeat_interleave(tokens, dim=1)
    mask = tiles.aspect_ratio_mask != 0
    if image_mask is not None:
        mask = mask & image_mask[..., None]
    return mask.flatten(1).repeat_interleave(tokens // mask.shape[2], dim=1)


def blank_image(config: PreTrainedConfig, like: torch.Tensor) -> tuple[torch.Tensor, Tiles | None]:
    """One black image for one row, on the device and in the dtype of `like`."""
    size = getattr(config, "image_size", 224)
    size = (size, size) if isinstance(size, int) else tuple(size)
    pixels = like.new_zeros(1, 1, getattr(config, "num_channels", 3), *size)
    if not is_tiled(config):
        return pixels, None
    count = config.max_num_tiles
    mask = torch.ones(1, 1, count, dtype=torch.long, device=like.device)
    ids = torch.ones(1, 1, dtype=torch.long, device=like.device)
    return pixels[:, :, None].expand(-1, -1, count, -1, -1, -1), Tiles(ids, mask)
