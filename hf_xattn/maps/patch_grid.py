"""Finds the place in the image to which each image token belongs.

A vision tower returns tokens without a patch (class token, registers), followed by one token for each patch, row by
row. Mllama's tower does this for each tile, and the tiles are also in rows. A convolutional tower returns one token for
each place of its last feature map, row by row. Linear and MLP connectors keep this order.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..configuration_xattn import XAttnConfig
from ..utils.architectures import TILED_VISION_TYPES
from ..utils.parts import CONNECTORS


# Towers whose tokens are patches, row by row, with the number of tokens before the patches. Registers come in addition:
# the configuration of the tower has their number.
PREFIX_TOKENS = {
    "beit": 1,
    "clip_vision_model": 1,
    "data2vec-vision": 1,
    "deit": 2,  # class and distillation token
    "dinov2": 1,
    "dinov2_with_registers": 1,
    "dinov3_vit": 1,
    "ijepa": 0,
    "mllama_vision_model": 1,  # in each tile
    "siglip_vision_model": 0,
    "vit": 1,
    "vit_msn": 1,
}
# Convolutional towers, in which a token is a place of the last feature map. The stride depends on the configuration.
CONVOLUTIONAL = ("convnext", "convnextv2", "efficientnet", "mobilenet_v1", "mobilenet_v2", "regnet", "resnet")
STRIDES = tuple(2**power for power in range(8))
KEEP_POSITIONS = ("identity", "linear", "mlp", "mlp_2d")  # connectors


class PatchGrid(NamedTuple):
    """The patches of one image."""

    prefix: int  # number of tokens before the patches of an image or of a tile
    rows: int  # number of rows of patches, in an image or in a tile
    columns: int
    tile_rows: int
    tile_columns: int
    # Share of the height and of the width that the patches cover. The tower ignores a border smaller than a patch.
    covered: tuple[float, float]

    def lay(self, weights: torch.Tensor) -> torch.Tensor:
        """Arranges weights `(..., tokens of the image)` as `(..., patch rows, patch columns)`, over all tiles."""
        tiles = self.tile_rows * self.tile_columns
        of_tile = self.prefix + self.rows * self.columns
        weights = weights[..., : tiles * of_tile]  # The tokens of padding tiles come last.
        weights = weights.unflatten(-1, (self.tile_rows, self.tile_columns, of_tile))[..., self.prefix :]
        weights = weights.unflatten(-1, (self.rows, self.columns)).transpose(-3, -2)
        return weights.flatten(-2).flatten(-3, -2)


def patch_grid(
    config: XAttnConfig, num_tokens: int, image_size: tuple[int, int] | None, aspect_ratio_id: int | None = None
) -> PatchGrid:
    """Finds the patches of an image.

    Args:
        config ([`XAttnConfig`]): configuration of the model.
        num_tokens (`int`): number of tokens of the image.
        image_size (`tuple[int, int]`, *optional*): height and width of the pixels that the vision tower has read.
        aspect_ratio_id (`int`, *optional*): arrangement of the tiles, for a tiled tower.

    Raises:
        ValueError: for features, for a connector that does not keep the positions of patches, for a tower whose order
            of tokens is not known, and if the tower makes another number of tokens.
    """
    tower: Any = config.vision_config
    remedy = "Use `weights`, which have one entry for each image token."
    if tower is None or image_size is None:
        raise ValueError(
            "`grid` needs the size of the image that a vision tower has read, which `pixel_values` in `inputs` tell. "
            "The size is not known for features (`cross_attention_states`). For encoded images (a cache, "
            f"`vision_features`), it is not known if the tower reads images of several sizes. {remedy}"
        )
    if config.connector_type not in KEEP_POSITIONS and not CONNECTORS.keeps_positions(config.connector_type):
        raise ValueError(
            f"`grid` needs a connector that keeps positions, got `connector_type={config.connector_type!r}`. If a "
            f"connector of your own keeps them, set `keeps_positions = True` in its class. {remedy}"
        )
    if tower.model_type in CONVOLUTIONAL:
        sizes = ([-(-length // stride) for length in image_size] for stride in STRIDES)
        for rows, columns in sizes:
            if rows * columns == num_tokens:
                return PatchGrid(0, rows, columns, 1, 1, (1.0, 1.0))
        raise ValueError(
            f"`grid` expected a stride of {STRIDES[0]} to {STRIDES[-1]} pixels, a power of two, got {num_tokens} "
            f"tokens of an image of {image_size} (height, width). {remedy}"
        )
    if tower.model_type not in PREFIX_TOKENS:
        known = ", ".join((*PREFIX_TOKENS, *CONVOLUTIONAL))
        raise ValueError(
            f"`grid` needs a vision tower whose patches are known ({known}), got {tower.model_type!r}. {remedy}"
        )
    patch = tower.patch_size
    height, width = (patch, patch) if isinstance(patch, int) else (patch[0], patch[1])
    prefix = PREFIX_TOKENS[tower.model_type] + (getattr(tower, "num_register_tokens", 0) or 0)
    tiles, arrangement = 1, (1, 1)
    if tower.model_type in TILED_VISION_TYPES:
        if aspect_ratio_id is None:
            raise ValueError(
                "`grid` needs the arrangement of the tiles, which a cache of images does not hold. Pass `pixel_values` "
                "and `aspect_ratio_ids` in `inputs`."
            )
        tiles = tower.max_num_tiles
        if aspect_ratio_id:  # A padding image has the id 0 and one tile, which is masked.
            arrangement = tower.supported_aspect_ratios[aspect_ratio_id - 1]
    elif config.vision_feature_select_strategy == "default":
        prefix -= 1
    rows, columns = image_size[0] // height, image_size[1] // width
    if prefix < 0 or tiles * (prefix + rows * columns) != num_tokens:
        raise ValueError(
            f"`grid` expected {tiles * (prefix + rows * columns)} tokens of an image of {image_size} (height, width) "
            f"and patches of {(height, width)}, got {num_tokens}. {remedy}"
        )
    covered = (rows * height / image_size[0], columns * width / image_size[1])
    return PatchGrid(prefix, rows, columns, *arrangement, covered)
