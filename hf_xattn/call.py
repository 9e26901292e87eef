"""The steps of one forward, before and after the decoder runs.

read_call       finds the cache
prepare_blocks  encodes new images, decides what each text token sees, and makes the context of the blocks
(the decoder runs and gets the context as a keyword argument)
keep            updates the cache: keys and values of new images for all blocks, and what the text has seen
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache
from transformers.utils import logging

from .cache.cross_cache import CrossCache
from .cache.image_layout import ImageLayout, rows_to
from .cache.int8_cache import check_no_gradient, check_not_training
from .cache.packed_samples import PackedText, check_packed_images
from .cache.real_tokens import row_spans
from .cache.text_progress import TextProgress
from .cache.visibility import look
from .cache.xattn_cache import XAttnCache
from .configuration_xattn import XAttnConfig
from .decoders.decoder import DecoderInterface
from .decoders.packed_rows import find_samples
from .images.conversation import ImagesOfCall, PreparedImages, TextOfCall, read_images
from .images.image_encoder import ImageEncoder
from .images.image_inputs import ImageInputs
from .layers.context import CrossAttentionContext, Recorder, image_fields
from .layers.folded_mask import fold_mask
from .layers.image_rows import ImageRows, Slots, refuse_to_cache
from .layers.position_bias import text_positions, token_positions
from .layers.row_groups import RowGroup, group_rows
from .learning.stand_in import blank_states, run_beside, stand_in_images
from .utils.distributed import is_distributed
from .utils.tensor_checks import is_fake, type_name


logger = logging.get_logger(__name__)

# Reasons why a forward must not write into a cache.
RECOMPUTES = "Gradient checkpointing runs layers twice"
SKIPS_LAYERS = "LayerDrop skips layers in training"
# A value of `output_attentions` that asks only the blocks for weights: those of a long text to itself take a lot of memory.
OF_BLOCKS = "blocks"


@dataclass
class Call:
    """The checked arguments of one forward.

    Attributes:
        text (`dict`): the decoder's own arguments.
        rows, length (`int`): of the text.
        device (`torch.device`): of the text.
        images ([`ImageInputs`] or [`PreparedImages`]): the image arguments. `generate` without a cache has already encoded
            them.
        cache ([`XAttnCache`], *optional*): None if nothing is cached, or if the caller's cache cannot hold images.
        text_cache (`Cache`, *optional*): the cache that the decoder gets.
        use_cache, output_attentions (`bool`): as in `forward`.
        uncached (`str`, *optional*): why this forward must not write into a cache; None if it may.
        continues (`bool`): whether the caller passed a cache or asked for one, so more text may follow.
        samples (`torch.BoolTensor`, *optional*): `(rows, length)`, True where a sample of a packed row starts; None if no row is packed.
        positions (`torch.LongTensor`, *optional*): `(rows or 1, length)`, of the text; None without `position_bias`.
    """

    text: dict[str, Any]
    rows: int
    length: int
    device: torch.device
    images: ImageInputs | PreparedImages
    cache: XAttnCache | None
    text_cache: Cache | None
    use_cache: bool
    output_attentions: bool
    uncached: str | None
    continues: bool
    samples: torch.Tensor | None = None
    positions: torch.Tensor | None = None

    @property
    def takes_up_images(self) -> bool:
        """Whether this call is the first to use cached images, or adds images to them. They must then be images of this model."""
        if self.cache is None or isinstance(self.images, PreparedImages):
            return False
        return self.cache.text_rows is None or self.images.images is not None


@dataclass
class BlockInputs:
    """What the blocks of a forward get, and what goes into the cache if the forward succeeds.

    Attributes:
        context ([`CrossAttentionContext`], *optional*): None if there are no images.
        new ([`ImageLayout`], *optional*): of the new images for the cache; None if there are none, or no cache.
        layout ([`ImageLayout`], *optional*): new layout of the cached images, for this conversation.
        progress ([`TextProgress`], *optional*): progress of the text after this call.
    """

    context: CrossAttentionContext | None = None
    new: ImageLayout | None = None
    layout: ImageLayout | None = None
    progress: TextProgress | None = None


def read_call(
    config: XAttnConfig,
    decoder: DecoderInterface,
    text: dict[str, Any],
    images: ImageInputs | PreparedImages,
    past_key_values: Cache | None,
    use_cache: bool | None,
    output_attentions: bool | None,
    recomputes: bool,
    skips_layers: bool,
) -> Call:
    """Finds the cache of a call. `decoders/text_inputs.py` has checked the text. Arguments that are None follow the configuration.

    Args:
        config ([`XAttnConfig`]), decoder ([`DecoderInterface`]): the model's.
        text, images, past_key_values, use_cache, output_attentions: as in `forward`.
        recomputes (`bool`): whether layers run twice, under gradient checkpointing.
        skips_layers (`bool`): whether layers may be skipped, under LayerDrop.

    Raises:
        TypeError: if `past_key_values` is not a cache of transformers.
        ValueError: if the cache cannot be used for this call.
    """
    input_ids, inputs_embeds = text.get("input_ids"), text.get("inputs_embeds")
    given = input_ids if input_ids is not None else inputs_embeds
    assert given is not None
    if past_key_values is not None and not isinstance(past_key_values, Cache):
        raise TypeError(
            f"Expected `past_key_values` to be a cache of transformers, got {type_name(past_key_values)}. Pass "
            "`EncoderDecoderCache(DynamicCache(), DynamicCache())`."
        )
    continues = past_key_values is not None or bool(use_cache)
    uncached = RECOMPUTES if recomputes else SKIPS_LAYERS if skips_layers else None
    wants_cache = getattr(config.get_text_config(decoder=True), "use_cache", True) if use_cache is None else use_cache
    shares_images = isinstance(images, ImageInputs) and images.image_rows is not None
    without_cache = past_key_values is None and (shares_images or uncached is not None or not wants_cache)
    samples = find_samples(config, decoder.not_packed, text, past_key_values, use_cache, images, without_cache)
    if shares_images and continues:
        refuse_to_cache("`use_cache=True`" if past_key_values is None else "`past_key_values`")
    use_cache = bool(wants_cache) and uncached is None and samples is None and not shares_images
    cache: XAttnCache | None = None
    if isinstance(past_key_values, EncoderDecoderCache):
        cache = XAttnCache.adopt(past_key_values)
        cache.check_usable(given.shape[0])
    elif past_key_values is None and use_cache:
        cache = XAttnCache(DynamicCache(config=config.get_text_config(decoder=True)))
    elif past_key_values is not None and (isinstance(images, PreparedImages) or images.images is not None):
        raise ValueError(
            f"Expected `past_key_values` to be a cache for text and images, got a {type(past_key_values).__name__}. Pass "
            "`EncoderDecoderCache(DynamicCache(), DynamicCache())`."
        )
    text_cache = past_key_values if cache is None else cache.self_attention_cache
    if cache is not None and uncached is not None:
        if not int(cache.get_seq_length()):
            text_cache = None  # it holds nothing to read, and the layers must not write
        elif skips_layers:
            raise ValueError(
                f"{SKIPS_LAYERS}, so no text can be added to `past_key_values`, which already holds text. Call `model.eval()`, or set "
                "`layerdrop` of the decoder to 0."
            )
    decoder.check_continues(given.shape[1], text_cache)
    decoder.check_padding(text.get("attention_mask"), given.shape[1], text_cache, by_one=given.shape[1] == 1)
    if output_attentions is not None or config.output_attentions:
        output_attentions = config.output_attentions if output_attentions is None else output_attentions
        text["output_attentions"] = bool(output_attentions) and output_attentions != OF_BLOCKS
    if config.output_hidden_states and text.get("output_hidden_states") is None:
        text["output_hidden_states"] = True
    return Call(
        text=text,
        rows=given.shape[0],
        length=given.shape[1],
        device=given.device,
        images=images,
        cache=cache,
        text_cache=text_cache,
        use_cache=use_cache,
        output_attentions=bool(output_attentions),
        uncached=uncached,
        continues=continues,
        samples=samples,
        positions=text_positions(text, cache, given) if config.cross_attention_config.position_bias else None,
    )


def prepare_blocks(
    config: XAttnConfig,
    encoder: ImageEncoder,
    call: Call,
    trains: bool,
    only_images_learn: Callable[[], bool],
    blocks_are_units: Callable[[], bool],
) -> BlockInputs:
    """Encodes the new images of a call, and decides which image tokens each text token sees. The cache is not changed.

    Args:
        config ([`XAttnConfig`]), encoder ([`ImageEncoder`]): the model's.
        call ([`Call`]): from [`read_call`].
        trains (`bool`): whether the model is in training mode and computes gradients.
        only_images_learn (`Callable`): whether some weights require a gradient, but none of the text model's own. Called only if
            there are no images.
        blocks_are_units (`Callable`): as in `learning/stand_in.py`. Called only if there are no images and several processes.
    """
    cross = None if call.cache is None else call.cache.cross_attention_cache
    if cross is not None and cross.layers:
        if trains:
            check_not_training(cross.cache_dtype)
        if isinstance(call.images, ImageInputs) and call.images.images is not None:
            check_no_gradient(cross.cache_dtype)
    images = _images_of(call, encoder, trains)
    progress = TextProgress(history=None) if call.cache is None else call.cache.current_progress()
    stands_in, unused = images.layout is None, None
    starts = call.cache is None or call.cache.text_rows is None
    if stands_in:
        waited_for = is_distributed() and torch.is_grad_enabled()
        if waited_for or (trains and not _embeddings_learn(call) and only_images_learn()):
            nobodys = stand_in_images(encoder, call.rows)
        else:
            run_beside(encoder, starts)
            if not (is_distributed() and blocks_are_units()):
                return BlockInputs()
            nobodys = blank_states(encoder, call.rows)
        images, cross = ImagesOfCall(nobodys, nobodys.layout, None), None
    elif images.new is None or isinstance(call.images, PreparedImages) or not call.images.pass_connector:
        unused = run_beside(encoder, starts)
    new, layout, mask, rows = images.new, images.layout, images.mask, images.rows
    assert layout is not None
    block = config.cross_attention_config
    image_rows = call.rows if new is None else new.states.shape[0]
    if cross is not None and cross.layers:
        if call.rows % cross.rows:
            raise ValueError(
                f"Expected a text batch that is a multiple of {cross.rows}, the number of image rows in `past_key_values`, got {call.rows}."
            )
        if call.uncached is not None and new is not None:
            raise ValueError(
                f"{call.uncached}, so no images can be added to `past_key_values`, which already holds images. Pass all images in one "
                "call, or encode them before with `encode_images`."
            )
        image_rows = cross.rows
    if cross is not None and cross.layers and trains:
        _warn_of_constant_images(cross, encoder)
    sees, after, by_image = layout.token_mask, None, False
    if stands_in and sees is not None:
        sees = sees[:, None]  # no text sees the stand-in image, and there is no progress to keep
    else:
        decided = mask is not None and mask.decides(call.length, layout.num_tokens)
        samples = None if decided else call.samples
        markers = _markers(config, call, decided, packed=samples is not None)
        if markers is not None and mask is None:
            _check_markers_of_images(config, call, markers, rows)
        # Where padding alone hides images, its mask has the rows of the images, and is smaller.
        masked = mask is not None or progress.held is not None or progress.coming is not None
        by_image = config.image_visibility == "all" and not masked and samples is None
        of_text = layout if rows is None or by_image else rows.layout_of_text(layout)
        sees, after = look(config.image_visibility, of_text, progress, markers, mask, call.rows, call.length, samples)
    group = block.num_attention_heads // block.num_key_value_heads
    shape: dict[str, Any] = {"text_len": call.length, "group": group, "null_key": block.quiet_softmax}
    if rows is None:
        folded, visible = fold_mask(sees, image_rows=image_rows, text_rows=call.rows, **shape)
    else:
        folded, visible = rows.fold(sees, by_image=by_image, **shape)
    keeps = cross is not None and new is not None and call.uncached is None
    key_positions = None
    if block.position_bias:
        key_positions = token_positions((layout if rows is None else rows.layout_of_text(layout)).token_mask)
    groups = None
    if layout.token_mask is not None and not stands_in:
        groups = _groups(config, call, layout, rows, image_rows, by_image)
    context = CrossAttentionContext(
        cache=cross,
        mask=folded,
        visible=visible,
        slots=None if rows is None else Slots(rows.slots, rows.places),
        query_positions=call.positions,
        key_positions=key_positions,
        output_attentions=call.output_attentions or None,
        keep_keys_values=keeps or None,
        recorder=None if stands_in else Recorder(),
        unused=unused,
        **image_fields(None if new is None else new.states, None if new is None else new.layout, groups),
    )
    shown = layout if cross is not None and new is None else None
    return BlockInputs(context, new.layout if new is not None and keeps else None, shown, after)


def keep(call: Call, prepared: BlockInputs) -> None:
    """Updates the cache after a forward: keys and values of new images for all blocks, and what the text has seen."""
    cache, context = call.cache, prepared.context
    if cache is None or call.uncached is not None:
        return
    if prepared.new is not None and context is not None and context.recorder is not None:
        keys_values = context.recorder.collected()
        cache.cross_attention_cache.fill(prepared.new, keys_values)
        if cache.offloads:
            cache.cross_attention_cache.offload_all()
        cache.mark_updated(len(keys_values))
    if prepared.layout is not None:
        cache.cross_attention_cache.show(prepared.layout)
    if prepared.progress is not None:
        cache.progress = prepared.progress
    cache.text_rows = call.rows
    cache.count_text(call.length, call.device, call.positions)


def _groups(
    config: XAttnConfig, call: Call, layout: ImageLayout, rows: ImageRows | None, image_rows: int, only_padding: bool
) -> tuple[RowGroup, ...] | None:
    """The image rows that share a call of the attention kernel (see `layers/row_groups.py`)."""
    block = config.cross_attention_config
    text_rows = call.rows if rows is None else rows.slots.shape[0]
    heads = block.num_attention_heads // block.num_key_value_heads
    return group_rows(
        row_spans(layout, image_rows),
        num_tokens=layout.num_tokens,
        token_size=2 * block.num_key_value_heads * block.head_dim,
        queries=text_rows // image_rows * call.length * heads,
        null_key=block.quiet_softmax,
        only_padding=only_padding,
        device=call.device,
    )


def _images_of(call: Call, encoder: ImageEncoder, trains: bool) -> ImagesOfCall:
    if isinstance(call.images, PreparedImages):
        return ImagesOfCall(call.images.new, call.images.new.layout, call.images.mask)
    call.images.check_device(call.device, "text")
    # Digests cost a pass over the images. Training does not need them, and compiled code cannot compare them.
    record = call.cache is not None and not trains and not torch.compiler.is_compiling()
    packed = None if call.samples is None else PackedText(call.samples, _found_markers(encoder.config, call))
    return read_images(encoder, call.images, call.cache, TextOfCall(call.rows, call.length, packed=packed), record)


def _markers(config: XAttnConfig, call: Call, decided: bool, packed: bool) -> torch.Tensor | None:
    """Returns `(B, T)`, True where the text holds an image marker; None if what the text sees does not depend on markers.

    Args:
        decided (`bool`): whether the caller's mask decides everything, so the markers may be unknown.
        packed (`bool`): whether rows are packed, so the markers tell which sample an image belongs to.
    """
    if config.image_visibility == "all" and not packed:
        return None
    markers = _found_markers(config, call)
    if markers is not None:
        return markers
    if packed:
        missing = "`input_ids`" if call.text.get("input_ids") is None else "`image_token_id` in the configuration"
        raise ValueError(
            "Expected packed rows (`position_ids` that start again or leave some out) with image markers, which tell the sample of each "
            f"image, got no {missing}. Pass a `cross_attention_mask` of shape (batch, text_len, num_image_tokens) in place of markers."
        )
    if not decided:
        raise ValueError(
            f"`image_visibility={config.image_visibility!r}` depends on the image markers in `input_ids`, got `inputs_embeds`. Pass "
            "`input_ids`, or a `cross_attention_mask` of shape (batch, text_len, num_image_tokens)."
        )
    return torch.zeros(call.rows, call.length, dtype=torch.bool, device=call.device)


def _found_markers(config: XAttnConfig, call: Call) -> torch.Tensor | None:
    input_ids = call.text.get("input_ids")
    return None if input_ids is None or config.image_token_id is None else input_ids == config.image_token_id


def _check_markers_of_images(config: XAttnConfig, call: Call, markers: torch.Tensor, rows: ImageRows | None) -> None:
    """Raises a `ValueError` if no text token can see an image: its row has too few markers, and no text will follow.

    Training on such rows would change nothing, because the gradient of every block is zero.
    """
    if (
        call.continues
        or not isinstance(call.images, ImageInputs)
        or call.images.images is None
        or (torch.compiler.is_compiling() and call.samples is None)
        or is_fake(markers)
    ):
        return
    images, real = call.images.images, call.images.real_images
    of_images = images.new_full(images.shape[:1], images.shape[1], dtype=torch.long) if real is None else real.sum(-1)
    total = rows_to(of_images, call.rows) if rows is None else rows.counts_of_text(of_images)
    total, found = total.to(markers.device), markers.sum(dim=-1)
    if call.samples is not None:
        check_packed_images(config, call.samples, total, found)
    if torch.compiler.is_compiling():
        return
    if config.image_visibility != "all" and bool((found < total).any()):
        raise ValueError(
            f"Expected one image marker (token {config.image_token_id}) in `input_ids` for each image, because of "
            f"`image_visibility={config.image_visibility!r}`: {total.tolist()} images a row, got {found.tolist()} markers. If the rest of the "
            "text follows in another call, pass `use_cache=True`."
        )


def _warn_of_constant_images(cross: CrossCache, encoder: ImageEncoder) -> None:
    """Warns if weights should learn, but the cached keys and values were computed without gradients."""
    if not cross.layers[0].keys.requires_grad and encoder.learns():
        logger.warning_once(
            "The images in `past_key_values` were encoded without gradients, so key and value projections, connector and vision tower do "
            "not learn from this text. Call `encode_images` outside of `torch.no_grad()`, or pass the images instead of a cache. To train "
            "only the other weights, call `requires_grad_(False)` on these parts."
        )


def _embeddings_learn(call: Call) -> bool:
    embeddings = call.text.get("inputs_embeds")
    return embeddings is not None and embeddings.requires_grad
