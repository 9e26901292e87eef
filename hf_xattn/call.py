"""The steps of one forward, in the order in which `forward` and `XAttnModel._run` call them.

    given_images        checks the image arguments
    read_call           reads what the caller passes: text, images, cache
    find_images         finds the images of the call; new images go through the tower and the connector. It returns None
                        if there are no images: the text model then runs without blocks
    decide              decides which image tokens each text token sees
    find_keys_values    finds the keys and values of all images; each block projects those of new images, once
    make_context        makes the context, the one argument that all blocks read
    (the text model runs, with the context as a keyword argument; the blocks only read it)
    commit              writes the images, and what the text has seen of them, into the cache

Of these functions, only `commit` changes the cache. So a step that fails leaves the cache as it was.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache
from transformers.utils import logging

from .cache.cross_cache import CrossCache, KeyValue
from .cache.image_layout import ImageLayout, rows_to
from .cache.states import check_no_gradient, check_not_training
from .cache.text_progress import TextProgress
from .cache.visibility import Samples, Visibility, decide_visibility
from .cache.xattn_cache import XAttnCache
from .configuration_xattn import XAttnConfig
from .decoders.decoder import DecoderInterface, holds_text
from .images.conversation import ImagesOfCall, PreparedImages, TextOfCall, read_images
from .images.image_encoder import ImageEncoder, ModelBody
from .images.image_inputs import NO_IMAGES, ImageInputs, refuse_to_cache
from .layers.context import CrossAttentionContext, Recorder, fold_mask
from .layers.positions import Positions, text_positions, token_positions
from .utils.distributed import is_distributed
from .utils.tensor_checks import has_values, is_fake, type_name


logger = logging.get_logger(__name__)

# `DataParallel` cuts a batch into as many parts as its smallest tensor has rows.
CUT_BY_DATA_PARALLEL = (
    "Expected `image_rows` in a process for each GPU, got it under `torch.nn.DataParallel`, which `Trainer` uses with "
    "several GPUs in one process: it cuts text and images into parts that do not belong together, and drops text rows. "
    "Use `torchrun` or `accelerate launch`."
)


@dataclass
class Call:
    """The checked arguments of one forward."""

    text: dict[str, Any]  # the arguments of the text model itself
    rows: int  # number of text rows
    length: int  # number of text tokens in a row
    device: torch.device  # device of the text
    images: ImageInputs | PreparedImages  # `PreparedImages` if `generate` runs without a cache
    cache: XAttnCache | None  # None if nothing is cached, or if the caller's cache cannot hold images
    cross: CrossCache | None  # the image half of `cache`, or the images that `generate` has encoded
    text_cache: Cache | None  # the cache that the text model gets
    starts: bool  # whether `cache` holds no earlier text
    use_cache: bool
    output_attentions: bool
    uncached: str | None  # why this forward must not write into a cache; None if it may
    continues: bool  # whether the caller passed a cache or asked for one, so more text may follow
    trains: bool  # whether the model is in training mode and computes gradients
    samples: Samples | None  # the samples of packed rows; None if no row is packed
    positions: torch.Tensor | None  # `(rows or 1, length)`, positions of the text; None if no block reads them


class ForwardModel(ModelBody, Protocol):
    """What a forward calls of [`XAttnModel`]. Its methods are described in [`XAttnImagesMixin`]."""

    training: bool
    _interface: DecoderInterface
    _folder: str

    def find_samples(
        self,
        text: dict[str, Any],
        cache: Cache | None,
        use_cache: bool | None,
        images: ImageInputs | PreparedImages,
        without_cache: bool,
    ) -> Samples | None: ...

    def why_uncached(self) -> str | None: ...

    def images_of_nobody(self, call: Call) -> ImagesOfCall | None: ...

    def zero_of_others(self, starts: bool, projects: bool = False) -> torch.Tensor | None: ...

    def project_images(
        self, states: torch.Tensor, cross: CrossCache, layout: ImageLayout | None = None
    ) -> list[KeyValue]: ...


def given_images(
    config: XAttnConfig, prepared: PreparedImages | None, **arguments: Any
) -> ImageInputs | PreparedImages:
    """Returns the images of a forward: those of its image arguments, or those that `generate` has prepared."""
    if prepared is None:
        return ImageInputs.of(config, **arguments)
    if not isinstance(prepared, PreparedImages):
        raise TypeError(
            f"Expected `image_inputs` to be PreparedImages, which only `generate` makes, got {type_name(prepared)}. "
            "Pass `pixel_values` or `cross_attention_states` instead."
        )
    for name, value in arguments.items():
        if value is not None:
            raise ValueError(f"Expected `image_inputs` or `{name}`, got both.")
    return prepared


def read_call(
    model: ForwardModel,
    text: dict[str, Any],
    images: ImageInputs | PreparedImages,
    given_cache: Cache | None,
    use_cache: bool | None,
    output_attentions: bool,
) -> Call:
    """Reads what the caller of a forward passes, and finds its cache. The text must be checked already.

    Raises:
        TypeError: if `cache` is not a cache of transformers.
        ValueError: if the cache cannot be used for this call.
    """
    check_cache(given_cache)
    config, decoder = model.config, model._interface
    given = text["inputs_embeds"] if text.get("input_ids") is None else text["input_ids"]
    rows, length = given.shape[:2]
    uncached = model.why_uncached()
    wants_cache = use_cache
    if use_cache is None:
        wants_cache = getattr(config.get_text_config(decoder=True), "use_cache", True)
    shares_images = isinstance(images, ImageInputs) and images.image_rows is not None
    without_cache = given_cache is None and (shares_images or uncached is not None or not wants_cache)
    samples, positions = None, text.get("position_ids")
    if length > 1:
        # Positions that count up by 1, as those of `generate`, belong to one sample.
        is_one = positions is None or (has_values(positions) and bool((positions.diff(dim=-1) == 1).all()))
        if not is_one or text.get("cu_seq_lens_q") is not None:
            samples = model.find_samples(text, given_cache, use_cache, images, without_cache)
    continues = given_cache is not None or bool(use_cache)
    if shares_images and continues:
        refuse_to_cache("`use_cache=True`" if given_cache is None else "`cache`")
    if shares_images and getattr(model, "_is_replica", False):
        raise ValueError(CUT_BY_DATA_PARALLEL)
    use_cache = bool(wants_cache) and uncached is None and samples is None and not shares_images
    cache = None
    if given_cache is not None or use_cache:
        cache = _find_cache(config, given_cache, images, rows, length)
    text_cache = given_cache if cache is None else cache.self_attention_cache
    if uncached is not None:
        if holds_text(text_cache):  # layers that run twice do not read it
            raise ValueError(
                f"{uncached}, so no text can be added to `cache`, which already holds text. Call `model.eval()` and "
                "use `torch.no_grad()`, or turn gradient checkpointing off."
            )
        text_cache = None
    if given_cache is not None and text_cache is not None:
        decoder.check_continues(length, text_cache, text.get("attention_mask"))
    if decoder.keeps_state:
        decoder.check_padding(text.get("attention_mask"), length, text_cache, by_one=length == 1)
    starts = given_cache is None or cache is None or cache.text_rows is None
    if cache is not None and not starts and cache.can_be_cropped and not torch.compiler.is_compiling():
        starts = not cache.get_seq_length()  # all text was removed
    return Call(
        text=text,
        rows=rows,
        length=length,
        device=given.device,
        images=images,
        cache=cache,
        cross=cache.cross_attention_cache if cache is not None else getattr(images, "cross", None),
        text_cache=text_cache,
        starts=starts,
        use_cache=use_cache,
        output_attentions=output_attentions,
        uncached=uncached,
        continues=continues,
        trains=model.training and torch.is_grad_enabled(),
        samples=samples,
        positions=text_positions(text, cache, given) if config.cross_attention_config.counts_text else None,
    )


def check_cache(cache: object) -> None:
    """Raises a `TypeError` for anything but a cache of transformers, or None."""
    if cache is not None and not isinstance(cache, Cache):
        raise TypeError(
            "Expected `cache` to be a cache of transformers, such as `EncoderDecoderCache(DynamicCache(), "
            f"DynamicCache())`, got {type_name(cache)}."
        )


def adopt_cache(cache: Cache, images: ImageInputs | PreparedImages) -> Cache:
    """Returns a caller's cache, as an [`XAttnCache`] if it has a place for images.

    Raises:
        TypeError: for anything but a cache of transformers.
        ValueError: for images beside a cache that has no place for them.
    """
    check_cache(cache)
    if isinstance(cache, EncoderDecoderCache):
        return XAttnCache.adopt(cache)
    if isinstance(images, ImageInputs) and images.images is not None:
        raise ValueError(
            f"Expected `cache` to be a cache for text and images, got a {type(cache).__name__}. Pass "
            "`EncoderDecoderCache(DynamicCache(), DynamicCache())`. Prefix tuning (PEFT) passes such a cache, and does "
            "not work beside images: use LoRA or prompt tuning."
        )
    return cache


def _find_cache(
    config: XAttnConfig, given: Any, images: ImageInputs | PreparedImages, rows: int, length: int
) -> XAttnCache | None:
    """Returns the caller's cache for text and images, or a new one. None if the caller's cache is for text alone."""
    prepared = images.cross.shared() if isinstance(images, PreparedImages) else None
    if given is None:
        return XAttnCache(DynamicCache(config=config.get_text_config(decoder=True)), prepared)
    if prepared is not None:
        raise ValueError("Expected `image_inputs`, which are for a call without a cache, or `cache`, got both.")
    cache = given if isinstance(given, XAttnCache) else adopt_cache(given, images)
    if not isinstance(cache, XAttnCache):
        return None
    cache.check_usable(rows, length)
    return cache


def find_images(model: ForwardModel, call: Call) -> ImagesOfCall | None:
    """Finds the images of a call, and turns new images into image tokens. The cache is not changed.

    Returns None if there are no images and no block has to run.

    Raises:
        ValueError: if the images of the call and those of the cache do not fit together.
    """
    cross = call.cross
    if call.images is NO_IMAGES and not call.trains and not is_distributed():
        # In a decode step, or for a text without images, there is nothing to encode.
        return None if cross is None or cross.layout is None else ImagesOfCall(None, cross.layout, None)
    if cross is not None and cross.cache_dtype is not None:  # cached keys and values are rounded
        if call.trains:
            check_not_training(cross.cache_dtype)
        if isinstance(call.images, ImageInputs) and call.images.images is not None:
            check_no_gradient(cross.cache_dtype)
    encoder = model.image_encoder
    images = _read(call, encoder)
    if images.layout is None:
        return model.images_of_nobody(call)
    if images.new is None:
        images = images._replace(zero=model.zero_of_others(call.starts))
    elif isinstance(call.images, ImageInputs) and not call.images.pass_connector:
        images = images._replace(zero=model.zero_of_others(call.starts, projects=True))
    if cross is not None and cross.layers:
        if call.uncached is not None and images.new is not None:
            raise ValueError(
                f"{call.uncached}, so no images can be added to `cache`, which already holds images. Pass "
                "all images in one call, or encode them before with `encode_images`."
            )
        if call.trains:
            _warn_of_constant_images(cross, encoder)
    return images


def _read(call: Call, encoder: ImageEncoder) -> ImagesOfCall:
    if isinstance(call.images, PreparedImages):
        return ImagesOfCall(None, call.images.cross.layout, call.images.mask)
    call.images.check_device(call.device, "text")
    # A digest costs a pass over the image. Training does not need digests, and compiled code cannot compare them.
    record = call.cache is not None and not call.trains and not torch.compiler.is_compiling()
    markers = None
    if call.samples is not None or encoder.config.image_visibility != "all":
        markers = _markers(encoder.config, call)
    packed = None if call.samples is None else call.samples.with_markers(markers)
    text = TextOfCall(call.rows, call.length, packed=packed, markers=markers)
    return read_images(encoder, call.images, call.cache, text, record)


def decide(config: XAttnConfig, call: Call, images: ImagesOfCall) -> Visibility:
    """Decides which image tokens each text token of a call sees.

    Raises:
        ValueError: if the decision needs image markers, and these are unknown or too few.
    """
    layout, mask = images.layout, images.mask
    assert layout is not None
    if images.rows is not None:
        layout = layout.of_text(images.rows)
    only_padding = Visibility(None if layout.token_mask is None else layout.token_mask[:, None], None)
    if images.unseen:
        return only_padding
    progress = TextProgress(history=None) if call.cache is None else call.cache.progress
    decided = mask is not None and mask.decides(call.length, layout.num_tokens)
    samples = None if decided else call.samples
    if config.image_visibility == "all" and mask is None and progress.is_blank and samples is None:
        return only_padding
    if call.cache is not None:
        progress = call.cache.current_progress()
    markers = None
    if config.image_visibility != "all" or samples is not None:
        markers = _markers(config, call)
        if markers is None and not decided:
            raise ValueError(
                f"`image_visibility={config.image_visibility!r}` depends on the image markers in `input_ids`, got "
                "`inputs_embeds`. Pass `input_ids`, or a `cross_attention_mask` of shape (batch, text_len, "
                "num_image_tokens)."
            )
        if markers is None:  # the mask decides, and not the markers
            markers = torch.zeros(call.rows, call.length, dtype=torch.bool, device=call.device)
        if mask is None:
            _check_markers_of_images(config, call, markers, layout)
    shape = call.rows, call.length
    return decide_visibility(config.image_visibility, layout, progress, markers, mask, *shape, samples)


def find_keys_values(model: ForwardModel, call: Call, images: ImagesOfCall) -> CrossCache:
    """Returns the keys and values of all images. Every block projects new images once. The cache is not changed."""
    if images.ready is not None:
        return images.ready
    cross, zero = CrossCache() if call.cross is None or images.unseen else call.cross, images.zero
    if images.new is None:
        return cross if zero is None else cross.plus_zero(zero)
    assert images.layout is not None and images.new.states is not None
    # FSDP reduces the gradients of the projections only if their input requires a gradient. Every rank must do so.
    states = images.new.states if zero is None else images.new.states + zero.to(images.new.states.dtype)
    seen = CrossCache()
    seen.fill(images.layout, model.project_images(states, cross, images.new.layout), cross.made_by)
    seen.read_by = model._folder
    return seen


def make_context(
    config: XAttnConfig, call: Call, images: ImagesOfCall, visibility: Visibility, cross: CrossCache
) -> CrossAttentionContext:
    """Makes the context of a call: keys, values, mask and positions for all blocks."""
    block, rows = config.cross_attention_config, images.rows
    mask, visible = fold_mask(
        visibility.sees,
        image_rows=cross.rows if rows is None else call.rows,
        text_rows=call.rows,
        text_len=call.length,
        group=block.num_attention_heads // block.num_key_value_heads,
        null_key=block.quiet_softmax,
    )
    positions = None
    if block.counts_text:
        assert images.layout is not None
        layout = images.layout if rows is None else images.layout.of_text(rows)
        positions = Positions(call.positions, token_positions(layout.token_mask))
    return CrossAttentionContext(
        cache=cross,
        mask=mask,
        visible=visible,
        rows=None if rows is None else rows.clamp(min=0),
        positions=positions,
        recorder=None if images.unseen else Recorder(call.output_attentions),
    )


def commit(
    call: Call,
    images: ImagesOfCall | None,
    visibility: Visibility | None,
    seen: CrossCache | None,
) -> None:
    """Writes the images of a call, and what its text has seen of them, into the cache.

    `images`, `visibility` and `seen` are None for a text without images.
    """
    cache = call.cache
    assert cache is not None
    cross = cache.cross_attention_cache
    if images is not None and not images.unseen:
        assert images.layout is not None and visibility is not None and seen is not None
        if images.new is None:
            cross.layout = images.layout
        else:
            cross.take_over(seen)
            cache.note_images(call.length)
            if cache.offloads:
                cross.offload_all()
        if visibility.progress is not None:
            cache.progress = visibility.progress
    if call.starts:
        cache.text_rows = call.rows
    if cache.is_stateful():
        cache.count_text(call.length, call.device, call.positions)


def _markers(config: XAttnConfig, call: Call) -> torch.Tensor | None:
    """Returns a mask `(B, T)`, True at each image marker of the text; None if the markers are unknown."""
    input_ids, marker = call.text.get("input_ids"), config.image_token_id
    if input_ids is None or marker is None:
        return None
    if marker == getattr(config.get_text_config(decoder=True), "pad_token_id", None):
        raise ValueError(
            f"Expected `image_token_id` to be another token than `pad_token_id` of the text model, got {marker} for "
            "both: padding would count as image markers. Add a token for images (`additional_vocab_size=1`)."
        )
    return input_ids == marker


def _check_markers_of_images(config: XAttnConfig, call: Call, markers: torch.Tensor, layout: ImageLayout) -> None:
    """Raises a `ValueError` if no text token can see an image: its row has too few markers, and no text will follow.

    Such an image changes nothing: not the answer, and in training no weight.
    """
    if (
        call.continues
        or not isinstance(call.images, ImageInputs)
        or call.images.images is None
        or (torch.compiler.is_compiling() and call.samples is None)
        or is_fake(markers)
    ):
        return
    total, found = rows_to(layout.counts, call.rows).to(markers.device), markers.sum(dim=-1)
    if call.samples is not None:
        call.samples.check_images(config, total, found)
    if torch.compiler.is_compiling():
        return
    if config.image_visibility != "all" and bool((found < total).any()):
        raise ValueError(
            f"Expected one image marker (token {config.image_token_id}) in `input_ids` for each image, because of "
            f"`image_visibility={config.image_visibility!r}`: {total.tolist()} images a row, got {found.tolist()} "
            "markers. If the rest of the text follows in another call, pass `use_cache=True`."
        )
    if config.image_visibility == "all" or layout.image_mask is None:
        return
    # A hidden image takes no marker. If the text has one for it, this marker and those after it would show the wrong
    # images.
    hidden = (layout.image_mask.long().diff(dim=-1) > 0).any(dim=-1)
    hidden = rows_to(hidden, call.rows).to(markers.device)
    if bool((hidden & (found > total)).any()):
        raise ValueError(
            f"Expected one image marker (token {config.image_token_id}) in `input_ids` for each image that "
            f"`image_mask` shows, because of `image_visibility={config.image_visibility!r}`: {total.tolist()} images a "
            f"row, got {found.tolist()} markers, and a hidden image in front of others. Remove its marker."
        )


def _warn_of_constant_images(cross: CrossCache, encoder: ImageEncoder) -> None:
    """Warns if weights that encode images should train, but the cached keys and values have no gradients."""
    if not cross.layers[0].keys.requires_grad and encoder.learns():
        logger.warning_once(
            "The images in `cache` were encoded without gradients, so key and value projections, connector "
            "and vision tower do not learn from this text. Call `encode_images` outside of `torch.no_grad()`, or pass "
            "the images instead of a cache. To train only the other weights, call `requires_grad_(False)` on these "
            "parts."
        )
