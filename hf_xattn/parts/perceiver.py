"""The perceiver resampler: turns the features of an image, of any number, into a fixed, smaller number of image tokens.

Learned latents attend to the features and to the latents (Flamingo, Alayrac et al., 2022, appendix A.1.1). Each layer
computes `latents + attention(latents, [features; latents])`, then `latents + MLP(latents)`. A LayerNorm follows the
last layer. No projection has a bias.

With `num_image_positions`, a learned vector is first added to the features of each image. It depends on the number of
real images before this image in its row (flamingo-pytorch's `media_pos_emb`, OpenFlamingo's `media_time_embs`). Images
of the cache count, so that later turns go on counting. Padding images do not count. In a packed row, each sample counts
from 0.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn
from transformers import initialization as init
from transformers.activations import ACT2FN

from ..cache.image_layout import ImageLayout, rows_to, values_of_text
from ..cache.visibility import image_order
from ..configuration_xattn import PerceiverConfig, XAttnConfig
from ..images.image_inputs import ImageInputs
from ..utils.parts import CONNECTORS, ValuesComeLater
from ..utils.projection import ImageLinear
from ..utils.tensor_checks import has_values
from .packed_rows import PackedText, places_in_samples


class PerceiverAttention(nn.Module):
    """Attention with the latents as queries, and the image tokens and the latents as keys and values."""

    def __init__(self, config: PerceiverConfig):
        super().__init__()
        width, inner = config.hidden_size, config.num_attention_heads * config.head_dim
        self.head_dim = config.head_dim
        self.context_norm = nn.LayerNorm(width, config.norm_eps)
        self.latents_norm = nn.LayerNorm(width, config.norm_eps)
        self.q_proj = nn.Linear(width, inner, bias=False)
        self.k_proj = ImageLinear(width, inner, bias=False)
        self.v_proj = ImageLinear(width, inner, bias=False)
        self.o_proj = nn.Linear(inner, width, bias=False)
        self.q_norm = nn.LayerNorm(config.head_dim, config.norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = nn.LayerNorm(config.head_dim, config.norm_eps) if config.qk_norm else nn.Identity()

    def forward(self, context: torch.Tensor, latents: torch.Tensor) -> torch.Tensor:
        latents = self.latents_norm(latents)
        both = torch.cat([self.context_norm(context), latents], dim=1)
        query, key, value = (
            states.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for states in (self.q_proj(latents), self.k_proj(both), self.v_proj(both))
        )
        output = nn.functional.scaled_dot_product_attention(self.q_norm(query), self.k_norm(key), value)
        return self.o_proj(output.transpose(1, 2).flatten(2))


class PerceiverMLP(nn.Module):
    """`down(act(up(norm(x))))`."""

    def __init__(self, config: PerceiverConfig):
        super().__init__()
        self.norm = nn.LayerNorm(config.hidden_size, config.norm_eps)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.act_fn = ACT2FN[config.hidden_act]
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, latents: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.up_proj(self.norm(latents))))


class PerceiverLayer(nn.Module):
    def __init__(self, config: PerceiverConfig):
        super().__init__()
        self.attn = PerceiverAttention(config)
        self.mlp = PerceiverMLP(config)

    def forward(self, context: torch.Tensor, latents: torch.Tensor) -> torch.Tensor:
        latents = latents + self.attn(context, latents)
        return latents + self.mlp(latents)


class PerceiverResampler(nn.Module):
    """Maps the tokens of each image to `num_latents` tokens."""

    reads_positions = True

    def __init__(self, config: PerceiverConfig):
        super().__init__()
        self.latents = nn.Parameter(torch.randn(config.num_latents, config.hidden_size))
        self.image_positions = (
            nn.Parameter(torch.randn(config.num_image_positions, config.hidden_size))
            if config.num_image_positions
            else None
        )
        self.numbering = ImagePositions(config.num_image_positions) if config.num_image_positions else None
        self.layers = nn.ModuleList([PerceiverLayer(config) for _ in range(config.num_hidden_layers)])
        self.norm = nn.LayerNorm(config.hidden_size, config.norm_eps)

    def write_first_values(self) -> None:
        init.normal_(self.latents, mean=0.0, std=1.0)
        if self.image_positions is not None:
            init.normal_(self.image_positions, mean=0.0, std=1.0)

    def forward(self, features: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
        """Turns features `(..., tokens, width)` into image tokens `(..., num_latents, width)`.

        `positions` has the number of each image in its row, from 0, in the shape of the first axes of `features`. None
        means that each image is the first of its row. It is read only with `num_image_positions`.
        """
        if self.image_positions is not None:
            if positions is None:
                positions = torch.zeros((), dtype=torch.long, device=features.device)
            added = self.image_positions.to(features.dtype)[positions.to(self.image_positions.device)]
            features = features + added.reshape(*positions.shape, *[1] * (features.dim() - 1 - positions.dim()), -1)
        context = features.flatten(0, -3)
        latents = self.latents.to(features.dtype).expand(context.shape[0], -1, -1)
        for layer in self.layers:
            latents = layer(context, latents)
        return self.norm(latents).unflatten(0, features.shape[:-2])


def perceiver(config: XAttnConfig) -> list[nn.Module]:
    assert config.perceiver_config is not None
    with ValuesComeLater():
        return [PerceiverResampler(config.perceiver_config)]


CONNECTORS.register("perceiver", perceiver)


class ImagePositions:
    """Numbers the images of a row. It implements the protocol [`Numbering`] of the core.

    `count` is the number of positions that the resampler has learned.
    """

    def __init__(self, count: int):
        self.count = count

    def in_row(self, images: ImageInputs, real: torch.Tensor | None, cached: ImageLayout | None) -> ImageInputs:
        """Adds `positions` to the new images of a call.

        Args:
            images ([`ImageInputs`]): The new images, `(R, n, ...)`. Images of packed rows already have `positions`.
            real (`torch.BoolTensor`, *optional*): `(R, n)`, False for a padding image; None if all are real.
            cached ([`ImageLayout`], *optional*): Layout of the images in the cache.

        Raises:
            ValueError: if a row has more images than positions.
        """
        if images.positions is not None or not images.pass_connector:
            return images
        assert images.images is not None
        rows, num_images = images.images.shape[:2]
        device = images.images.device
        before = _in_cache(cached, rows)
        if real is None and isinstance(before, int):
            positions = torch.arange(before, before + num_images, device=device).expand(rows, -1)
        else:
            given = torch.ones(rows, num_images, dtype=torch.bool, device=device) if real is None else real
            positions = given.cumsum(dim=1) - 1 + (before if isinstance(before, int) else before[:, None].to(device))
            positions = torch.where(given, positions, 0)  # padding gets position 0; no text sees it
        held = 0 if cached is None else cached.num_images
        # With padding, all rows may have fewer images than the tensor has. Compiled code cannot read how many.
        if num_images and held + num_images > self.count and not (real is None and isinstance(before, int)):
            most = held + num_images if torch.compiler.is_compiling() else int(positions.max()) + 1
        else:
            most = held + num_images
        if most > self.count:
            raise ValueError(
                f"Expected at most {self.count} images in a row (`perceiver_config.num_image_positions`), got "
                f"`{images.name}` with image {most} of a row."
            )
        return replace(images, positions=positions)

    def in_samples(
        self, config: XAttnConfig, images: ImageInputs, text: PackedText, rows: torch.Tensor | None
    ) -> ImageInputs:
        """Adds `positions` to the images of packed rows.

        Raises:
            ValueError: if a packed row has more or fewer markers than images, if a sample has more images than
                positions, or if text rows that share images have them at different numbers of their samples.
        """
        if not images.pass_connector:
            return images
        assert images.images is not None
        shape = images.images.shape[:2]
        real = images.real_images
        order = image_order(text.starts.new_ones(shape) if real is None else real)
        order = rows_to(order, len(text.starts)) if rows is None else values_of_text(order, rows)
        markers = torch.zeros_like(text.starts) if text.markers is None else text.markers
        text.check_images(config, (order > 0).sum(dim=-1), markers.sum(dim=-1))
        places = places_in_samples(order, markers, text.starts)
        if shape[1] > self.count and torch.compiler.is_compiling():
            said = "A sample has more images than positions. Run this call without `torch.compile` to read which."
            torch._assert_async((places < self.count).all(), said)
        elif shape[1] > self.count and int(places.max()) >= self.count:
            raise ValueError(
                f"Expected at most {self.count} images in a sample (`perceiver_config.num_image_positions`), got "
                f"`{images.name}` with image {int(places.max()) + 1} of a sample."
            )
        if len(places) != shape[0] or rows is not None:
            index = (
                torch.arange(len(places), device=places.device) * shape[0] // len(places)
                if rows is None
                else rows.to(places.device)
            )
            index, of_text = index[index >= 0], places[index >= 0]
            places = places.new_zeros(shape).index_copy(0, index, of_text)
            if bool((places[index] != of_text).any()):
                raise ValueError(
                    "Expected packed rows that share images (`image_rows`) to have each at the same place of its "
                    "sample, because the model reads that place (`perceiver_config.num_image_positions`). Give each "
                    "text row its own images."
                )
        return replace(images, positions=places)

    def check_hidden(self, image_mask: torch.Tensor, cached: ImageLayout) -> None:
        """Raises a `ValueError` if a mask `(rows, num_images)` hides a cached image in front of a real one.

        Without the hidden image, the real one would have another number than the one with which it was encoded.
        """
        hidden = ~image_mask
        if cached.image_mask is not None:
            rows = max(len(hidden), len(cached.image_mask))
            hidden = rows_to(hidden, rows) & rows_to(cached.image_mask, rows)
        later = (hidden.cumsum(dim=1) > 0) & rows_to(image_mask, len(hidden))
        if has_values(later) and bool(later.any()):
            row = int(later.any(dim=1).nonzero()[0]) * len(image_mask) // len(later)
            raise ValueError(
                "Expected `image_mask` to hide only the last real images of a row in `cache`, got "
                f"{image_mask[row].tolist()} for row {row}: the others were encoded with their places "
                "(`perceiver_config.num_image_positions`). Pass `image_mask` to `encode_images`."
            )


def _in_cache(cached: ImageLayout | None, rows: int) -> int | torch.Tensor:
    """Returns the number of real images of each row in the cache: one number for all rows, or `(R,)`."""
    if cached is None:
        return 0
    if cached.image_mask is None:
        return cached.num_images
    counts = cached.image_mask.sum(dim=1)
    if counts.shape[0] <= rows:
        return counts.expand(rows)
    counts = counts.unflatten(0, (rows, -1))
    if has_values(counts) and bool((counts != counts[:, :1]).any()):
        raise ValueError(
            f"Expected text rows that share images to have the same number of them, got {counts.tolist()} "
            "(`image_mask`): a new image has one place for all (`perceiver_config.num_image_positions`). Give each its "
            "own images with `batch_select_indices`."
        )
    return counts[:, 0]
