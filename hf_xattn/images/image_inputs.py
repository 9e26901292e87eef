"""Checks the image arguments of a call once, and makes one object of them: [`ImageInputs`].

`forward`, `generate` and `encode_images` take these shapes (batch = text rows, T = text tokens, n = images, N = image
tokens):

    pixel_values             (batch, n, channels, height, width)
                             (batch, channels, height, width) with one image for each row
                             (batch, n, max_num_tiles, channels, height, width) with a tiled vision tower
    vision_features          (batch, n, tokens, width)
                             (batch, tokens, width) with one image for each row
                             (batch, n, max_num_tiles, tokens, width) with a tiled vision tower
                             (batch, n, width, height, width) with a convolutional vision tower
    cross_attention_states   (batch, N, context_size), or (batch, n, tokens, context_size)
    image_mask               (batch, n), False for a padding image
    cross_attention_mask     (batch, N), False for a padding token
                             (batch, T, N), which image tokens each text token may see
                             (batch, T, n, max_num_tiles), which tiles each text token may see
    image_attention_mask     (batch, T, n), which images each text token may see (as in Idefics)

In masks, n and N count the images of the call, or all images: those of the cache, followed by those of the call. T is
the length of the text of the call. In `generate`, T may also be the length of the whole text; the rows of cached text
then decide nothing, because that text has been read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..cache.image_layout import rows_to
from ..cache.text_progress import CallersMask
from ..configuration_xattn import XAttnConfig
from ..utils.architectures import vision_feature_size
from ..utils.tensor_checks import (
    check_bool,
    check_floating,
    check_integers,
    check_no_bias,
    check_states,
    check_tensor,
    has_values,
)
from .tower import ARRANGEMENTS, Arrangement, Ratios


IMAGE_ARGUMENTS = (
    "pixel_values",
    "image_mask",
    "cross_attention_states",
    "cross_attention_mask",
    "aspect_ratio_ids",
    "aspect_ratio_mask",
    "image_attention_mask",
    "image_rows",
    "vision_features",
)
# The arguments that hold images. A call has at most one of them.
IMAGES = ("pixel_values", "vision_features", "cross_attention_states")
MASKS = ("image_mask", "token_mask", "text_mask")  # the fields of [`ImageInputs`] that are masks
NO_IMAGE = -1  # marks a text row without an image in `image_rows`


@dataclass(frozen=True)
class ImageAxis:
    """An image axis that a mask of the caller may have."""

    sizes: tuple[int, ...]  # number of tokens of each image on the axis
    first: int = 0  # number of cached image tokens that are not on the axis, because it begins after them
    # `(rows, cached images)`, False for cached images that are padding, which a mask must not show; None if no image is
    # padding, or if the `image_mask` of the call says which images are
    real: torch.Tensor | None = None

    def check_shown(self, name: str, mask: torch.Tensor) -> None:
        """Raises a `ValueError` if a mask `(B, T, tokens of this axis)` shows an image that is padding in the cache."""
        if self.real is None or not has_values(mask):
            return
        of_images = torch.stack([part.any(dim=-1).any(dim=1) for part in mask.split(self.sizes, dim=-1)], dim=-1)
        shown = of_images[:, : self.real.shape[1]] & ~rows_to(self.real, mask.shape[0]).to(mask.device)
        if bool(shown.any()):
            row, image = shown.nonzero()[0].tolist()
            raise ValueError(
                f"Expected `{name}` to hide what is padding in `cache`, got a mask that shows image {image} "
                f"of row {row}, for which `image_mask` was False. Set its entries to False, or pass it as a "
                "new image."
            )


@dataclass(frozen=True)
class ImageInputs:
    """The images and masks of one call: `R` image rows for `B` text rows."""

    name: str | None = None  # name of the argument with the images; None if the call has no images
    # `(R, n, ...)`: pixels, outputs of the vision tower, or image tokens `(R, n, tokens, context_size)`
    images: torch.Tensor | None = None
    tiles: Arrangement | None = None  # None if the vision tower reads whole images
    image_mask: torch.Tensor | None = None  # (rows, n)
    token_mask: torch.Tensor | None = None  # (rows, N)
    text_mask: torch.Tensor | None = None  # (B, T, N) or (B, T, n, tiles)
    text_mask_name: str = "cross_attention_mask"  # name of the argument with `text_mask`
    image_rows: torch.Tensor | None = None  # `(B,)`, which of the `R` image rows each text row looks at
    # `(R, n)`, number of each image among all images of its row; None if the connector does not read it
    positions: torch.Tensor | None = None

    @classmethod
    def of(cls, config: XAttnConfig, **given: torch.Tensor | None) -> ImageInputs:
        """Makes the checks that need neither the text nor a cache.

        Args:
            config ([`XAttnConfig`]): Configuration of the model.
            given: The image arguments of the call, with the names of `IMAGE_ARGUMENTS`.

        Raises:
            TypeError: for arguments that are not tensors, masks that are not boolean, or images that are not floating
                point.
            ValueError: for contradictory arguments, or a wrong rank or width.
        """
        name, is_empty = None, True
        for argument, value in given.items():
            if value is not None:
                check_tensor(argument, value)
                is_empty = False
        if is_empty:
            return NO_IMAGES
        for argument in IMAGES:
            if given.get(argument) is not None:
                if name is not None:
                    raise ValueError(f"Expected `{name}` or `{argument}`, not both.")
                name = argument
        images, tiles = _checked_images(config, name, given)
        image_mask = given.get("image_mask")
        if image_mask is not None:
            check_bool("image_mask", image_mask)
            if image_mask.dim() != 2 or (images is not None and image_mask.shape != images.shape[:2]):
                expected = "" if images is None else f"{tuple(images.shape[:2])} "
                raise ValueError(
                    f"Expected `image_mask` of shape {expected}(batch, num_images), got {tuple(image_mask.shape)}."
                )
        mask, by_image = given.get("cross_attention_mask"), given.get("image_attention_mask")
        masks = {} if mask is None and by_image is None else _checked_masks(mask, by_image)
        return cls(name, images, tiles, image_mask, image_rows=given.get("image_rows"), **masks)

    def each_image(self, change: Callable[[torch.Tensor], torch.Tensor]) -> ImageInputs:
        """Returns the images without masks, and applies `change` to each of their tensors `(R, n, ...)`."""
        return ImageInputs(
            name=self.name,
            images=None if self.images is None else change(self.images),
            tiles=None if self.tiles is None else self.tiles.each(change),
            positions=None if self.positions is None else change(self.positions),
        )

    def at(self, coordinates: list[tuple[int, int]]) -> ImageInputs:
        """Returns the images at `coordinates` (row, image), each in a row of its own."""
        index = torch.tensor(coordinates)

        def take(tensor: torch.Tensor) -> torch.Tensor:
            rows, images = index.to(tensor.device).unbind(dim=1)
            return tensor[rows, images][:, None]

        return self.each_image(take)

    @property
    def pass_connector(self) -> bool:
        """Whether the images of the call go through the connector: pixels and outputs of the tower do."""
        return self.name in ("pixel_values", "vision_features")

    @property
    def real_images(self) -> torch.Tensor | None:
        """Which of the given images are real, `(R, n)`; None if all are, or there are no images."""
        if self.image_mask is None and self.tiles is not None:
            return self.tiles.kinds > 0
        return self.image_mask

    def check_device(self, device: torch.device, place: str) -> None:
        """Raises a `ValueError` if images or masks are not on `device`.

        `place` says in the error what is on that device: the text or the images.
        """
        for name, value in (
            (self.name, self.images),
            ("image_mask", self.image_mask),
            ("cross_attention_mask", self.token_mask),
            (self.text_mask_name, self.text_mask),
            ("image_rows", self.image_rows),
        ):
            if value is not None and value.device != device:
                raise ValueError(
                    f"Expected `{name}` and the {place} on the same device, got {value.device} and {device}."
                )

    def check_rows(self, text_rows: int | None, cached_rows: int) -> None:
        """Raises a `ValueError` if the batches of text, images, masks and cache do not fit together.

        Args:
            text_rows (`int`, *optional*): Number of text rows; None if there is no text yet.
            cached_rows (`int`): Number of image rows in the cache; 0 if it holds no images.
        """
        images = self.images
        if self.image_rows is not None:
            self._check_image_rows(self.image_rows, text_rows, cached_rows)
        if images is None and not cached_rows:
            for argument, mask in (
                ("image_mask", self.image_mask),
                ("cross_attention_mask", self.token_mask),
                (self.text_mask_name, self.text_mask),
            ):
                if mask is not None:
                    raise ValueError(
                        f"`{argument}` was given without images. Pass `pixel_values` or `cross_attention_states`, or a "
                        "cache that holds images."
                    )
            return
        image_rows = cached_rows or text_rows
        if images is not None and self.image_rows is not None:
            image_rows = images.shape[0]
        if images is not None and image_rows is not None and images.shape[0] != image_rows:
            raise ValueError(
                f"Expected `{self.name}` of batch {image_rows}, got batch {images.shape[0]}. To ask many questions "
                "about one image, encode it once with `encode_images` and pass the cache, or in training name each "
                "text row's image in `image_rows`."
            )
        allowed = {text_rows, cached_rows, None if images is None else images.shape[0]} - {None, 0}
        if images is not None and self.image_rows is not None:
            allowed = {images.shape[0]}  # a mask without a text axis belongs to the images
        for argument, mask in (("image_mask", self.image_mask), ("cross_attention_mask", self.token_mask)):
            if mask is not None and mask.shape[0] not in allowed:
                raise ValueError(f"Expected `{argument}` of batch {_either(allowed)}, got batch {mask.shape[0]}.")
        if self.text_mask is not None and text_rows is not None and self.text_mask.shape[0] != text_rows:
            raise ValueError(
                f"Expected `{self.text_mask_name}` of batch {text_rows}, got batch {self.text_mask.shape[0]}."
            )

    def _check_image_rows(self, image_rows: torch.Tensor, text_rows: int | None, cached_rows: int) -> None:
        check_integers("image_rows", image_rows)
        if image_rows.dim() != 1 or (text_rows is not None and image_rows.shape[0] != text_rows):
            expected = "(batch,)" if text_rows is None else f"{(text_rows,)} (batch,)"
            raise ValueError(
                f"Expected `image_rows` of shape {expected}, one number for each text row, got "
                f"{tuple(image_rows.shape)}."
            )
        if cached_rows:
            raise ValueError(
                f"Expected no `image_rows` beside images in `cache`: its {cached_rows} image rows are shared in "
                "equal numbers."
            )
        if self.images is None:
            raise ValueError("`image_rows` was given without images. Pass `pixel_values` or `cross_attention_states`.")

    def rows_of_text(self) -> torch.Tensor | None:
        """Returns `image_rows` `(B,)`. None if the text rows share the image rows in equal numbers and in order.

        On a GPU, this waits for the values.

        Raises:
            ValueError: for a number that is no image row, and for an image row that no text row looks at.
        """
        if self.image_rows is None or self.images is None:
            return None
        count, rows = self.images.shape[0], self.image_rows.tolist()
        for text_row, image_row in enumerate(rows):
            if not NO_IMAGE <= image_row < count:
                raise ValueError(
                    f"Expected `image_rows` from 0 to {count - 1}, the rows of the images, or {NO_IMAGE} for a text "
                    f"row without an image, got {image_row} for text row {text_row}."
                )
        if unused := sorted({*range(count)} - {*rows}):
            raise ValueError(
                f"Expected `image_rows` to name each of the {count} rows of images, got none for {unused}: {rows}. "
                "Leave out images that no text row looks at. A batch that was cut or joined after it was made "
                "(accelerate's `dispatch_batches`) needs new `image_rows`."
            )
        in_order = rows == [row for row in range(count) for _ in range(len(rows) // count)]
        return None if in_order else self.image_rows

    def callers_mask(self, axes: list[ImageAxis], text_lens: tuple[int, ...]) -> CallersMask:
        """Returns `text_mask` with an entry for each text token and image token.

        Raises a `ValueError` if the mask has a wrong shape.
        """
        mask = self.text_mask
        assert mask is not None
        tiled = mask.dim() == 4
        if mask.shape[1] in text_lens:
            for axis in axes:
                if tiled and mask.shape[2] == len(axis.sizes) and all(size % mask.shape[3] == 0 for size in axis.sizes):
                    mask, tiled = _of_tokens(mask, axis.sizes), False
                if not tiled and mask.shape[2] == sum(axis.sizes):
                    axis.check_shown(self.text_mask_name, mask)
                    return CallersMask(mask, axis.first)
        raise ValueError(self._text_mask_error(axes, text_lens))

    def _text_mask_error(self, axes: list[ImageAxis], text_lens: tuple[int, ...]) -> str:
        assert self.text_mask is not None
        batch, _, _, *tiles = self.text_mask.shape
        by_image = self.text_mask_name == "image_attention_mask"
        got = tuple(self.text_mask.shape[:3] if by_image else self.text_mask.shape)
        wanted, what = [], "(batch, text_len, num_image_tokens)"
        for length in sorted(set(text_lens)):
            for axis in axes:
                if not tiles:
                    wanted.append(f"({batch}, {length}, {sum(axis.sizes)})")
                elif by_image:
                    wanted.append(f"({batch}, {length}, {len(axis.sizes)})")
                    what = "(batch, text_len, num_images)"
                else:
                    wanted.append(f"({batch}, {length}, {len(axis.sizes)}, tiles)")
                    tokens = f"where the tiles divide an image's tokens ({_either(axis.sizes)})"
                    what = f"(batch, text_len, num_images, tiles), {tokens}"
        return f"Expected `{self.text_mask_name}` of shape {' or '.join(wanted)} {what}, got {got}."


NO_IMAGES = ImageInputs()


def refuse_to_cache(what: str) -> None:
    """Raises the `ValueError` for a call with `image_rows` that needs a cache.

    `what` names the argument or the method that needs the cache.
    """
    raise ValueError(
        f"Expected `image_rows` without a cache, as in training, got it with {what}. A cache shares images in equal "
        "numbers: call `encode_images` once and pass the result as `cache`, with the questions about the "
        "first image first, and as many about each image."
    )


def _checked_images(
    config: XAttnConfig, name: str | None, given: dict[str, torch.Tensor | None]
) -> tuple[torch.Tensor | None, Arrangement | None]:
    """Returns the images of the argument `name`, with an axis 1 for the images of a row, and their arrangement."""
    ratios = {"aspect_ratio_ids": given.get("aspect_ratio_ids"), "aspect_ratio_mask": given.get("aspect_ratio_mask")}
    images = None if name is None else given[name]
    if name is None or images is None or name == "cross_attention_states":
        for argument, value in ratios.items():
            if value is not None:
                raise ValueError(f"`{argument}` was given without `pixel_values`, but it describes their tiles.")
        if images is not None:
            _check_states(config, images)
            images = images[:, None] if images.dim() == 3 else images
        return images, None
    vision: Any = config.vision_config
    if vision is None:
        raise ValueError(
            f"Expected no `{name}`, because this model has no vision tower (`config.vision_config` is None). Pass "
            "image features as `cross_attention_states`, or retrofit with `vision=`."
        )
    check_floating(name, images, remedy=": run the image processor first" if name == "pixel_values" else "")
    shape, tiles = tuple(images.shape), None
    if (arrangement := ARRANGEMENTS.get(vision.model_type)) is None:
        images = _whole_images(config, name, images, ratios)
    else:
        tiles = arrangement.of(config, name, images, ratios)
    channels = getattr(vision, "num_channels", None)
    if name == "pixel_values" and channels is not None and shape[-3] != channels:
        raise ValueError(f"Expected `pixel_values` with {channels} channels, got {shape[-3]} channels (shape {shape}).")
    if 0 in shape:
        raise ValueError(f"Expected `{name}` with at least one image, got no image: the shape is {shape}.")
    return images, tiles


def _whole_images(config: XAttnConfig, name: str, given: torch.Tensor, ratios: Ratios) -> torch.Tensor:
    vision: Any = config.vision_config
    for ratio, value in ratios.items():
        if value is not None:
            raise ValueError(f"Expected no `{ratio}`, because the vision tower ({vision.model_type}) takes no tiles.")
    shape = tuple(given.shape)
    if name == "pixel_values":
        if len(shape) not in (4, 5):
            raise ValueError(
                "Expected `pixel_values` of shape (batch, num_images, channels, height, width) or (batch, channels, "
                f"height, width), got {shape}."
            )
        return given[:, None] if len(shape) == 4 else given
    width = vision_feature_size(config)
    if not ((len(shape) in (3, 4) and shape[-1] == width) or (len(shape) == 5 and shape[2] == width)):
        raise ValueError(
            f"Expected `vision_features` of shape (batch, num_images, tokens, width={width}) or (batch, tokens, "
            f"width={width}), or (batch, num_images, width={width}, height, width) of a convolutional tower, the "
            f"`last_hidden_state` of the vision tower, got {shape}."
        )
    return given[:, None] if len(shape) == 3 else given


def _check_states(config: XAttnConfig, states: torch.Tensor) -> None:
    width = config.cross_attention_config.context_size
    of_tower = None if config.vision_config is None else vision_feature_size(config)
    if states.shape[-1:] == (of_tower,) and of_tower != width:
        raise ValueError(
            f"Expected `cross_attention_states` of width {width} (`context_size`), got {tuple(states.shape)}, which "
            "has the width of the vision tower. Pass what the tower returns as `vision_features`: then it goes through "
            "the connector."
        )
    check_states(states, width, by_image=True)


def refuse_lost_mask(pixel_values: torch.Tensor) -> None:
    """Raises a `ValueError` for an image that is all zeros: it is padding, and its `image_mask` was lost."""
    if not has_values(pixel_values) or pixel_values.dim() < 5:
        return
    padding = ~pixel_values.flatten(2).any(dim=-1)
    if bool(padding.any()):
        row, image = padding.nonzero()[0].tolist()
        raise ValueError(
            f"Expected `image_mask` beside padding, got none, and image {image} of row {row} in `pixel_values` holds "
            "only zeros. TRL's GRPO and RLOO pass no `image_mask`: give all their rows the same number of images. "
            "If this image is real, pass an `image_mask` that says so."
        )


def _checked_masks(mask: torch.Tensor | None, by_image: torch.Tensor | None) -> dict[str, Any]:
    """Returns the fields of [`ImageInputs`] for a `cross_attention_mask` or an `image_attention_mask`."""
    if by_image is not None:
        if mask is not None:
            raise ValueError("Expected `image_attention_mask` or `cross_attention_mask`, not both.")
        if by_image.dim() != 3:
            raise ValueError(
                f"Expected `image_attention_mask` of shape (batch, text_len, num_images), got {tuple(by_image.shape)}."
            )
        check_no_bias("image_attention_mask", by_image)
        # each image counts as one tile
        return {"text_mask": (by_image != 0)[..., None], "text_mask_name": "image_attention_mask"}
    assert mask is not None
    if mask.dim() not in (2, 3, 4):
        raise ValueError(
            "Expected `cross_attention_mask` of shape (batch, num_image_tokens), (batch, text_len, num_image_tokens) "
            f"or (batch, text_len, num_images, max_num_tiles), got {tuple(mask.shape)}."
        )
    if mask.dim() == 4:
        check_no_bias("cross_attention_mask", mask)
        return {"text_mask": mask != 0}  # Mllama's processor returns integers
    check_bool("cross_attention_mask", mask)
    return {"token_mask" if mask.dim() == 2 else "text_mask": mask}


def _of_tokens(mask: torch.Tensor, sizes: tuple[int, ...]) -> torch.Tensor:
    """Turns a mask over tiles `(B, T, n, tiles)` into a mask over image tokens `(B, T, N)`."""
    tiles = mask.shape[3]
    columns = [image * tiles + token * tiles // size for image, size in enumerate(sizes) for token in range(size)]
    return mask.flatten(2)[:, :, torch.tensor(columns, device=mask.device)]


def _either(values: Any) -> str:
    return " or ".join(str(value) for value in sorted(set(values)))
