"""Turns a request into the form that the engine keeps: the tokens of the prompt, and all its images as one item.

The images of a request are one item, because the engine takes one encoder input for each request. The item gets one
place in the cache for each image token that the generated text sees. The tokens of other images are only needed while
the prompt is read (see `steps.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from PIL import Image
from transformers import BatchFeature
from vllm.inputs.engine import mm_enc_dec_input, mm_input
from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems, PlaceholderRange
from vllm.multimodal.parse import ImageProcessorItems
from vllm.multimodal.processing import BaseDummyInputsBuilder, BaseProcessingInfo, EncDecMultiModalProcessor

from ..configuration_xattn import XAttnConfig
from ..images.connector import XAttnConnector
from ..images.image_encoder import ImageEncoder
from ..images.tower import blank_image, build_tower
from ..processing_xattn import TILE_INPUTS, XAttnProcessor
from .image_features import keys_of
from .mllama import processor_of
from .served import check_markers, last_seen


# vLLM's name for images among the kinds of input.
IMAGE = "image"


class XAttnProcessingInfo(BaseProcessingInfo):
    """Answers the questions that the engine asks about a model before any request."""

    def get_hf_config(self) -> XAttnConfig:
        return self.ctx.get_hf_config(XAttnConfig)

    @functools.cached_property
    def processor(self) -> XAttnProcessor:
        return processor_of(self.ctx.model_config)

    def get_hf_processor(self, **kwargs: object) -> XAttnProcessor:
        return self.processor

    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        return {IMAGE: self.most_images}

    @property
    def most_images(self) -> int:
        """Number of images that fit into one step of the engine. It is at least 1."""
        of_step = getattr(self.get_hf_config(), "tokens_of_a_step", None)
        count = 1 if of_step is None else max(1, of_step // self.tokens_per_image)
        perceiver = self.get_hf_config().perceiver_config
        if perceiver is not None and perceiver.num_image_positions:
            count = min(count, perceiver.num_image_positions)
        return count

    @property
    def tokens_per_image(self) -> int:
        """Largest number of image tokens of an image, with all its tiles.

        The number is stored in the configuration, because the engine makes a new object of this class for each chat.
        """
        config: Any = self.get_hf_config()
        if not hasattr(config, "tokens_per_image"):
            config.tokens_per_image = self._count_tokens(config)
        return config.tokens_per_image

    def _count_tokens(self, config: XAttnConfig) -> int:
        assert config.vision_config is not None
        with torch.device("meta"):
            tower, connector = build_tower(config.vision_config), XAttnConnector(config)
        encoder = ImageEncoder(config, tower, connector, lambda: next(connector.parameters()))
        pixels = torch.empty(1, 1, *self.pixel_shape, device="meta")
        _, tiles = blank_image(config.vision_config, pixels.device, pixels.dtype)
        perceiver = config.perceiver_config
        place = pixels.new_zeros(1, 1, dtype=torch.long) if perceiver and perceiver.num_image_positions else None
        with torch.no_grad():
            return encoder.features(pixels, tiles, place).shape[2]

    @functools.cached_property
    def pixel_shape(self) -> tuple[int, ...]:
        """Shape of an image after the image processor: `(channels, height, width)`.

        With tiles, the shape is `(max_num_tiles, channels, height, width)`.
        """
        return tuple(self.processor(images=[Image.new("RGB", (64, 64))])["pixel_values"].shape[2:])

    def get_mm_max_tokens_per_item(self, seq_len: int, mm_counts: Mapping[str, int]) -> Mapping[str, int]:
        return {IMAGE: self.tokens_per_image * self.allowed_mm_limits[IMAGE]}

    @property
    def skip_prompt_length_check(self) -> bool:
        return True  # Images take no place in the prompt.


class XAttnDummyInputs(BaseDummyInputsBuilder[XAttnProcessingInfo]):
    """Builds the largest possible request, with which the engine measures memory."""

    def get_dummy_text(self, mm_counts: Mapping[str, int]) -> str:
        processor = self.info.processor
        return (processor.image_token or "") * self._count(mm_counts)

    def get_dummy_mm_data(self, seq_len: int, mm_counts: Mapping[str, int], mm_options: Any) -> dict[str, Any]:
        return {IMAGE: self._get_dummy_images(width=64, height=64, num_images=self._count(mm_counts))}

    def _count(self, mm_counts: Mapping[str, int]) -> int:
        return self.info.allowed_mm_limits[IMAGE] if mm_counts.get(IMAGE) else 0


class XAttnMultiModalProcessor(EncDecMultiModalProcessor[XAttnProcessingInfo]):
    """Reads the images of a request with the model's own processor. The tokens of the prompt stay as they are."""

    # The prompt of a decoder is complete. Without this field, the engine would put a token before it.
    skip_decoder_start_token = True

    def create_encoder_prompt(self, prompt: list[int], mm_items: Any) -> list[int]:
        return prompt

    def _get_mm_fields_config(self, hf_inputs: Any, hf_processor_mm_kwargs: Any) -> Mapping[str, Any]:
        on_host = MultiModalFieldConfig.batched(IMAGE, keep_on_cpu=True)
        of_pictures = dict.fromkeys(("pixel_values", *TILE_INPUTS), MultiModalFieldConfig.batched(IMAGE))
        return {**of_pictures, "picture_names": on_host}

    def _get_prompt_updates(self, mm_items: Any, hf_processor_mm_kwargs: Any, out_mm_kwargs: Any) -> list[Any]:
        return []

    def apply(self, inputs: Any, timing_ctx: Any) -> Any:
        """Makes one item of all images of a request.

        Raises:
            ValueError: for image embeddings, for options of the processor, if the number of markers differs from the
                number of images, and for images that the image processor turns into tensors of different sizes.
        """
        prompt: list[int] = list(inputs.prompt)
        pictures = _pictures(inputs.mm_data_items)
        if inputs.hf_processor_mm_kwargs:
            raise ValueError(
                f"Expected no `mm_processor_kwargs`, got {sorted(inputs.hf_processor_mm_kwargs)}. The model's "
                "processor reads all images with its own settings. Leave the argument out."
            )
        config, info = self.info.get_hf_config(), self.info
        check_markers(info.processor, prompt, len(pictures))
        markers = [token == config.image_token_id for token in prompt]
        seen = last_seen(config.image_visibility, markers, len(pictures))
        with timing_ctx.record("apply_hf_processor"):
            try:
                made = info.processor(images=[pictures])
            except TypeError as error:  # vLLM's server passes only the message of a ValueError to the client.
                raise ValueError(str(error)) from error
        made = {name: made[name] for name in ("pixel_values", *TILE_INPUTS) if name in made}
        pixels, tokens = made["pixel_values"][0], info.tokens_per_image
        if tuple(pixels.shape[1:]) != info.pixel_shape:
            raise ValueError(
                f"Expected the image processor to return images of one shape, {info.pixel_shape}, got "
                f"{tuple(pixels.shape[1:])}. Set its `do_resize` or `size`."
            )
        lengths = [tokens] * len(pictures)
        if (tiles := made.get("aspect_ratio_mask")) is not None:
            lengths = [int(each.sum()) * tokens // len(each) for each in tiles[0]]
        names = keys_of(pixels, made["aspect_ratio_ids"][0] if "aspect_ratio_ids" in made else None)
        found = BatchFeature({**made, "picture_names": names[None]})
        items = MultiModalKwargsItems.from_hf_inputs(found, self._get_mm_fields_config(found, {}))
        # Items with the same name count as equal. The name is made from the pixels, because a client may give two
        # images the same identifier, and from the number of images that need places in the cache.
        name = f"{names.numpy().tobytes().hex()}-{seen}"
        place = PlaceholderRange(offset=0, length=sum(lengths[len(lengths) - seen :]))
        read = mm_input(
            prompt_token_ids=[0] * place.length,
            mm_kwargs=items,
            mm_hashes={IMAGE: [name]},
            mm_placeholders={IMAGE: [place]},
        )
        return mm_enc_dec_input(read, prompt)


def _pictures(items: Any) -> list[Any]:
    """Returns the images of a request. Raises a `ValueError` for anything else."""
    unknown = sorted(set(items) - {IMAGE})
    if unknown or not isinstance(items[IMAGE], ImageProcessorItems):
        raise ValueError(f"Expected images, got {', '.join(unknown) or 'image embeddings'}.")
    return items[IMAGE].get_all()
