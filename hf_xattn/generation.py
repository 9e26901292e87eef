"""What `generate` does differently: images are encoded once, before the first step, and never expanded."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache, EncoderDecoderCache, StaticCache
from transformers.masking_utils import create_masks_for_generate

from .cache import ImageCache, XAttnCache, cross_cache_like, encoded_images
from .images import check_rows


IMAGE_INPUTS = (
    "pixel_values",
    "image_mask",
    "cross_attention_states",
    "cross_attention_mask",
    "aspect_ratio_ids",
    "aspect_ratio_mask",
)


def tile_mask_of_images(kwargs: dict[str, Any]) -> dict[str, Any]:
    """`image_attention_mask` of Idefics' processor, `(batch, text_len, num_images)`, as a mask over images of one tile."""
    if kwargs.get("image_attention_mask") is None:
        return {name: value for name, value in kwargs.items() if name != "image_attention_mask"}
    if kwargs.get("cross_attention_mask") is not None:
        raise ValueError("Give `image_attention_mask` or `cross_attention_mask`, not both.")
    kwargs = dict(kwargs)
    kwargs["cross_attention_mask"] = kwargs.pop("image_attention_mask")[..., None]
    return kwargs


class XAttnGenerationMixin:
    """Overrides of transformers' `GenerationMixin`.

    With a cache, image inputs end where the cache is made: the cross half holds their keys and values, one row an image
    row, and no decoding method ever sees them. So beams and return sequences share them, assisted decoding and chunked
    prefill need no special case, and nothing is as long as the text.
    """

    def _expand_inputs_for_generation(self, expand_size: int = 1, *args, **model_kwargs):
        images = {name: model_kwargs.pop(name) for name in IMAGE_INPUTS if name in model_kwargs}
        input_ids, model_kwargs = super()._expand_inputs_for_generation(expand_size, *args, **model_kwargs)
        return input_ids, {**model_kwargs, **images}

    def _prepare_cache_for_generation(self, generation_config, model_kwargs: dict[str, Any], *args, **kwargs):
        given = model_kwargs.get("past_key_values")
        is_image_cache = isinstance(given, ImageCache) and given.get_seq_length() == 0
        if is_image_cache:
            # Asked again later, so it is not the one that grows.
            del model_kwargs["past_key_values"]
        result = super()._prepare_cache_for_generation(generation_config, model_kwargs, *args, **kwargs)
        cache = model_kwargs.get("past_key_values")
        if is_image_cache:
            if cache is None:
                raise ValueError("`past_key_values` holds encoded images, but `use_cache=False` forbids a cache.")
            cache = given.fork(cache)
        encoder = self.model.images
        images = {name: model_kwargs.pop(name, None) for name in IMAGE_INPUTS}
        if cache is None:
            new = encoder.read(**images)
            if new is not None:
                # The vision tower runs once also without a cache; keys and values are projected at every step.
                rows, states = new.states.shape[0], new.states
                model_kwargs["cross_attention_states"] = states.unflatten(1, (new.tokens.num_images, -1))
                model_kwargs["image_mask"] = new.tokens.image_mask
                model_kwargs["cross_attention_mask"] = new.tokens.token_mask if new.text_mask is None else new.text_mask
                model_kwargs["image_rows"] = rows
            return result
        if not isinstance(cache, EncoderDecoderCache):
            if cache is given and any(images[name] is not None for name in ("pixel_values", "cross_attention_states")):
                raise ValueError(
                    f"`past_key_values` is a {type(cache).__name__}, which has no place for images: pass "
                    "`EncoderDecoderCache(DynamicCache(), DynamicCache())`."
                )
            cache = XAttnCache(cache, cross_cache_like(cache, []))
        mask = images["cross_attention_mask"]
        cross_cache = cache.cross_attention_cache
        new = encoder.read(**images, cache=cross_cache)
        encoder.fill(cache, new)
        if isinstance(cache.self_attention_cache, StaticCache) and cross_cache.layers:
            cache.cross_attention_cache = cross_cache_like(cache.self_attention_cache, cross_cache.layers)
        if getattr(cache.self_attention_cache, "offloading", False):
            for layer in cache.cross_attention_cache.layers:
                layer.offload()
        if mask is not None and mask.dim() >= 3:
            model_kwargs["cross_attention_mask"] = mask if new is None else new.text_mask
        model_kwargs["past_key_values"] = cache
        return result

    def generate(self, inputs: torch.Tensor | None = None, *args, **kwargs):
        """`GenerationMixin.generate`, after a check that images and image markers in the text belong together.

        Raises:
            ValueError: where the text names images that were not given, or, with `image_visibility` other than `"all"`,
                where their numbers differ; where text and images have different batches.
        """
        kwargs = tile_mask_of_images(kwargs)
        input_ids = inputs if inputs is not None else kwargs.get("input_ids")
        self._check_markers(input_ids, kwargs)
        self._check_batch(input_ids if input_ids is not None else kwargs.get("inputs_embeds"), kwargs)
        return super().generate(inputs, *args, **kwargs)

    def _check_batch(self, text: torch.Tensor | None, kwargs: dict[str, Any]) -> None:
        # Here, because later the text may be expanded (beams), and fewer images than rows look like shared ones.
        known = encoded_images(getattr(kwargs.get("past_key_values"), "cross_attention_cache", None))
        if text is None or known is not None:
            return
        for name, ranks in (("pixel_values", (4, 5, 6)), ("cross_attention_states", (3, 4))):
            images = kwargs.get(name)
            if images is not None and images.dim() in ranks:
                check_rows(name, images.shape[0], text.shape[0])

    def _check_markers(self, input_ids: torch.Tensor | None, kwargs: dict[str, Any]) -> None:
        marker = self.config.image_token_id
        cache = kwargs.get("past_key_values")
        if marker is None or input_ids is None or (cache is not None and not isinstance(cache, ImageCache)):
            return
        if cache is not None and cache.get_seq_length() > 0:
            return
        pixel_values, states = kwargs.get("pixel_values"), kwargs.get("cross_attention_states")
        markers = (input_ids == marker).sum(dim=-1)
        if (
            pixel_values is None
            and states is None
            and encoded_images(getattr(cache, "cross_attention_cache", None)) is None
        ):
            if markers.any():
                raise ValueError(
                    f"`input_ids` holds image markers (token {marker}; {markers.tolist()} a row), but no images were given: "
                    "pass `pixel_values`, `cross_attention_states` or a cache of `encode_images`."
                )
            return
        mask = kwargs.get("cross_attention_mask")
        if self.config.image_visibility == "all" or cache is not None or (mask is not None and mask.dim() > 2):
            return  # the markers decide nothing
        images = pixel_values if pixel_values is not None else states
        if images.dim() == (4 if pixel_values is not None else 3):
            images = images[:, None]
        counts = torch.full((images.shape[0],), images.shape[1])
        if kwargs.get("image_mask") is not None:
            counts = kwargs["image_mask"].sum(dim=-1).cpu()
        elif kwargs.get("aspect_ratio_ids") is not None:
            counts = (kwargs["aspect_ratio_ids"] > 0).sum(dim=-1).cpu()
        if counts.shape == markers.shape and not torch.equal(markers.cpu(), counts):
            raise ValueError(
                f"`input_ids` holds {markers.tolist()} image markers (token {marker}) a row, but {counts.tolist()} images "
                f"were given: with `image_visibility={self.config.image_visibility!r}` each image needs its marker."
            )

    def prepare_inputs_for_generation(
        self,
        input_ids: torch.LongTensor,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        is_first_iteration: bool | None = False,
        cross_attention_states: torch.Tensor | None = None,
        cross_attention_mask: torch.Tensor | None = None,
        image_mask: torch.Tensor | None = None,
        image_rows: int | None = None,
        **kwargs,
    ) -> dict[str, Any]:
        """Adds the image inputs of one step to transformers' own."""
        inputs = super().prepare_inputs_for_generation(
            input_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            is_first_iteration=is_first_iteration,
            **kwargs,
        )
        text = inputs.get("input_ids")
        text = text if text is not None else inputs["inputs_embeds"]
        text_rows, text_len = text.shape[:2]
        if image_rows is not None:  # without a cache: the same images again, a row for each text row
            repeats = text_rows // image_rows
            for name, tensor in (("cross_attention_states", cross_attention_states), ("image_mask", image_mask)):
                inputs[name] = (
                    tensor.repeat_interleave(repeats, dim=0) if tensor is not None and repeats > 1 else tensor
                )
        if cross_attention_mask is None:
            return inputs
        mask = cross_attention_mask
        if mask.shape[0] != text_rows:
            mask = mask.repeat_interleave(text_rows // mask.shape[0], dim=0)
        if mask.dim() >= 3:
            if past_key_values is not None and not is_first_iteration:
                return inputs  # generated tokens see what the last token of the prompt saw; the cache knows
            past = 0 if past_key_values is None else int(past_key_values.get_seq_length())
            mask = mask[:, past : past + text_len] if mask.shape[1] >= past + 1 else mask[:, -text_len:]
            if mask.shape[1] < text_len:
                mask = torch.cat([mask, mask[:, -1:].expand(-1, text_len - mask.shape[1], -1)], dim=1)
        inputs["cross_attention_mask"] = mask
        return inputs

    def create_masks_for_generate(self, config, past_key_values: Cache | None = None, **kwargs):
        """The decoder's own mask rule, over the self-attention half; a state-space decoder takes the mask as it is."""
        if self._is_stateful:
            return kwargs.get("attention_mask")
        if isinstance(past_key_values, EncoderDecoderCache):
            past_key_values = past_key_values.self_attention_cache
        own = getattr(self.model.text_model, "create_masks_for_generate", create_masks_for_generate)
        text_config = self.model.text_model.config
        return own(config=text_config, past_key_values=past_key_values, **kwargs)
