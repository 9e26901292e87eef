"""From the images a caller gives to what the blocks get: checks, vision tower, cache, visibility."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from transformers.cache_utils import Cache, EncoderDecoderCache

from .attention import check_states
from .cache import check_cross_cache, encoded_images, image_rows, prepare_cross_cache
from .context import KEYWORD, CrossAttentionContext, Recorder
from .decoder import find_decoder
from .visibility import (
    ImageTokens,
    check_bool,
    check_cross_attention_mask,
    digest_images,
    expand_tile_mask,
    lay_out,
)
from .vision import Tiles, blank_image, check_pixels, image_mask_of, run_tower, token_mask_of


if TYPE_CHECKING:
    from .modeling_xattn import XAttnModel


@dataclass
class NewImages:
    """Images that the cache does not hold yet.

    Attributes:
        states (`torch.Tensor`): `(R, N, context_size)`.
        tokens ([`ImageTokens`]): what the N tokens are.
        text_mask (`torch.BoolTensor`, *optional*): `(B, T, N)`, the caller's decision for each text token.
    """

    states: torch.Tensor
    tokens: ImageTokens
    text_mask: torch.Tensor | None = None


class ImageEncoder:
    """Checks and encodes images for one model. Holds nothing but the model."""

    def __init__(self, model: XAttnModel):
        self.model = model
        self.config = model.config

    def check_pixels(
        self,
        pixel_values: torch.Tensor,
        image_mask: torch.Tensor | None = None,
        aspect_ratio_ids: torch.Tensor | None = None,
        aspect_ratio_mask: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, Tiles | None]:
        """Pixels as the vision tower takes them, with one entry an image on axis 1.

        Raises:
            TypeError: for pixels that are not floating point, or an `image_mask` that is not boolean.
            ValueError: for a wrong rank, number of channels or mask shape, or a model without a vision tower.
        """
        if self.model.vision_tower is None:
            raise ValueError(
                "`pixel_values` were given, but this model has no vision tower (`config.vision_config` is None). Pass "
                "image features as `cross_attention_states`, or retrofit with `vision=`."
            )
        pixel_values, tiles = check_pixels(self.config.vision_config, pixel_values, aspect_ratio_ids, aspect_ratio_mask)
        if image_mask is not None:
            _check_image_mask(image_mask, tuple(pixel_values.shape[:2]))
        return pixel_values, tiles

    def features(self, pixel_values: torch.Tensor, tiles: Tiles | None = None) -> torch.Tensor:
        """`(R, num_images, ...)` pixels to `(R, num_images, tokens an image, context_size)`."""
        drop_first = self.config.vision_feature_select_strategy == "default"
        return run_tower(self.model.vision_tower, self.model.connector, pixel_values, tiles, drop_first)

    def read(
        self,
        pixel_values: torch.Tensor | None = None,
        image_mask: torch.Tensor | None = None,
        cross_attention_states: torch.Tensor | None = None,
        cross_attention_mask: torch.Tensor | None = None,
        aspect_ratio_ids: torch.Tensor | None = None,
        aspect_ratio_mask: torch.Tensor | None = None,
        *,
        batch_size: int | None = None,
        text_len: int | None = None,
        cache: Cache | None = None,
    ) -> NewImages | None:
        """The images of a call that `cache` does not hold yet; None where there are none.

        Raises:
            TypeError, ValueError: where arguments contradict one another or their shapes do not fit.
        """
        known = encoded_images(cache)
        if pixel_values is not None and cross_attention_states is not None:
            raise ValueError("Give `pixel_values` or `cross_attention_states`, not both.")
        if pixel_values is None and cross_attention_states is None:
            if known is None:
                for name, value in (("image_mask", image_mask), ("cross_attention_mask", cross_attention_mask)):
                    if value is not None:
                        raise ValueError(
                            f"`{name}` was given without images: pass `pixel_values` or `cross_attention_states`, or a "
                            "cache that holds images."
                        )
            return None
        if pixel_values is not None:
            pixel_values, tiles = self.check_pixels(pixel_values, image_mask, aspect_ratio_ids, aspect_ratio_mask)
            new = self._read_pixels(pixel_values, tiles, image_mask, batch_size, known, digest=cache is not None)
        else:
            new = self._read_states(cross_attention_states, image_mask, batch_size, known, digest=cache is not None)
        return self._with_mask(new, cross_attention_mask, batch_size, text_len, known)

    def _read_pixels(self, pixel_values, tiles, image_mask, batch_size, known, digest):
        rows, num_images = pixel_values.shape[:2]
        check_rows("pixel_values", rows, batch_size if known is None else known_rows(known, rows))
        digests = digest_images(pixel_values) if digest else None
        skip = _num_known(known, digests, "image")
        if skip == num_images:
            return None
        if skip:
            pixel_values, digests = pixel_values[:, skip:], digests[:, skip:]
            image_mask = None if image_mask is None else image_mask[:, skip:]
            tiles = None if tiles is None else tiles.drop(skip)
        features = self.features(pixel_values, tiles)
        return _image_tokens(features, image_mask, digests, "image", tiles)

    def _read_states(self, states, image_mask, batch_size, known, digest):
        context_size = self.config.cross_attention_config.context_size
        split = states[:, None] if states.dim() == 3 else states
        if split.dim() != 4:
            check_states(states, batch_size, context_size)  # names the rank that came
        check_states(split.flatten(1, 2), batch_size if known is None else None, context_size)
        check_rows(
            "cross_attention_states", split.shape[0], batch_size if known is None else known_rows(known, split.shape[0])
        )
        if image_mask is not None:
            _check_image_mask(image_mask, tuple(split.shape[:2]))
        digests = digest_images(split.flatten(1, 2)) if digest else None
        skip = _num_known(known, digests, "token")
        new = _image_tokens(split, image_mask, digests, "token")
        if skip == new.tokens.num_tokens:
            return None
        if skip:
            image_of_token = (new.tokens.image_of_token[skip:] - known.num_images).clamp(min=0)
            mask = new.tokens.token_mask
            tokens = ImageTokens(
                num_images=max(new.tokens.num_images - known.num_images, 1),
                image_of_token=image_of_token,
                token_mask=None if mask is None else mask[:, skip:],
                image_mask=None if image_mask is None else image_mask[:, known.num_images :],
                digest=digests[:, skip:],
                digest_of="token",
            )
            return NewImages(new.states[:, skip:], tokens)
        return new

    def _with_mask(self, new, mask, batch_size, text_len, known):
        """Adds the caller's `cross_attention_mask` to what was read."""
        if mask is None or new is None:
            return new
        num_new = new.tokens.num_tokens
        if mask.dim() == 4:
            mask = expand_tile_mask(mask, num_new)
        total = num_new + (0 if known is None else known.num_tokens)
        given = mask.shape[-1]
        if mask.dim() == 2 and given == total and total != num_new:
            mask = mask[:, -num_new:]  # the images in the cache keep the mask they came with
        if mask.dim() == 3 and given != total and given == num_new:
            seen = mask.new_ones(*mask.shape[:2], total - num_new)
            mask = torch.cat([seen, mask], dim=-1)
        check_cross_attention_mask(
            mask,
            batch_size if batch_size is not None else new.states.shape[0],
            text_len,
            num_new if mask.dim() == 2 else total,
        )
        if mask.dim() == 3:
            return replace(new, text_mask=mask)
        if new.tokens.token_mask is not None:
            mask = mask & new.tokens.token_mask
        return replace(new, tokens=replace(new.tokens, token_mask=mask))

    def placeholder(self, batch_size: int) -> NewImages:
        """An image that nobody sees. Lets a rank without images call every module that the others call, so that
        collectives match and all gradients exist."""
        parameter = self.model.blocks[0].attn.k_proj.weight
        if self.model.vision_tower is None:
            states = parameter.new_zeros(batch_size, 1, self.config.cross_attention_config.context_size)
        else:
            blank = blank_image(self.config.vision_config, parameter)
            states = self.features(*blank).flatten(1, 2).expand(batch_size, -1, -1)
        new = _image_tokens(states[:, None], None, None, None)
        nothing = torch.zeros(states.shape[:2], dtype=torch.bool, device=states.device)
        return NewImages(states, replace(new.tokens, token_mask=nothing))

    def fill(self, past_key_values: EncoderDecoderCache, new: NewImages | None) -> None:
        """Projects new images to keys and values in every block, and puts them into the cross half of a cache."""
        if new is None:
            return
        cache = past_key_values.cross_attention_cache
        self._register(cache, new)
        context = CrossAttentionContext(cross_attention_states=new.states, cache=cache, encode_only=True)
        _, layers = find_decoder(self.model.text_model)
        for index in sorted({min(index, len(layers) - 1) for index in self.config.cross_attention_layers}):
            # Through the layer, not the block: device maps and FSDP bring the weights when the layer is called.
            layers[index](None, **{KEYWORD: context})
        self.mark_updated(past_key_values)

    def mark_updated(self, past_key_values: EncoderDecoderCache) -> None:
        for layer_idx in range(len(self.config.cross_attention_layers)):
            past_key_values.is_updated[layer_idx] = True

    def _register(self, cache: Cache, new: NewImages) -> ImageTokens:
        known = encoded_images(cache)
        prepare_cross_cache(cache, len(self.config.cross_attention_layers))
        tokens = new.tokens if known is None else known.append(new.tokens)
        for layer in cache.layers:
            layer.images = tokens
        return tokens

    def context(
        self,
        new: NewImages | None,
        cache: Cache | None,
        text_mask: torch.Tensor | None,
        input_ids: torch.Tensor | None,
        batch_size: int,
        text_len: int,
        self_attention_cache: Cache | None,
        position_ids: torch.Tensor | None,
        output_attentions: bool | None,
    ) -> CrossAttentionContext | None:
        """What the blocks of this forward share; None where there is nothing to look at."""
        block = self.config.cross_attention_config
        known = encoded_images(cache)
        if new is None and known is None:
            if not (self.model.training and torch.is_grad_enabled() and _is_distributed()):
                return None
            new, cache = self.placeholder(batch_size), None
        if known is not None:
            check_cross_cache(
                cache, len(self.config.cross_attention_layers), block.num_key_value_heads, block.head_dim, batch_size
            )
        if new is None:
            tokens, rows = known, image_rows(cache)
            if not torch.compiler.is_compiling():
                for layer in cache.layers:
                    layer.repeats = batch_size // rows
        elif cache is None:
            tokens, rows = new.tokens, new.states.shape[0]
        else:
            tokens, rows = self._register(cache, new), new.states.shape[0]

        if new is not None:
            text_mask = new.text_mask
        elif text_mask is not None and text_mask.dim() >= 3:
            if text_mask.dim() == 4:
                text_mask = expand_tile_mask(text_mask, tokens.num_tokens)
            check_cross_attention_mask(text_mask, batch_size, text_len, tokens.num_tokens)
        else:
            text_mask = None  # padding came with the images and is in the cache
        markers = None
        if self.config.image_visibility != "all" and text_mask is None:
            if input_ids is None:
                raise ValueError(
                    f"`image_visibility={self.config.image_visibility!r}` follows the image markers in `input_ids`: with "
                    "`inputs_embeds`, pass a `cross_attention_mask` of shape (batch, text_len, num_image_tokens)."
                )
            markers = input_ids == self.config.image_token_id
        mask, visible = lay_out(
            tokens.sees(self.config.image_visibility, markers, text_mask),
            image_rows=rows,
            text_rows=batch_size,
            text_len=text_len,
            group=block.num_attention_heads // block.num_key_value_heads,
            null_key=block.quiet_softmax,
        )
        positions = None
        if block.position_bias:
            positions = position_ids
            if positions is None:
                device = tokens.image_of_token.device
                past = 0 if self_attention_cache is None else self_attention_cache.get_seq_length()
                positions = torch.arange(text_len, device=device)[None] + past
        return CrossAttentionContext(
            cross_attention_states=None if new is None else new.states,
            cache=cache,
            mask=mask,
            visible=visible,
            query_positions=positions,
            output_attentions=output_attentions or None,
            recorder=Recorder(),
        )


def known_rows(known: ImageTokens, default: int) -> int:
    """Image rows of a cache, as far as its tokens tell."""
    for tensor in (known.digest, known.token_mask, known.image_mask):
        if tensor is not None:
            return tensor.shape[0]
    return default


def _image_tokens(features: torch.Tensor, image_mask, digests, digest_of, tiles: Tiles | None = None) -> NewImages:
    """`(R, num_images, tokens, context_size)` features, flattened and described."""
    rows, num_images, tokens = features.shape[:3]
    image_of_token = torch.arange(num_images, device=features.device).repeat_interleave(tokens)
    image_mask = image_mask_of(tiles, image_mask)
    return NewImages(
        features.flatten(1, 2),
        ImageTokens(
            num_images=num_images,
            image_of_token=image_of_token,
            token_mask=token_mask_of(tiles, image_mask, tokens),
            image_mask=image_mask,
            digest=digests,
            digest_of=digest_of,
        ),
    )


def _num_known(known: ImageTokens | None, digests: torch.Tensor | None, unit: str) -> int:
    """How many leading images (or tokens) of a call are those in the cache: all of the cache's, or none."""
    if known is None or known.digest is None or digests is None or known.digest_of != unit:
        return 0
    count = known.digest.shape[1]
    same = known.digest.shape[0] == digests.shape[0] and digests.shape[1] >= count
    return count if same and torch.equal(known.digest, digests[:, :count]) else 0


def check_rows(name: str, rows: int, expected: int | None) -> None:
    """Raises a `ValueError` where images come in another batch than expected."""
    if expected is not None and rows != expected:
        raise ValueError(
            f"`{name}` has batch {rows}, expected {expected}. To ask many questions about one image, encode it once with "
            "`encode_images` and pass the cache."
        )


def _check_image_mask(image_mask: torch.Tensor, expected: tuple[int, ...]) -> None:
    check_bool("image_mask", image_mask)
    if tuple(image_mask.shape) != expected:
        raise ValueError(f"`image_mask` must be (batch, num_images) = {expected}, got shape {tuple(image_mask.shape)}.")


def _is_distributed() -> bool:
    return (
        torch.distributed.is_available()
        and torch.distributed.is_initialized()
        and torch.distributed.get_world_size() > 1
    )
