"""Turns images into image tokens, with the vision tower and the connector."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from ..cache.cross_cache import CrossCache, KeyValue
from ..cache.digests import Digests, digest
from ..cache.image_layout import ImageLayout, real_coordinates, rows_to
from ..configuration_xattn import XAttnConfig
from ..layers.block import GatedCrossAttentionBlock
from ..utils.distributed import check_callable, has_units, is_distributed
from .connector import XAttnConnector, check_square
from .image_inputs import ImageInputs
from .tower import Arrangement, blank_image, check_not_trained, run_tower


class ModelBody(Protocol):
    """[`XAttnModel`], for the subpackages that it is made of: its configuration and its parts."""

    @property
    def config(self) -> XAttnConfig: ...

    @property
    def text_model(self) -> PreTrainedModel: ...

    @property
    def vision_tower(self) -> PreTrainedModel | None: ...

    @property
    def connector(self) -> XAttnConnector | None: ...

    @property
    def blocks(self) -> list[GatedCrossAttentionBlock]: ...

    @property
    def image_encoder(self) -> ImageEncoder: ...


class ModelWithBlocks(Protocol):
    """[`XAttnModel`] or [`XAttnForConditionalGeneration`], for the subpackages that these are made of."""

    @property
    def config(self) -> XAttnConfig: ...

    @property
    def base_model(self) -> ModelBody: ...

    @property
    def blocks(self) -> list[GatedCrossAttentionBlock]: ...

    def image_identity(self) -> str: ...


class FoundImages(Protocol):
    """Images of a call whose keys and values were computed before."""

    @property
    def tokens(self) -> int: ...  # number of tokens of an image

    @property
    def device(self) -> torch.device: ...  # device of the image features

    def keys_values(self, cross: CrossCache, cache_dtype: str | None, null_key: bool) -> list[KeyValue]:
        """Returns what [`CrossCache.fill`] takes: the keys and values of `cross`, and those of these images."""


class ImageSource(Protocol):
    """Holds images that were encoded before. The image store (`storage/image_store.py`) is one."""

    dtype: str | None  # dtype of keys and values, see [`CrossCache`]

    def read(
        self,
        images: ImageInputs,
        real: torch.Tensor | None,
        dtype: torch.dtype,
        encode: Callable[[ImageInputs], torch.Tensor],
    ) -> FoundImages | None: ...


class Numbering(Protocol):
    """Numbers the images of a row, for connectors that read these numbers (see `parts/perceiver.py`)."""

    def in_row(self, images: ImageInputs, real: torch.Tensor | None, cached: ImageLayout | None) -> ImageInputs: ...

    def in_samples(
        self, config: XAttnConfig, images: ImageInputs, text: Any, rows: torch.Tensor | None
    ) -> ImageInputs: ...

    def check_hidden(self, image_mask: torch.Tensor, cached: ImageLayout) -> None: ...


@dataclass(frozen=True)
class ImageEncoder:
    """Encodes images for one model. It knows the tower and the connector, but not the model that they belong to.

    Args:
        config ([`XAttnConfig`]): Configuration of the model.
        vision_tower (`PreTrainedModel`, *optional*), connector ([`XAttnConnector`], *optional*): None for a model that
            takes `cross_attention_states`.
        find_like (`Callable`): Returns a weight of a K/V projection, which has the device and the dtype of keys and
            values. It is called only if it is needed, because it searches the text model.
        numbering ([`Numbering`], *optional*): Numbers the images of a row; None if the connector does not read this.
    """

    config: XAttnConfig
    vision_tower: PreTrainedModel | None
    connector: XAttnConnector | None
    find_like: Callable[[], torch.Tensor]
    numbering: Numbering | None = None

    def features(
        self, pixel_values: torch.Tensor, tiles: Arrangement | None = None, positions: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Turns pixels `(R, num_images, ...)` into image tokens `(R, num_images, tokens, context_size)`."""
        return self.outputs(pixel_values, tiles, positions)[1]

    def outputs(
        self,
        pixel_values: torch.Tensor,
        tiles: Arrangement | None = None,
        positions: torch.Tensor | None = None,
        skips_padding: bool = False,
        **returns: bool | None,
    ) -> tuple[BaseModelOutput, torch.Tensor]:
        """Runs the vision tower and the connector on pixels `(R, num_images, ...)`.

        Args:
            positions (`torch.LongTensor`, *optional*): `(R, num_images)`, see [`XAttnConnector`].
            skips_padding (`bool`, defaults to `False`): Whether padding tiles, which no text may see, skip the
                connector and become zeros.
            returns (`bool`, *optional*): What the output of the tower shall hold, see [`run_tower`].

        Returns:
            the output of the tower, and the image tokens `(R, num_images, tokens, context_size)`.
        """
        assert self.vision_tower is not None and self.connector is not None
        check_square(self.config, pixel_values)
        if is_distributed():
            check_callable("vision_tower", self.vision_tower)
            check_callable("connector", self.connector)
        output = run_tower(self.vision_tower, pixel_values, tiles, self.config.vision_feature_layer, **returns)
        assert output.last_hidden_state is not None
        return output, self.connected(output.last_hidden_state, pixel_values.shape[:2], tiles, positions, skips_padding)

    def connected(
        self,
        features: torch.Tensor,
        images: tuple[int, ...],
        tiles: Arrangement | None,
        positions: torch.Tensor | None = None,
        skips_padding: bool = False,
    ) -> torch.Tensor:
        """Turns a tower's `last_hidden_state` into image tokens `(R, num_images, tokens, context_size)`.

        `images` is `(R, num_images)`.
        """
        assert self.connector is not None
        if tiles is not None:
            return tiles.connect(self.connector, features, positions, skips_padding)
        if features.dim() == 4:  # a feature map (batch, channels, height, width)
            check_square(self.config, features)
            features = features.flatten(2).transpose(1, 2)
        if self.config.vision_feature_select_strategy == "default":
            features = features[:, 1:]  # drops the class token
        of_images = {} if positions is None else {"positions": positions.flatten()}
        return self.connector(features, **of_images).unflatten(0, images)

    def _of_tower_outputs(self, images: ImageInputs, real: torch.Tensor | None) -> torch.Tensor:
        """Turns `vision_features` into image tokens `(R, n, tokens, context_size)`.

        `real` `(R, n)` is False for padding images. The tower does not run, unless other processes wait for it (see
        `learning/stand_in.py`).
        """
        features = images.images
        assert features is not None and self.vision_tower is not None and self.connector is not None
        check_not_trained(self.vision_tower)
        shape = features.shape[:2]
        features = _without_padding_images(features, real).to(self.dtype_of(images))
        if is_distributed():
            check_callable("connector", self.connector)
            if self.tower_is_waited_for():  # it runs before the connector, as in the other processes
                features = features + self._zero_of_tower(features)
        features = features.flatten(0, 1) if images.tiles is None else features
        return self.connected(features, shape, images.tiles, images.positions, skips_padding=True)

    def tower_is_waited_for(self) -> bool:
        """Whether DDP or FSDP in other processes may wait until the tower has run in this process, too."""
        tower = self.vision_tower
        learns = tower is not None and torch.is_grad_enabled() and any(w.requires_grad for w in tower.parameters())
        return learns or has_units(tower)

    def _zero_of_tower(self, features: torch.Tensor) -> torch.Tensor:
        """Returns a zero that depends on the weights of the tower, which runs on one blank image for this."""
        assert self.vision_tower is not None and self.config.vision_config is not None
        check_callable("vision_tower", self.vision_tower)
        output = run_tower(self.vision_tower, *blank_image(self.config.vision_config, features.device, features.dtype))
        assert output.last_hidden_state is not None
        return output.last_hidden_state.flatten()[:0].sum()

    def features_of(self, images: ImageInputs, real: torch.Tensor | None = None) -> torch.Tensor:
        """Returns the image tokens `(R, n, tokens, context_size)` of pixels or of tower outputs.

        `cross_attention_states` are returned as they are. `real` `(R, n)` is False for padding images.
        """
        assert images.images is not None
        if not images.pass_connector:
            return images.images
        encoded, shape, coordinates = real, images.images.shape[:2], None if real is None else real_coordinates(real)
        if coordinates is not None and real is not None:
            encoded = None if coordinates else real[:1, :1]
            coordinates = coordinates or [(0, 0)]  # at least one image, because other processes may wait for this
            images = images.at(coordinates)
        given = images.images
        assert given is not None
        if images.name == "pixel_values":
            pixels = given if encoded is None else _without_padding_images(given, encoded)
            features = self.outputs(pixels, images.tiles, images.positions, skips_padding=True)[1]
        else:
            features = self._of_tower_outputs(images, encoded)
        return features if coordinates is None else _at_coordinates(features, coordinates, shape)

    def digests(self, inputs: ImageInputs) -> Digests:
        """Computes the digests of the images of a call. Equal images in the model's dtype get equal digests."""
        images, real, name = inputs.images, inputs.real_images, inputs.name
        assert images is not None and name is not None
        computed, sizes = self.dtype_of(inputs), (1,) * images.shape[1]
        dtype = images.dtype if images.dtype.itemsize < computed.itemsize else computed
        images = images.to(computed)
        if not inputs.pass_connector:  # a number for each token
            sizes = (images.shape[2],) * images.shape[1]
            real = None if real is None else real.repeat_interleave(images.shape[2], dim=1)
            images = images.flatten(1, 2)
        values = digest(images)
        if inputs.tiles is not None:  # images of different kinds get different digests
            values = values + inputs.tiles.kinds.to(values) * 6364136223846793005
        return Digests(name, dtype, values, real, sizes)

    def dtype_of(self, inputs: ImageInputs) -> torch.dtype:
        """Returns the dtype to which the model casts pixels or features."""
        assert inputs.images is not None
        tower = self.vision_tower if inputs.pass_connector else None
        dtype = self.find_like().dtype if tower is None else tower.dtype
        # A quantized projection computes in the dtype of its input.
        return dtype if dtype.is_floating_point else inputs.images.dtype

    def learns(self) -> bool:
        """Whether any weight between pixels and keys and values requires a gradient."""
        parts = [part for part in (self.vision_tower, self.connector) if part is not None]
        return self.find_like().requires_grad or any(
            weight.requires_grad for part in parts for weight in part.parameters()
        )


def _at_coordinates(images: torch.Tensor, coordinates: list[tuple[int, int]], shape: tuple[int, ...]) -> torch.Tensor:
    """Puts images `(count, 1, ...)` at their coordinates (row, image) in a tensor `(R, n, ...)` of zeros."""
    padded = images.new_zeros(*shape, *images.shape[2:])
    rows, columns = torch.tensor(coordinates, device=images.device).unbind(dim=1)
    padded[rows, columns] = images[:, 0]
    return padded


def _without_padding_images(images: torch.Tensor, real: torch.Tensor | None) -> torch.Tensor:
    """Sets padding images in `(R, n, ...)` to zero. `real` is `(R, n)`.

    Padding may hold NaN, and 0 times NaN is NaN, also in the gradient of a projection.
    """
    if real is None:
        return images
    padding = ~real.to(images.device)
    return images.masked_fill(padding.view(*real.shape, *[1] * (images.dim() - 2)), 0)


def without_padding_tokens(features: torch.Tensor, token_mask: torch.Tensor | None) -> torch.Tensor:
    """Sets the tokens that no text may see to zero. Attention multiplies their values by 0, and 0 times NaN is NaN.

    Args:
        features (`torch.Tensor`): `(R, n, tokens, width)`.
        token_mask (`torch.BoolTensor`, *optional*): `(rows, n * tokens)`. `R` divides `rows`, because text rows that
            share an image row may see different tokens. A mask that also covers other images is not used.
    """
    rows, num_images, tokens = features.shape[:3]
    if token_mask is None or token_mask.shape[1] != num_images * tokens:
        return features
    real = rows_to(token_mask, max(rows, token_mask.shape[0])).unflatten(0, (rows, -1)).any(dim=1)
    return features.masked_fill(~real.view(rows, num_images, tokens, 1), 0)
