"""A text decoder with gated cross-attention blocks, and optionally a vision tower.

Unlike the vision-language models of transformers, which build their own decoder, these hold any causal language model of
transformers as it is. Its layers carry the blocks (see `insertion.py`), its head gives the logits, its cache is the
self-attention half of an `EncoderDecoderCache`.
"""

from __future__ import annotations

import torch
from torch import nn
from transformers import AutoModelForCausalLM, GenerationMixin, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions, CausalLMOutputWithCrossAttentions
from transformers.utils import logging

from .cache import ImageCache, XAttnCache, encoded_images
from .configuration_xattn import XAttnConfig
from .connector import XAttnConnector
from .decoder import DecoderInterface, find_decoder, headless
from .generation import XAttnGenerationMixin, tile_mask_of_images
from .images import ImageEncoder
from .insertion import check_insertable, cross_attention_blocks, insert_blocks
from .pretrained import XAttnMoeCausalLMOutput, XAttnPreTrainedModel, keep_weights
from .vision import build_tower, follow_tower
from .vocabulary import extend_vocabulary


logger = logging.get_logger(__name__)


class XAttnModel(XAttnPreTrainedModel):
    """Decoder, blocks, connector and vision tower; gives hidden states.

    Args:
        config ([`XAttnConfig`]): the parts and where the blocks go.
        text_model (`PreTrainedModel`, *optional*): a causal language model to take over, weights and all; blocks are
            put into its layers in place. Built from `config.text_config` otherwise.
        vision_tower (`PreTrainedModel`, *optional*): a vision model to take over. Built from `config.vision_config`
            otherwise.
    """

    def __init__(
        self,
        config: XAttnConfig,
        text_model: PreTrainedModel | None = None,
        vision_tower: PreTrainedModel | None = None,
    ):
        super().__init__(config)
        for given in (text_model, vision_tower):
            if given is not None:
                keep_weights(given)
        if text_model is None:
            text_model = AutoModelForCausalLM.from_config(config.text_config)
        check_insertable(text_model)
        if config.additional_vocab_size:
            extend_vocabulary(text_model, config.additional_vocab_size, config.additional_vocab_in_head)
        self._interface = DecoderInterface.of(text_model)
        split = insert_blocks(text_model, config)
        self.text_model = text_model
        self.vision_tower = self.connector = None
        if config.vision_config is not None:
            self.vision_tower = build_tower(config.vision_config) if vision_tower is None else vision_tower
            self.connector = XAttnConnector(config)
            if vision_tower is not None:
                follow_tower(self.connector, vision_tower)
        self._no_split_modules = [*(text_model._no_split_modules or []), *split]
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.text_model.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.text_model.set_input_embeddings(value)

    def get_output_embeddings(self) -> nn.Module | None:
        return self.text_model.get_output_embeddings()

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        self.text_model.set_output_embeddings(new_embeddings)

    def get_decoder(self) -> nn.Module:
        return find_decoder(self.text_model)[0]

    @property
    def blocks(self) -> list:
        """The cross-attention blocks, in the order of the layers."""
        return cross_attention_blocks(self.text_model)

    @property
    def images(self) -> ImageEncoder:
        """Checks and encodes images for this model."""
        return ImageEncoder(self)

    def get_image_features(
        self,
        pixel_values: torch.Tensor,
        image_mask: torch.Tensor | None = None,
        aspect_ratio_ids: torch.Tensor | None = None,
        aspect_ratio_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Pixels to K/V source.

        Args:
            pixel_values, aspect_ratio_ids, aspect_ratio_mask: as in `forward`.
            image_mask (`torch.BoolTensor`, *optional*): `(batch, num_images)`, only checked here.

        Returns:
            `torch.Tensor`: `(batch, num_images, tokens an image, context_size)`.
        """
        return self.images.features(
            *self.images.check_pixels(pixel_values, image_mask, aspect_ratio_ids, aspect_ratio_mask)
        )

    @torch.no_grad()
    def encode_images(
        self,
        pixel_values: torch.Tensor | None = None,
        image_mask: torch.Tensor | None = None,
        cross_attention_states: torch.Tensor | None = None,
        cross_attention_mask: torch.Tensor | None = None,
        aspect_ratio_ids: torch.Tensor | None = None,
        aspect_ratio_mask: torch.Tensor | None = None,
        past_key_values: EncoderDecoderCache | None = None,
    ) -> EncoderDecoderCache:
        """Runs the vision tower and every block's K/V projection once, for any number of questions.

        Args:
            pixel_values, image_mask, cross_attention_states, cross_attention_mask, aspect_ratio_ids, aspect_ratio_mask: as
                in `forward`.
            past_key_values (`EncoderDecoderCache`, *optional*): append the images to this cache, in place.

        Returns:
            [`ImageCache`]: an `EncoderDecoderCache` whose cross half is filled; or `past_key_values`.

        Raises:
            ValueError: without images, or where their shapes do not fit.
        """
        cross_cache = DynamicCache() if past_key_values is None else past_key_values.cross_attention_cache
        new = self.images.read(
            pixel_values,
            image_mask,
            cross_attention_states,
            cross_attention_mask,
            aspect_ratio_ids,
            aspect_ratio_mask,
            cache=cross_cache,
        )
        if pixel_values is None and cross_attention_states is None:
            raise ValueError("`encode_images` needs `pixel_values` or `cross_attention_states`.")
        if new is not None and new.text_mask is not None:
            raise ValueError(
                "`encode_images` takes a `cross_attention_mask` of shape (batch, num_image_tokens): which text token sees "
                "what is decided with the text."
            )
        if past_key_values is None:
            past_key_values = ImageCache(DynamicCache(config=self.config.get_text_config(decoder=True)), cross_cache)
        self.images.fill(past_key_values, new)
        return past_key_values

    def _run(
        self, runner: nn.Module, text_inputs: dict, image_inputs: dict, use_cache: bool | None, attentions: bool | None
    ):
        """Runs the decoder (`runner`: with or without its head) with the images as one keyword argument."""
        if (mask := text_inputs.pop("image_attention_mask", None)) is not None:
            image_inputs = tile_mask_of_images({**image_inputs, "image_attention_mask": mask})
        past_key_values = text_inputs.pop("past_key_values", None)
        input_ids, inputs_embeds = text_inputs.get("input_ids"), text_inputs.get("inputs_embeds")
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("Give exactly one of `input_ids` and `inputs_embeds`.")
        text = input_ids if input_ids is not None else inputs_embeds
        if text.dim() != (2 if input_ids is not None else 3):
            raise ValueError(
                "`input_ids` must be (batch, text_len) and `inputs_embeds` (batch, text_len, hidden_size), got shape "
                f"{tuple(text.shape)}."
            )
        batch_size, text_len = text.shape[:2]
        recomputes = self.training and self.is_activation_checkpointing
        if use_cache is None:
            use_cache = getattr(self.config.get_text_config(decoder=True), "use_cache", True)
        use_cache = bool(use_cache) and not recomputes

        encoder = self.images
        cross_cache = getattr(past_key_values, "cross_attention_cache", None)
        if past_key_values is None and use_cache:
            past_key_values = XAttnCache(DynamicCache(config=self.config.get_text_config(decoder=True)), DynamicCache())
            cross_cache = past_key_values.cross_attention_cache
        new = encoder.read(**image_inputs, batch_size=batch_size, text_len=text_len, cache=cross_cache)
        self_cache = past_key_values
        if isinstance(past_key_values, EncoderDecoderCache):
            self_cache = past_key_values.self_attention_cache
        elif past_key_values is not None and new is not None:
            raise ValueError(
                f"`past_key_values` is a {type(past_key_values).__name__}, which has no place for images: pass "
                "`EncoderDecoderCache(DynamicCache(), DynamicCache())`."
            )
        if recomputes and new is not None:
            if encoded_images(cross_cache) is not None:
                raise ValueError(
                    "Gradient checkpointing runs layers twice, so images cannot be added to a cache that holds some: pass "
                    "all images in one call, or encode them before with `encode_images`."
                )
            cross_cache = None  # a recomputed layer would write a second time
        context = encoder.context(
            new,
            cross_cache,
            image_inputs["cross_attention_mask"],
            input_ids,
            batch_size,
            text_len,
            self_cache,
            text_inputs.get("position_ids"),
            attentions,
        )
        if new is not None and cross_cache is not None:
            encoder.mark_updated(past_key_values)

        if attentions:
            text_inputs["output_attentions"] = True
        outputs = self._interface.call(runner, text_inputs, context, self_cache, use_cache)
        if (
            context is not None
            and not torch.compiler.is_compiling()
            and len(context.recorder.weights) != len(self.config.cross_attention_layers)
        ):
            raise RuntimeError(
                f"{type(self.text_model).__name__} did not hand the images to its layers: "
                f"{len(context.recorder.weights)} of {len(self.config.cross_attention_layers)} blocks ran."
            )
        if self.text_model._is_stateful and isinstance(past_key_values, XAttnCache):
            past_key_values.text_length += text_len
        cross_attentions = None
        if attentions and context is not None:
            cross_attentions = tuple(weights for _, weights in sorted(context.recorder.weights.items()))
        if not isinstance(past_key_values, EncoderDecoderCache):
            past_key_values = outputs.get(self._interface.cache_argument)
        return outputs, (past_key_values if use_cache else None), cross_attentions

    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        pixel_values: torch.Tensor | None = None,
        image_mask: torch.Tensor | None = None,
        cross_attention_states: torch.Tensor | None = None,
        cross_attention_mask: torch.Tensor | None = None,
        aspect_ratio_ids: torch.Tensor | None = None,
        aspect_ratio_mask: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        return_dict: bool | None = None,
        **kwargs,
    ) -> BaseModelOutputWithPastAndCrossAttentions | tuple:
        """
        Args:
            input_ids (`torch.LongTensor`): `(batch, text_len)`.
            pixel_values (`torch.Tensor`, *optional*): `(batch, num_images, channels, height, width)`; `(batch, channels,
                height, width)` means one image a row.
            image_mask (`torch.BoolTensor`, *optional*): `(batch, num_images)`, True = a real image.
            cross_attention_states (`torch.Tensor`, *optional*): `(batch, num_image_tokens, context_size)`, or `(batch,
                num_images, tokens, context_size)`; bypasses the vision tower.
            cross_attention_mask (`torch.BoolTensor`, *optional*): True = attend; `(batch, num_image_tokens)`, or `(batch,
                text_len, num_image_tokens)` where the caller decides for each text token, or `(batch, text_len, num_images,
                max_num_tiles)` with a tiled vision tower. Idefics' `image_attention_mask`, `(batch, text_len, num_images)`, is
                taken in its place.
            aspect_ratio_ids, aspect_ratio_mask (`torch.Tensor`, *optional*): `(batch, num_images)` and `(batch, num_images,
                max_num_tiles)`, with a tiled vision tower (Mllama's), whose `pixel_values` are `(batch, num_images,
                max_num_tiles, channels, height, width)`.
            attention_mask (`torch.Tensor`, *optional*): `(batch, text_len)`, the text's own.
            position_ids (`torch.LongTensor`, *optional*): `(batch, text_len)`.
            past_key_values (`EncoderDecoderCache`, *optional*): a cache of earlier text and images. Images that come with
                a filled cache are appended, but for those that are in it already.
            inputs_embeds (`torch.Tensor`, *optional*): `(batch, text_len, hidden_size)`, in place of `input_ids`.
            use_cache (`bool`, *optional*): return a cache.
            output_attentions (`bool`, *optional*): `cross_attentions` holds, for each block, the weights `(batch,
                num_attention_heads, text_len, num_image_tokens)`.

        Raises:
            TypeError: for masks that are not boolean, or states and pixels that are not floating point.
            ValueError: for shapes that do not fit, images without a vision tower, or contradicting arguments.
        """
        outputs, cache, cross_attentions = self._run(
            headless(self.text_model),
            {
                "input_ids": input_ids,
                "inputs_embeds": inputs_embeds,
                "attention_mask": attention_mask,
                "position_ids": position_ids,
                "past_key_values": past_key_values,
                **kwargs,
            },
            {
                "pixel_values": pixel_values,
                "image_mask": image_mask,
                "cross_attention_states": cross_attention_states,
                "cross_attention_mask": cross_attention_mask,
                "aspect_ratio_ids": aspect_ratio_ids,
                "aspect_ratio_mask": aspect_ratio_mask,
            },
            use_cache,
            output_attentions,
        )
        result = BaseModelOutputWithPastAndCrossAttentions(
            last_hidden_state=outputs.last_hidden_state,
            past_key_values=cache,
            hidden_states=outputs.get("hidden_states"),
            attentions=outputs.get("attentions"),
            cross_attentions=cross_attentions,
        )
        return result if return_dict is not False else result.to_tuple()


class XAttnForConditionalGeneration(XAttnPreTrainedModel, XAttnGenerationMixin, GenerationMixin):
    """[`XAttnModel`] with the decoder's head, a loss and `generate`.

    Args:
        config ([`XAttnConfig`]), text_model, vision_tower: see [`XAttnModel`].
    """

    def __init__(
        self,
        config: XAttnConfig,
        text_model: PreTrainedModel | None = None,
        vision_tower: PreTrainedModel | None = None,
    ):
        super().__init__(config)
        self.model = XAttnModel(config, text_model, vision_tower)
        if text_model is not None:
            self.generation_config = text_model.generation_config
        self._is_stateful = self.model.text_model._is_stateful
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.model.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.model.set_input_embeddings(value)

    def get_output_embeddings(self) -> nn.Module | None:
        return self.model.get_output_embeddings()

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        self.model.set_output_embeddings(new_embeddings)

    def get_decoder(self) -> nn.Module:
        return self.model.get_decoder()

    def get_image_features(self, *args, **kwargs) -> torch.Tensor:
        """See [`XAttnModel.get_image_features`]."""
        return self.model.get_image_features(*args, **kwargs)

    def encode_images(self, *args, **kwargs) -> EncoderDecoderCache:
        """See [`XAttnModel.encode_images`]."""
        return self.model.encode_images(*args, **kwargs)

    @property
    def blocks(self) -> list:
        """The cross-attention blocks, in the order of the layers."""
        return self.model.blocks

    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        pixel_values: torch.Tensor | None = None,
        image_mask: torch.Tensor | None = None,
        cross_attention_states: torch.Tensor | None = None,
        cross_attention_mask: torch.Tensor | None = None,
        aspect_ratio_ids: torch.Tensor | None = None,
        aspect_ratio_mask: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        return_dict: bool | None = None,
        **kwargs,
    ) -> CausalLMOutputWithCrossAttentions | tuple:
        """
        Args:
            labels (`torch.LongTensor`, *optional*): `(batch, text_len)`, ids to predict, -100 = ignored. Image markers
                are ignored too: they need no row in the head.
            logits_to_keep (`int` or `torch.Tensor`): logits of the last positions only; 0 = all.
            others: as in [`XAttnModel.forward`].
        """
        text_model = self.model.text_model
        own_loss = (
            labels is not None and self.config.additional_vocab_in_head
        )  # wider than the decoder's own loss expects
        if labels is not None:
            labels = self._readable_labels(labels)
        outputs, cache, cross_attentions = self.model._run(
            text_model,
            {
                "input_ids": input_ids,
                "inputs_embeds": inputs_embeds,
                "attention_mask": attention_mask,
                "position_ids": position_ids,
                "past_key_values": past_key_values,
                "labels": None if own_loss else labels,
                "logits_to_keep": logits_to_keep
                if isinstance(logits_to_keep, torch.Tensor) or logits_to_keep
                else None,
                **kwargs,
            },
            {
                "pixel_values": pixel_values,
                "image_mask": image_mask,
                "cross_attention_states": cross_attention_states,
                "cross_attention_mask": cross_attention_mask,
                "aspect_ratio_ids": aspect_ratio_ids,
                "aspect_ratio_mask": aspect_ratio_mask,
            },
            use_cache,
            output_attentions,
        )
        loss = outputs.get("loss")
        if own_loss:
            vocab_size = outputs.logits.shape[-1]
            items = kwargs.get("num_items_in_batch")
            loss = text_model.loss_function(outputs.logits, labels, vocab_size, num_items_in_batch=items)
        fields = {
            "loss": loss,
            "logits": outputs.logits,
            "past_key_values": cache,
            "hidden_states": outputs.get("hidden_states"),
            "attentions": outputs.get("attentions"),
            "cross_attentions": cross_attentions,
        }
        experts = {name: outputs.get(name) for name in ("aux_loss", "router_logits") if outputs.get(name) is not None}
        result = XAttnMoeCausalLMOutput(**fields, **experts) if experts else CausalLMOutputWithCrossAttentions(**fields)
        return result if return_dict is not False else result.to_tuple()

    def _readable_labels(self, labels: torch.Tensor) -> torch.Tensor:
        """Labels without the tokens that the head has no row for, or that nobody should learn to write."""
        if self.config.image_token_id is not None:
            labels = labels.masked_fill(labels == self.config.image_token_id, -100)
        if self.config.additional_vocab_size and not self.config.additional_vocab_in_head:
            labels = labels.masked_fill(labels >= self.get_input_embeddings().num_embeddings, -100)
        return labels


__all__ = ["XAttnForConditionalGeneration", "XAttnModel", "XAttnPreTrainedModel"]
