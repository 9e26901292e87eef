"""A text model with gated cross-attention blocks, and optionally a vision tower.

Most vision-language models of transformers contain a decoder of their own. The models of this file contain a causal
language model of transformers, the text model, and do not change its code or its weights: the layers of the text model
contain the blocks (see `decoders/insertion.py`), its head computes the logits, and its cache is the self-attention half
of an `EncoderDecoderCache`.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, GenerationMixin, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.modeling_outputs import (
    BaseModelOutputWithPastAndCrossAttentions,
    CausalLMOutputWithCrossAttentions,
)

from .cache.xattn_cache import whole_or_not_at_all
from .call import Call, commit, decide, find_images, find_keys_values, given_images, make_context, read_call
from .checkpoints.pretrained import XAttnPreTrainedModel
from .configuration_xattn import XAttnConfig
from .decoders.decoder import DecoderInterface, find_decoder, headless
from .decoders.insertion import check_insertable, insert_blocks
from .decoders.loss import LossInputs, loss_over_all_logits, mask_labels
from .decoders.text_inputs import check_text
from .extras_xattn import XAttnExtrasMixin, XAttnOuterExtrasMixin
from .generation_xattn import XAttnGenerationMixin
from .images.connector import XAttnConnector, new_connector
from .images.conversation import PreparedImages
from .images.image_inputs import ImageInputs, refuse_lost_mask
from .images.tower import build_tower
from .images_xattn import XAttnDelegationMixin, XAttnImagesMixin
from .layers.context import CrossAttentionContext
from .outputs_xattn import XAttnMoeCausalLMOutput, XAttnMoeModelOutput
from .utils.custom_code import build_part
from .utils.tensor_checks import check_integers, check_tensor
from .utils.transformers_api import CACHE, name_causal_lm, takes_cache


class XAttnModel(XAttnExtrasMixin, XAttnPreTrainedModel, XAttnImagesMixin):
    """Text model, blocks, connector and vision tower. Its output has hidden states, and no logits.

    Args:
        config ([`XAttnConfig`]): Configuration of the parts, and the layers that get a block.
        text_model (`PreTrainedModel`, *optional*): A causal language model. It is not copied: the blocks are inserted
            into its layers. By default, a text model with random weights is built from `config.text_config`.
        vision_tower (`PreTrainedModel`, *optional*): A vision model. By default, a vision tower with random weights is
            built from `config.vision_config`.

    Example:

    ```python
    >>> import torch
    >>> from transformers import LlamaConfig

    >>> from hf_xattn import XAttnConfig, XAttnModel

    >>> text = LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4)
    >>> model = XAttnModel(XAttnConfig(text_config=text))  # without a vision tower
    >>> outputs = model(input_ids=torch.tensor([[1, 2, 3]]), cross_attention_states=torch.randn(1, 16, 64))
    >>> outputs.last_hidden_state.shape
    torch.Size([1, 3, 64])
    ```
    """

    if TYPE_CHECKING:

        @property
        def base_model(self) -> XAttnModel: ...

    def __init__(
        self,
        config: XAttnConfig,
        text_model: PreTrainedModel | None = None,
        vision_tower: PreTrainedModel | None = None,
    ):
        super().__init__(config)
        was_given = text_model is not None
        if text_model is None:
            text_model = build_part(AutoModelForCausalLM, config.text_config)
        check_insertable(text_model)
        self._interface = DecoderInterface.of(text_model)
        with self.taking_over(text_model, was_given, vision_tower):
            split = insert_blocks(text_model, config)
            self.text_model = text_model
            self.vision_tower = self.connector = None
            if config.vision_config is not None:
                self.vision_tower = build_tower(config.vision_config) if vision_tower is None else vision_tower
                self.connector = XAttnConnector(config) if vision_tower is None else new_connector(config, vision_tower)
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

    def get_encoder(self, modality: str | None = None) -> nn.Module:
        """`PreTrainedModel.get_encoder`, or the whole model if the text model passes no keywords on to its layers.

        transformers' exporters export an encoder and a decoder separately. A decoder that does not take the images as
        an argument (see `layers/context.py`) would silently be exported without images. If this method returns the
        whole model, the exporters export one program.
        """
        return super().get_encoder(modality) if self._interface.receives_keywords else self

    def _run(
        self,
        runner: nn.Module,
        text: dict[str, Any],
        images: ImageInputs | PreparedImages,
        given_cache: Cache | None,
        use_cache: bool | None,
        output_attentions: bool | None,
        output_cross_attentions: bool | None,
    ) -> tuple[Any, Cache | None, tuple[torch.Tensor, ...] | None]:
        """Runs the text model, with or without its head (`runner`), and passes the images to its layers."""
        self._check_inserted()
        check_text(text, given_cache is None, self.get_input_embeddings)
        if output_attentions is None and self.config.output_attentions:
            output_attentions = True
        if output_attentions is not None:
            text["output_attentions"] = bool(output_attentions)
        if self.config.output_hidden_states and text.get("output_hidden_states") is None:
            text["output_hidden_states"] = True
        wants_weights = bool(output_attentions if output_cross_attentions is None else output_cross_attentions)
        call = read_call(self, text, images, given_cache, use_cache, wants_weights)
        cross = call.cross
        if isinstance(images, ImageInputs) and cross is not None and cross.layers:
            if images.images is not None or call.starts or cross.read_by != self._folder:
                self._check_made_here(cross)
                cross.read_by = self._folder
        found, sees, keys_values, context = find_images(self, call), None, None, None
        if found is not None:
            sees = decide(self.config, call, found)
            keys_values = find_keys_values(self, call, found)
            context = make_context(self.config, call, found, sees, keys_values)
        # If the text model fails, a cache that the caller passed is restored.
        with contextlib.nullcontext() if given_cache is None else whole_or_not_at_all(call.cache):
            outputs = self._interface.call(runner, call.text, context, call.text_cache, call.use_cache)
            weights = None if context is None else self._weights_of_blocks(context, call)
            if call.cache is not None and call.uncached is None:
                commit(call, found, sees, keys_values)
        cache = call.cache if call.cache is not None else outputs.get(self._interface.cache_argument)
        return outputs, (cache if call.use_cache else None), weights

    def _weights_of_blocks(self, context: CrossAttentionContext, call: Call) -> tuple[torch.Tensor, ...] | None:
        """Returns the attention weights of all blocks, if they are requested.

        Raises a `RuntimeError` if a block has not run.
        """
        if context.recorder is None:
            return None
        weights, expected = context.recorder.weights, len(self.config.cross_attention_layers)
        if not torch.compiler.is_compiling() and len(weights) != expected:
            raise RuntimeError(
                f"Expected all {expected} blocks to run, got {len(weights)}: {type(self.text_model).__name__} did not "
                "pass the images to its layers."
            )
        if not call.output_attentions:
            return None
        ordered = [weights[index] for index in sorted(weights)]
        return tuple(each for each in ordered if each is not None)

    @takes_cache
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        pixel_values: torch.Tensor | None = None,
        image_mask: torch.Tensor | None = None,
        cross_attention_states: torch.Tensor | None = None,
        cross_attention_mask: torch.Tensor | None = None,
        aspect_ratio_ids: torch.Tensor | None = None,
        aspect_ratio_mask: torch.Tensor | None = None,
        image_attention_mask: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        return_dict: bool | None = None,
        image_inputs: PreparedImages | None = None,
        image_rows: torch.LongTensor | None = None,
        vision_features: torch.Tensor | None = None,
        output_cross_attentions: bool | None = None,
        **kwargs,
    ) -> BaseModelOutputWithPastAndCrossAttentions | tuple:
        """
        Args:
            input_ids (`torch.LongTensor`): `(batch, text_len)`, the tokens of the text.
            pixel_values (`torch.Tensor`, *optional*): The images, `(batch, num_images, channels, height, width)`, or
                `(batch, channels, height, width)` with one image for each row.
            image_mask (`torch.BoolTensor`, *optional*): `(batch, num_images)`, True for a real image and False for
                padding. What a cache holds as padding stays padding: no later mask may show it. To use the same image
                as a real one, pass it as a new image.
            cross_attention_states (`torch.Tensor`, *optional*): Image tokens in place of pixels, `(batch,
                num_image_tokens, context_size)` or `(batch, num_images, tokens, context_size)`. Tower and connector do
                not run.
            cross_attention_mask (`torch.BoolTensor`, *optional*): True where text may attend to an image token. The
                shape is `(batch, num_image_tokens)`, or `(batch, text_len, num_image_tokens)` with an entry for each
                text token, or `(batch, text_len, num_images, max_num_tiles)` with a tiled vision tower. The mask covers
                the images of the call, or those of the cache followed by those of the call. Later text sees what the
                last text token of the mask sees, until the next image marker.
            aspect_ratio_ids, aspect_ratio_mask (`torch.Tensor`, *optional*): `(batch, num_images)` and `(batch,
                num_images, max_num_tiles)`. A tiled vision tower (Mllama's) requires both, and `pixel_values` of shape
                `(batch, num_images, max_num_tiles, channels, height, width)`.
            image_attention_mask (`torch.Tensor`, *optional*): `(batch, text_len, num_images)`, which images each text
                token may see: the form that Idefics has for `cross_attention_mask`.
            vision_features (`torch.Tensor`, *optional*): The `last_hidden_state` of the vision tower for these images,
                in place of `pixel_values`. The connector runs, and the tower does not. The shape is `(batch,
                num_images, tokens, width)`; `(batch, tokens, width)` with one image for each row; `(batch, num_images,
                max_num_tiles, tokens, width)` with a tiled tower; or `(batch, num_images, width, height, width)` with a
                convolutional one. In training, features are refused if weights of the tower train.
            attention_mask (`torch.Tensor`, *optional*): `(batch, text_len)`, mask of the text.
            position_ids (`torch.LongTensor`, *optional*): `(batch, text_len)`. Positions that start again mark a packed
                row: each sample sees only its own text and images (see `parts/packed_rows.py`). A packed row needs a
                call without `attention_mask` and without a cache. In such a call, a jump in the positions starts a
                sample, too.
            cache (`EncoderDecoderCache`, *optional*): A cache of earlier text and images. If it holds images, pass no
                images, only new ones, or all images: those of the cache in their order, then the new ones. Anything
                else is refused. Images are compared by content, row by row.
            inputs_embeds (`torch.Tensor`, *optional*): `(batch, text_len, hidden_size)`, in place of `input_ids`.
            use_cache (`bool`, *optional*): Whether to return a cache.
            output_attentions (`bool`, *optional*): Whether to return `cross_attentions`, the weights `(batch,
                num_attention_heads, text_len, num_image_tokens)` of each block, and `attentions`, those of the text
                model's layers if its attention implementation returns them. Defaults to `config.output_attentions`.
            output_cross_attentions (`bool`, *optional*): Whether to return `cross_attentions`. Defaults to
                `output_attentions`. Set it alone to save the memory of the text model's own attention weights.
            return_dict (`bool`, *optional*): False to return a tuple. Defaults to `config.return_dict`.
            image_inputs (`PreparedImages`, *optional*): Images that `generate` has encoded, in place of all image
                arguments.
            image_rows (`torch.LongTensor`, *optional*): `(batch,)`, the row of the images that each text row looks at,
                or -1 for none. The images, `image_mask` and a mask of image tokens then have a batch size of their own.
                Use it in training, where rows share images. It works without a cache only.

        Raises:
            TypeError: for unknown keywords, arguments that are not tensors, masks that are not boolean, or states and
                pixels that are not floating point.
            ValueError: for wrong shapes, an empty text, pixels without a vision tower, or contradictory arguments.
        """
        if kwargs:
            self._interface.check_keywords(self.forward, kwargs, body=True)
        images = given_images(
            self.config,
            image_inputs,
            pixel_values=pixel_values,
            image_mask=image_mask,
            cross_attention_states=cross_attention_states,
            cross_attention_mask=cross_attention_mask,
            aspect_ratio_ids=aspect_ratio_ids,
            aspect_ratio_mask=aspect_ratio_mask,
            image_attention_mask=image_attention_mask,
            image_rows=image_rows,
            vision_features=vision_features,
        )
        if use_cache is False and pixel_values is not None and image_mask is None and image_rows is None:
            refuse_lost_mask(pixel_values)  # TRL computes the log-probabilities from what is returned here
        outputs, new_cache, cross_attentions = self._run(
            headless(self.text_model),
            {
                "input_ids": input_ids,
                "inputs_embeds": inputs_embeds,
                "attention_mask": attention_mask,
                "position_ids": position_ids,
                **kwargs,
            },
            images,
            cache,
            use_cache,
            output_attentions,
            output_cross_attentions,
        )
        fields = {
            "last_hidden_state": outputs.last_hidden_state,
            CACHE: new_cache,
            "hidden_states": outputs.get("hidden_states"),
            "attentions": outputs.get("attentions"),
            "cross_attentions": cross_attentions,
        }
        router_logits = outputs.get("router_logits")
        result = (
            BaseModelOutputWithPastAndCrossAttentions(**fields)
            if router_logits is None
            else XAttnMoeModelOutput(**fields, router_logits=router_logits)
        )
        if return_dict is None:
            return_dict = self.config.return_dict
        return result if return_dict else result.to_tuple()


class XAttnForConditionalGeneration(
    XAttnGenerationMixin, XAttnOuterExtrasMixin, XAttnPreTrainedModel, XAttnDelegationMixin, GenerationMixin
):
    """[`XAttnModel`] with the head of the text model, a loss and `generate`.

    Args:
        config ([`XAttnConfig`]), text_model, vision_tower: See [`XAttnModel`].

    Example:

    ```python
    >>> import hf_xattn
    >>> from transformers import AutoModelForImageTextToText, AutoProcessor

    >>> model = AutoModelForImageTextToText.from_pretrained("seeing")  # a folder of `hf-xattn train`
    >>> processor = AutoProcessor.from_pretrained("seeing")
    >>> content = [{"type": "image", "path": "photo.png"}, {"type": "text", "text": "what is it ?"}]
    >>> inputs = processor.apply_chat_template(
    ...     [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=True, return_dict=True
    ... )
    >>> tokens = model.generate(**inputs, max_new_tokens=8)
    >>> answer = processor.decode(tokens[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    ```
    """

    model: XAttnModel

    if TYPE_CHECKING:

        @property
        def base_model(self) -> XAttnModel: ...

    # Some decoders keep recurrent state, which cannot be rolled back. The class therefore reports itself as stateful;
    # `__init__` replaces this with the value of the decoder in use.
    _is_stateful = True

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        name_causal_lm(cls.__name__)  # a user's class, or the one that FSDP2 derives

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

    @property
    def lm_head(self) -> nn.Module | None:
        """The head of the text model. transformers' exporters look for this name."""
        return self.get_output_embeddings()

    def mask_labels(self, labels: torch.Tensor) -> torch.Tensor:
        """Returns labels in which image markers, and ids without a row in the head, are replaced by -100.

        The loss of this model ignores both kinds of labels anyway. Call this method in your own collator or training
        loop if something else looks at the labels: before you count them for `num_items_in_batch`, or with label
        smoothing, for which `Trainer` computes the loss itself and ignores only -100.

        Args:
            labels (`torch.LongTensor`): Labels of any shape. The tensor is not changed.

        Raises:
            TypeError: for anything but a tensor of 64-bit integers.
        """
        check_tensor("labels", labels)
        check_integers("labels", labels, (torch.int64,))
        return mask_labels(self, labels)

    @takes_cache
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        pixel_values: torch.Tensor | None = None,
        image_mask: torch.Tensor | None = None,
        cross_attention_states: torch.Tensor | None = None,
        cross_attention_mask: torch.Tensor | None = None,
        aspect_ratio_ids: torch.Tensor | None = None,
        aspect_ratio_mask: torch.Tensor | None = None,
        image_attention_mask: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        return_dict: bool | None = None,
        image_inputs: PreparedImages | None = None,
        image_rows: torch.LongTensor | None = None,
        vision_features: torch.Tensor | None = None,
        output_cross_attentions: bool | None = None,
        **kwargs,
    ) -> CausalLMOutputWithCrossAttentions | tuple:
        """
        Args:
            labels (`torch.LongTensor`, *optional*): `(batch, text_len)`, the ids to predict. The loss ignores labels of
                -100, and image markers, so that these need no row in the head.
            shift_labels (`torch.LongTensor`, *optional*): `(batch, text_len)`, labels that are already shifted, in
                place of `labels`.
            num_items_in_batch (`int` or `torch.Tensor`, *optional*): The number of labels that are not ignored in all
                micro-batches, for gradient accumulation. The loss is then the sum over the labels divided by this
                number; by default it is the mean. If there are labels with image markers, the number must be that of
                all labels of this call, markers included. To use another number, call
                [`~XAttnForConditionalGeneration.mask_labels`] before you count.
            logits_to_keep (`int` or `torch.Tensor`): For which positions logits are computed: the number of the last
                positions, or their indices. 0 stands for all.
            others: See [`XAttnModel.forward`].
        """
        if kwargs:
            self.model._interface.check_keywords(self.forward, kwargs)
        images = given_images(
            self.config,
            image_inputs,
            pixel_values=pixel_values,
            image_mask=image_mask,
            cross_attention_states=cross_attention_states,
            cross_attention_mask=cross_attention_mask,
            aspect_ratio_ids=aspect_ratio_ids,
            aspect_ratio_mask=aspect_ratio_mask,
            image_attention_mask=image_attention_mask,
            image_rows=image_rows,
            vision_features=vision_features,
        )
        text_model, targets = self.model.text_model, None
        if labels is not None or kwargs.get("shift_labels") is not None:
            given = inputs_embeds if input_ids is None else input_ids
            targets = LossInputs.take_from(self, given, labels, logits_to_keep, kwargs)
        # A decoder's own loss does not support logits of added tokens, and ignores `shift_labels` alone.
        own_loss = targets is not None and (self.config.additional_vocab_in_head or labels is None)
        kept = logits_to_keep if isinstance(logits_to_keep, torch.Tensor) or logits_to_keep else None
        outputs, new_cache, cross_attentions = self.model._run(
            text_model,
            {
                "input_ids": input_ids,
                "inputs_embeds": inputs_embeds,
                "attention_mask": attention_mask,
                "position_ids": position_ids,
                "logits_to_keep": kept,
                **({} if targets is None or own_loss else targets.given()),
                **kwargs,
            },
            images,
            cache,
            use_cache,
            output_attentions,
            output_cross_attentions,
        )
        fields = {
            "loss": loss_over_all_logits(text_model, outputs, targets) if targets and own_loss else outputs.get("loss"),
            "logits": outputs.logits,
            CACHE: new_cache,
            "hidden_states": outputs.get("hidden_states"),
            "attentions": outputs.get("attentions"),
            "cross_attentions": cross_attentions,
        }
        aux_loss, router_logits = outputs.get("aux_loss"), outputs.get("router_logits")
        result = (
            CausalLMOutputWithCrossAttentions(**fields)
            if aux_loss is None and router_logits is None
            else XAttnMoeCausalLMOutput(**fields, aux_loss=aux_loss, router_logits=router_logits)
        )
        if return_dict is None:
            return_dict = self.config.return_dict
        return result if return_dict else result.to_tuple()


__all__ = ["XAttnForConditionalGeneration", "XAttnModel", "XAttnPreTrainedModel"]
