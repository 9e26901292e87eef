"""The image side of the model: turns pixels into features, and images into keys and values of every block, in a cache.

Nothing in this file needs a text.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.utils import logging

from .cache.cross_cache import CrossCache, KeyValue, append
from .cache.image_cache import ImageCache
from .cache.image_layout import ImageLayout
from .cache.states import as_stored, check_cache_dtype, check_no_gradient
from .cache.visibility import Samples
from .cache.xattn_cache import XAttnCache
from .call import Call
from .configuration_xattn import XAttnConfig
from .decoders.decoder import DecoderInterface
from .images.connector import XAttnConnector
from .images.conversation import ImagesOfCall, PreparedImages, TextOfCall, read_images
from .images.image_encoder import ImageEncoder, ImageSource
from .images.image_inputs import ImageInputs
from .layers.block import GatedCrossAttentionBlock, cross_attention_blocks
from .layers.context import KEYWORD, ImageTokens
from .layers.positions import positions_in_images
from .utils.distributed import fsdp_forward, is_distributed
from .utils.transformers_api import takes_cache


logger = logging.get_logger(__name__)


class XAttnImagesMixin:
    """The methods of [`XAttnModel`] that encode images, without a text."""

    config: XAttnConfig
    text_model: PreTrainedModel
    vision_tower: PreTrainedModel | None
    connector: XAttnConnector | None
    _interface: DecoderInterface
    _inserted: str = ""  # names the insertion of this model's blocks into its text model
    _folder: str = ""  # identifies the folder, saved with `adapter_only=True`, that this model was loaded from

    @property
    def blocks(self) -> list[GatedCrossAttentionBlock]:
        """The cross-attention blocks, in the order of the layers."""
        self._check_inserted()
        return cross_attention_blocks(self.text_model)

    @property
    def image_encoder(self) -> ImageEncoder:
        def like() -> torch.Tensor:
            return self.blocks[0].attn.k_proj.weight

        numbering = None if self.connector is None else self.connector.numbering
        return ImageEncoder(self.config, self.vision_tower, self.connector, like, numbering)

    # The store of images that were encoded before, if an extra has turned it on. It is read through `find_source`.
    _image_store: Any = None

    # Extras override the next methods (see `extras_xattn.py`). These versions are for one process, without a store.

    def image_identity(self) -> str:
        """Returns a text that identifies the configuration and the weights that encode images."""
        raise NotImplementedError

    def find_source(self, made_by: str | None) -> ImageSource | None:
        """Returns where `add_images` may find images that are encoded already, if there is an image store, or None.

        `made_by` is this model's identity, if it is known.
        """
        raise NotImplementedError

    def find_samples(
        self,
        text: dict[str, Any],
        cache: Cache | None,
        use_cache: bool | None,
        images: ImageInputs | PreparedImages,
        without_cache: bool,
    ) -> Samples | None:
        """Returns the samples of packed rows; None if no row is packed.

        Args:
            text (`dict`): Arguments of the text model itself.
            cache, use_cache, images: Arguments of the call.
            without_cache (`bool`): Whether the text model will run without a cache.

        Raises:
            ValueError: if rows are packed, and the text model would not keep the samples apart.
        """
        return None

    def why_uncached(self) -> str | None:
        """Returns why a forward must not write into a cache; None if it may."""
        learns = self.training or self.text_model.training or torch.is_grad_enabled()  # type: ignore[attr-defined]
        return "Gradient checkpointing runs layers twice" if learns and self.recomputes_layers() else None

    def recomputes_layers(self) -> bool:
        """Whether a backward pass will run the decoder's layers again."""
        return False

    def images_of_nobody(self, call: Call) -> ImagesOfCall | None:
        """Returns images that no text sees, for a [`Call`] without images in which the blocks must run all the same."""
        return None

    def zero_of_others(self, starts: bool, projects: bool = False) -> torch.Tensor | None:
        """Returns a zero that depends on the weights which other processes use in this step, and this call does not.

        Args:
            starts (`bool`): Whether a text starts with the call.
            projects (`bool`): Whether the call projects keys and values.
        """
        return None

    def get_image_features(
        self,
        pixel_values: torch.Tensor,
        image_mask: torch.Tensor | None = None,
        aspect_ratio_ids: torch.Tensor | None = None,
        aspect_ratio_mask: torch.Tensor | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        return_dict: bool | None = None,
    ) -> BaseModelOutputWithPooling | tuple:
        """Runs the vision tower and the connector: turns pixels into image tokens.

        Args:
            pixel_values, aspect_ratio_ids, aspect_ratio_mask: See `forward`.
            image_mask (`torch.BoolTensor`, *optional*): `(batch, num_images)`. It matters only with
                `num_image_positions`: padding images then take no position. The positions count the images of a row.
                So do not use this method for packed rows; pass `pixel_values` or `vision_features` to `forward`.
            output_hidden_states, output_attentions (`bool`, *optional*): Whether to return those of the vision tower.
                A tiled tower returns neither, and attentions need the eager implementation of the tower. Default to
                the values in `config`.
            return_dict (`bool`, *optional*): False to return a tuple. Defaults to `config.return_dict`.

        Returns:
            [`~transformers.modeling_outputs.BaseModelOutputWithPooling`]: `pooler_output` holds the image tokens, as
            `cross_attention_states` takes them: `(batch, num_images, tokens, context_size)`, or `(batch, tokens,
            context_size)` if `pixel_values` have no axis of images. A tiled tower also computes features of padding
            tiles; hide them with a `cross_attention_mask`. `last_hidden_state`, `hidden_states` and `attentions` are
            those of the vision tower, `(batch * num_images, tokens, hidden_size)`, or `(batch, num_images,
            max_num_tiles, tokens, hidden_size)` with a tiled tower. With `vision_feature_layer`, `last_hidden_state`
            holds the states of these layers. As `vision_features` it needs the shape `(batch, num_images, ...)`.

        Raises:
            TypeError: for pixels that are not floating point.
            ValueError: without pixels or a vision tower, or for pixels of a wrong shape.
        """
        inputs = ImageInputs.of(
            self.config,
            pixel_values=pixel_values,
            image_mask=image_mask,
            aspect_ratio_ids=aspect_ratio_ids,
            aspect_ratio_mask=aspect_ratio_mask,
        )
        self._check_inserted()
        if inputs.images is None:
            raise ValueError("`get_image_features` needs `pixel_values`, got None.")
        # If neither the call nor this configuration says what to return, the configuration of the tower decides.
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states or None
        if output_attentions is None:
            output_attentions = self.config.output_attentions or None
        encoder = self.image_encoder
        output, features = encoder.outputs(
            inputs.images,
            inputs.tiles,
            None if encoder.numbering is None else encoder.numbering.in_row(inputs, inputs.real_images, None).positions,
            output_hidden_states=None if output_hidden_states is None else bool(output_hidden_states),
            output_attentions=None if output_attentions is None else bool(output_attentions),
        )
        result = BaseModelOutputWithPooling(
            last_hidden_state=output.last_hidden_state,
            pooler_output=features[:, 0] if pixel_values.dim() == 4 else features,
            hidden_states=getattr(output, "hidden_states", None),
            attentions=output.get("attentions"),
        )
        if return_dict is None:
            return_dict = self.config.return_dict
        return result if return_dict else result.to_tuple()

    @takes_cache
    def encode_images(
        self,
        pixel_values: torch.Tensor | None = None,
        image_mask: torch.Tensor | None = None,
        cross_attention_states: torch.Tensor | None = None,
        cross_attention_mask: torch.Tensor | None = None,
        aspect_ratio_ids: torch.Tensor | None = None,
        aspect_ratio_mask: torch.Tensor | None = None,
        cache: EncoderDecoderCache | None = None,
        vision_features: torch.Tensor | None = None,
        cache_dtype: str | None = None,
    ) -> XAttnCache:
        """Encodes images once, for any number of questions: runs the tower, the connector and the K/V projections.

        Under `torch.no_grad()` the cache is a constant. Otherwise keys and values keep their graph, so that a loss over
        the questions trains the projections, the connector and the tower.

        With [`enable_image_store`] and under `torch.no_grad()`, images that are in the store are not encoded again.

        Args:
            pixel_values, image_mask, cross_attention_states, cross_attention_mask, aspect_ratio_ids, aspect_ratio_mask,
                vision_features: See `forward`.
            cache (`EncoderDecoderCache`, *optional*): A cache to which the images are added, in place. Images that it
                already holds are not encoded again (see `forward`).
            cache_dtype (`str`, *optional*): `"int8"` stores keys and values in int8, each token and head with a scale
                of its own (see `storage/int8_states.py`), in about half as many bytes as bfloat16. It is for inference,
                so it needs `torch.no_grad()`. By default, the dtype is that of the images in `cache` or of the image
                store, and without these the dtype in which the model computes.

        Returns:
            [`ImageCache`]: an `EncoderDecoderCache` whose cross-attention half holds the images; or `cache`, if you
            passed one.

        Raises:
            TypeError: for a `cache_dtype` that is not a `str`.
            ValueError: if there are no images or their shapes do not fit, for an unknown `cache_dtype` or another one
                than `cache` has, and for images in int8 while gradients are recorded.

        Example:

        ```python
        >>> import torch
        >>> from PIL import Image
        >>> from transformers import AutoModelForImageTextToText, AutoProcessor

        >>> model = AutoModelForImageTextToText.from_pretrained("seeing")
        >>> processor = AutoProcessor.from_pretrained("seeing")
        >>> inputs = processor(images=Image.open("photo.png"), text="what is it ?", return_tensors="pt")
        >>> with torch.no_grad():
        ...     images = model.encode_images(pixel_values=inputs["pixel_values"])
        >>> tokens = model.generate(inputs["input_ids"], cache=images, max_new_tokens=8)  # once for each question
        ```
        """
        cache_dtype = check_cache_dtype("cache_dtype", cache_dtype)
        inputs = ImageInputs.of(
            self.config,
            pixel_values=pixel_values,
            image_mask=image_mask,
            cross_attention_states=cross_attention_states,
            cross_attention_mask=cross_attention_mask,
            aspect_ratio_ids=aspect_ratio_ids,
            aspect_ratio_mask=aspect_ratio_mask,
            vision_features=vision_features,
        )
        if inputs.images is None:
            raise ValueError(
                "`encode_images` needs `pixel_values`, `vision_features` or `cross_attention_states`, got none of them."
            )
        if inputs.text_mask is not None:
            raise ValueError(
                "Expected `cross_attention_mask` of shape (batch, num_image_tokens) in `encode_images`, got a mask for "
                "each text token. Pass such a mask together with the text."
            )
        filled: XAttnCache
        if cache is None:
            filled = ImageCache(DynamicCache(config=self.config.get_text_config(decoder=True)))
        else:
            filled = XAttnCache.adopt(cache)
        cross = filled.cross_attention_cache
        if cache_dtype is not None and cross.layers and cross.cache_dtype != cache_dtype:
            raise ValueError(
                f"Expected `cache_dtype` to be None, because the images in `cache` are not in {cache_dtype}, "
                f'got "{cache_dtype}". All images of a cache have one dtype.'
            )
        self.add_images(filled, inputs, TextOfCall(None, 0), made_by=self.image_identity(), cache_dtype=cache_dtype)
        return filled

    def add_images(
        self,
        cache: XAttnCache,
        inputs: ImageInputs,
        text: TextOfCall,
        made_by: str | None = None,
        cache_dtype: str | None = None,
    ) -> ImagesOfCall:
        """Projects the new images of a call to keys and values in every block, and stores them in a cache.

        If this fails, no image is stored.

        Args:
            cache ([`XAttnCache`]): Where the images are stored.
            inputs ([`ImageInputs`]): The images and masks of the call.
            text ([`TextOfCall`]): The text that the images belong to.
            made_by (`str`, *optional*): This model's identity, for a cache that is kept after the call without a text.
            cache_dtype (`str`, *optional*): Dtype for a cache that holds no images yet. Defaults to that of the image
                store, if there is one.

        Returns:
            [`ImagesOfCall`]: the images, with the caller's mask for the text to come.
        """
        cross, source = cache.cross_attention_cache, None
        if inputs.images is not None:
            self._check_inserted()
            source = None if self._image_store is None else self.find_source(made_by)
        if cross.layers:
            self._check_made_here(cross)
            cache_dtype = cross.cache_dtype
        elif cache_dtype is None and source is not None:
            cache_dtype = source.dtype
        if cache_dtype is not None and inputs.images is not None:
            check_no_gradient(cache_dtype)
        images = read_images(self.image_encoder, inputs, cache, text, record_content=True, source=source)
        new, zero = images.new, None
        if new is None or not inputs.pass_connector:
            zero = self.zero_of_others(starts=True, projects=new is not None)
        if new is not None:
            if new.stored is not None:
                null_key = self.config.cross_attention_config.quiet_softmax
                keys_values = new.stored.keys_values(cross, cache_dtype, null_key)
            else:
                assert new.states is not None
                states = new.states if zero is None else new.states + zero.to(new.states.dtype)
                keys_values = self.project_images(states, cross, new.layout, cache_dtype)
            cross.fill(new.layout, keys_values, made_by)
            cache.note_images(0, text.new) if text.rows is not None else cache.note_images(1)
        elif images.layout is not None:
            cross.show(images.layout)
        return images

    def project_images(
        self,
        states: torch.Tensor,
        cross: CrossCache,
        layout: ImageLayout | None = None,
        cache_dtype: str | None = None,
    ) -> list[KeyValue]:
        """Returns the keys and values of all images for every block: those in `cross`, followed by the new ones.

        Args:
            states (`torch.Tensor`): `(R, N, context_size)`, the image tokens of the new images.
            cross ([`CrossCache`]): The images so far. It is not changed. The new keys and values get its dtype.
            layout ([`ImageLayout`], *optional*): Layout of the new images; None for images without padding.
            cache_dtype (`str`, *optional*): Dtype of the first images, if `cross` is empty.
        """
        config = self.config.cross_attention_config
        real = None if layout is None or layout.token_mask is None else layout.real_tokens(states.shape[0])
        positions = None
        if layout is not None and config.position != "none":
            positions = positions_in_images(layout.sizes, states.device)
            positions = positions if real is None else positions[:, real.coordinates[1].to(positions.device)]
        images = ImageTokens(
            states=states if real is None else real.take(states),
            real=real,
            positions=positions,
            null_key=config.quiet_softmax and not cross.layers,
        )
        dtype = cross.cache_dtype if cross.layers else cache_dtype
        found: list[KeyValue] = []
        layers: Any = self.text_model.get_submodule(self._interface.layers)
        for index in sorted({min(index, len(layers) - 1) for index in self.config.cross_attention_layers}):
            # The layer is called, and not its block, because device maps and FSDP load weights when a layer is called.
            layer = layers[index]
            if torch.compiler.is_compiling() and not is_distributed():
                layer = layer.forward  # `torch.compile` cannot trace the hooks that record hidden states here
            for key, value in layer(None, **{KEYWORD: images}):
                if dtype is not None:  # rounded before they are read, so that this call reads the same as later calls
                    key, value = as_stored(key, dtype), as_stored(value, dtype)
                new = key, value
                found.append(append(cross.layers[len(found)].read(), new) if cross.layers else new)
        return found

    def _check_made_here(self, cross: CrossCache) -> None:
        """Raises a `ValueError` if another model, or other weights, made the cached images or read text about them."""
        blocks, width = len(self.config.cross_attention_layers), self.config.cross_attention_config.head_dim
        if len(cross.layers) != blocks:
            raise ValueError(
                f"Expected images for {blocks} cross-attention blocks in `cache`, got {len(cross.layers)}. "
                "Another model encoded them."
            )
        found, heads = cross.layers[0].keys.shape[1::2], self.blocks[0].attn.num_key_value_heads
        if found != (heads, width):
            raise ValueError(
                f"Expected {heads} K/V heads of width {width} in `cache`, got {found[0]} of width {found[1]}. Another "
                "model encoded the images."
            )
        if torch.compiler.is_compiling():
            return
        if cross.read_by not in (None, self._folder):
            raise ValueError(
                "`cache` holds a conversation about images that a model of another `adapter_only=True` folder has "
                "read. Go on with that model, or start from an empty cache."
            )
        if cross.made_by is None:
            return
        current = self.image_identity()
        if cross.made_by != current:
            raise ValueError(
                "`cache` holds images that another model encoded, or this one with other weights: their "
                f"identity is {cross.made_by[:12]}, this model's is {current[:12]}. Encode the images again."
            )

    def _check_inserted(self) -> None:
        insertion: Any = getattr(self.text_model, "_insertion", None)
        if insertion is None or insertion.name != self._inserted:
            raise ValueError(
                "Expected a model with blocks, got one whose blocks `remove_blocks` has taken out. Use its text model, "
                "or call `retrofit` with the text model."
            )


class XAttnDelegationMixin:
    """The image side of [`XAttnForConditionalGeneration`]: each method calls that of the [`XAttnModel`] inside it."""

    model: XAttnImagesMixin

    @fsdp_forward
    def get_image_features(self, *args, **kwargs) -> BaseModelOutputWithPooling | tuple:
        """See [`XAttnModel.get_image_features`]."""
        return self.model.get_image_features(*args, **kwargs)

    @takes_cache
    @fsdp_forward
    def encode_images(self, *args, **kwargs) -> XAttnCache:
        """See [`XAttnModel.encode_images`]."""
        return self.model.encode_images(*args, **kwargs)

    def image_identity(self) -> str:
        """See [`XAttnModel.image_identity`]."""
        return self.model.image_identity()

    @property
    def blocks(self) -> list[GatedCrossAttentionBlock]:
        """The cross-attention blocks, in the order of the layers."""
        return self.model.blocks
