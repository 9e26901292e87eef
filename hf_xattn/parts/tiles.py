"""Vision towers that read tiles (Mllama's): a large image is cut into up to `max_num_tiles` square tiles.

The tower has another argument for the arrangement of the tiles, the aspect ratio. An image with fewer tiles gets
padding tiles, and no text may see the image tokens of these.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from ..configuration_xattn import XAttnConfig
from ..images.tower import ARRANGEMENTS, Ratios, image_size_of
from ..utils.architectures import TILED_VISION_TYPES, vision_feature_size
from ..utils.tensor_checks import check_integers, has_values


class Tiles(NamedTuple):
    """What a tiled tower needs in addition to the pixels. It implements [`Arrangement`]."""

    aspect_ratio_ids: torch.Tensor  # (batch, num_images), 0 for no image
    aspect_ratio_mask: torch.Tensor  # (batch, num_images, max_num_tiles), 1 for a tile and 0 for padding

    @classmethod
    def of(cls, config: XAttnConfig, name: str, images: torch.Tensor, ratios: Ratios) -> Tiles:
        _check_shape(config, name, tuple(images.shape))
        for axes, (ratio, value) in enumerate(ratios.items(), start=2):
            expected = tuple(images.shape[:axes])
            if value is None:
                raise ValueError(
                    f"`{ratio}` is required with `{name}`, because the vision tower takes tiles, got None."
                )
            if tuple(value.shape) != expected:
                raise ValueError(f"Expected `{ratio}` of shape {expected}, got {tuple(value.shape)}.")
        tiles: Any = cls(**ratios)  # type: ignore[arg-type]
        check_integers("aspect_ratio_ids", tiles.aspect_ratio_ids)
        return tiles

    @classmethod
    def blank(cls, config: PreTrainedConfig, pixels: torch.Tensor) -> tuple[torch.Tensor, Tiles]:
        count = config.max_num_tiles
        mask = torch.ones(1, 1, count, dtype=torch.long, device=pixels.device)
        ids = torch.ones(1, 1, dtype=torch.long, device=pixels.device)
        return pixels[:, :, None].expand(-1, -1, count, -1, -1, -1), cls(ids, mask)

    @property
    def kinds(self) -> torch.Tensor:
        return self.aspect_ratio_ids

    def each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Tiles:
        return Tiles(*map(change, self))

    def run(self, tower: PreTrainedModel, pixels: torch.Tensor, returns: dict[str, bool]) -> BaseModelOutput:
        output = tower(pixel_values=pixels.to(tower.dtype), **self._asdict(), **returns)
        # transformers records no hidden states of this tower, and older releases return the last one in their place.
        return BaseModelOutput(last_hidden_state=output.last_hidden_state)

    def connect(
        self, connector: nn.Module, features: torch.Tensor, positions: torch.Tensor | None, skips_padding: bool
    ) -> torch.Tensor:
        """See [`Arrangement`]. With `skips_padding`, padding tiles skip the connector and become zeros."""
        real = self._real_tiles() if skips_padding else None
        if real is None:
            places = {} if positions is None else {"positions": positions}
            return connector(features, **places).flatten(2, 3)  # the tokens of one tile stay together
        of_tiles = {}
        if positions is not None:
            of_tiles = {"positions": positions.flatten().repeat_interleave(features.shape[2])[real]}
        connected = connector(features.flatten(0, 2)[real], **of_tiles)
        padded = connected.new_zeros(features.shape[:3].numel(), *connected.shape[1:])
        padded[real] = connected
        return padded.unflatten(0, features.shape[:3]).flatten(2, 3)

    def _real_tiles(self) -> torch.Tensor | None:
        """Returns the indices of the tiles that are no padding, among the tiles of all images.

        Returns None if all tiles are padding, or none. The tower itself reads padding tiles, too, because in
        transformers' Mllama the patches of real tiles attend to them: without them, an image would have other features.
        """
        if not has_values(self.aspect_ratio_mask):
            return None
        mask = self.aspect_ratio_mask.flatten()
        found = mask.nonzero()[:, 0]
        return found if 0 < len(found) < len(mask) else None

    def token_mask(self, image_mask: torch.Tensor | None, tokens: int) -> torch.Tensor:
        mask = self.aspect_ratio_mask != 0
        if image_mask is not None:
            mask = mask & image_mask[..., None]
        return mask.flatten(1).repeat_interleave(tokens // mask.shape[2], dim=1)


def _check_shape(config: XAttnConfig, name: str, shape: tuple[int, ...]) -> None:
    vision: Any = config.vision_config
    tiles = getattr(vision, "max_num_tiles", None)
    if name == "pixel_values":
        if len(shape) != 6 or shape[2] != tiles:
            raise ValueError(
                f"Expected `pixel_values` of shape (batch, num_images, max_num_tiles={tiles}, channels, height, width) "
                f"for a {vision.model_type}, got {shape}. The image processor of the checkpoint makes such pixels."
            )
        if (size := image_size_of(vision)) != shape[-2:]:
            raise ValueError(
                f"Expected `pixel_values` with tiles of {size} (height, width) for a {vision.model_type}, got shape "
                f"{shape}."
            )
    elif len(shape) != 5 or shape[2] != tiles or shape[-1] != vision_feature_size(config):
        width = vision_feature_size(config)
        raise ValueError(
            f"Expected `vision_features` of shape (batch, num_images, max_num_tiles={tiles}, tokens, width={width}), "
            f"the `last_hidden_state` of the vision tower, got {shape}."
        )


ARRANGEMENTS.update(dict.fromkeys(TILED_VISION_TYPES, Tiles))
