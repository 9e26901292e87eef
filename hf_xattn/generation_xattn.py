"""Overrides methods of transformers' `generate`, so that images are encoded once, before the first step.

If there is a cache, its cross-attention half gets the keys and values of the images before the first step, and keeps
the caller's mask for the text to come. The decoding methods of transformers then need not know about images: beams and
return sequences share the images, and assisted decoding and chunked prefill need no special case. If `generate` runs
without a cache of text, it passes the cross-attention half to every step as one argument.

transformers collects no `cross_attentions` of decoder-only models, so this file collects them in every step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache, StaticCache
from transformers.generation import GenerateBeamDecoderOnlyOutput, GenerateDecoderOnlyOutput
from transformers.masking_utils import create_masks_for_generate
from transformers.utils import logging
from transformers.utils.deprecation import deprecate_kwarg

from .cache.image_cache import ImageCache
from .cache.xattn_cache import OF_BEAMS, XAttnCache
from .call import adopt_cache
from .decoders import text_inputs
from .decoders.decoder import holds_text
from .images.conversation import PreparedImages, TextOfCall
from .images.image_inputs import IMAGE_ARGUMENTS, NO_IMAGES, ImageInputs, refuse_to_cache
from .images_xattn import XAttnImagesMixin
from .outputs_xattn import XAttnGenerateBeamOutput, XAttnGenerateOutput
from .utils.distributed import fsdp_forward
from .utils.tensor_checks import type_name
from .utils.transformers_api import CACHE, has, needs, takes_cache


if TYPE_CHECKING:
    from transformers import CompileConfig
    from transformers.generation.utils import GenerateOutput

logger = logging.get_logger(__name__)

# Name of an argument that describes the call of `generate` to every step. `forward` never gets it.
REQUEST = "request_of_generate"
# `generate` passes the tokenizers, with which it stops at strings, to every step. `forward` refuses unknown arguments.
NOT_FOR_FORWARD = (REQUEST, "tokenizer", "assistant_tokenizer")
OF_LAYERS = {"attentions", "hidden_states", "cross_attentions"}  # outputs that `generate` collects
# The argument of `forward` for images that `generate` has encoded.
IMAGES = "image_inputs"
NO_MARKERS = (
    "The text of `generate` has no image marker, so with `image_visibility` other than 'all' it sees none of the "
    "images in `cache`. Write a marker (`image_token_id`) where each image belongs."
)
HOLDS_TEXT = (
    "`cache` from `encode_images` holds text, which a `forward` has written into it: the text of `generate` "
    "must begin with the same. To keep images without text, pass `cache.fork(DynamicCache())` to `forward`."
)


@dataclass
class _Request:
    """One call of `generate`: its images and its text, which its steps need, and the attention weights of the steps."""

    inputs: ImageInputs
    text: TextOfCall
    length: int  # length of `input_ids`, which hold the whole text or only the new text
    mask: Any  # the caller's `attention_mask`
    collects: bool = False  # whether the caller wants `cross_attentions`
    steps: list[tuple[torch.Tensor, ...]] = field(default_factory=list)  # the cross-attentions, step by step

    @property
    def cached_in_ids(self) -> int:
        """How many of the cached tokens `input_ids` contain. Assisted decoding does not know that text is cached."""
        return self.length - self.text.new

    def covered(self, mask: Any, length: int) -> Any:
        """Returns the mask for all text. Assisted decoding cuts the mask to the `length` of `input_ids`."""
        all_text = self.text.cached - self.cached_in_ids + length
        if all_text == length or mask is None or mask.dim() != 2 or mask.shape[1] >= all_text:
            return mask
        return torch.nn.functional.pad(self.mask, (0, all_text - self.mask.shape[1]), value=1)

    def add(self, weights: tuple[torch.Tensor, ...] | None, accepted: int | None) -> None:
        """Adds the cross-attentions of one forward.

        `accepted` is the number of candidates that assisted decoding keeps; None with other methods. The first
        candidate follows the last token of the known text.
        """
        if weights is None:
            return
        if accepted is None:
            self.steps.append(weights)
            return
        known = 1 if self.steps else min(self.text.new, weights[0].shape[2])
        ends = [known + count for count in range(accepted)]
        for start, end in zip([0, *ends[:-1]], ends):
            self.steps.append(tuple(of_block[:, :, start:end] for of_block in weights))

    def result(self, outputs: Any) -> Any:
        """Adds the field `cross_attentions` to what `generate` returns, if that is an output class of transformers."""
        for parent, derived in (
            (GenerateDecoderOnlyOutput, XAttnGenerateOutput),
            (GenerateBeamDecoderOnlyOutput, XAttnGenerateBeamOutput),
        ):
            if type(outputs) is parent:
                # A last step that transformers takes back, or runs only for other ranks, leaves no `attentions`.
                steps = self.steps[: len(outputs.attentions)] if outputs.attentions else self.steps
                return derived(**outputs, cross_attentions=tuple(steps) or None)
        return outputs


class XAttnGenerationMixin:
    """Overrides methods of `GenerationMixin`, and methods of `PreTrainedModel` that `GenerationMixin` calls.

    It must be the first base class of a model.
    """

    config: Any  # [`XAttnConfig`]
    model: XAttnImagesMixin

    @takes_cache
    @deprecate_kwarg("cache_params", "6.0.0", new_name="cache")
    @fsdp_forward
    def generate(self, inputs: torch.Tensor | None = None, *args, **kwargs) -> GenerateOutput | torch.LongTensor:
        """`GenerationMixin.generate`, which also takes the image arguments of `forward`.

        It first checks that text, images, masks and cache belong together.

        Returns:
            what `GenerationMixin.generate` returns. With `return_dict_in_generate=True`, this is an
            [`XAttnGenerateOutput`] or an [`XAttnGenerateBeamOutput`], whose field `cross_attentions` is filled with
            `output_attentions=True`.

        Raises:
            TypeError: for text or an `attention_mask` that is no tensor, text of a wrong dtype, or `image_inputs`.
            ValueError: for images without text, `token_healing` together with images, continuous batching, or text of a
                wrong rank; if the text has image markers but there are no images; if the numbers of markers and images
                differ (with another `image_visibility` than `"all"`); or if the batches or lengths of text, images,
                masks and cache do not fit together.
        """
        given = kwargs.pop(IMAGES, None)
        images = ImageInputs.of(self.config, **{name: kwargs.pop(name) for name in IMAGE_ARGUMENTS if name in kwargs})
        if isinstance(given, _Request) and images is NO_IMAGES:  # from the code of a `custom_generate`
            images = given.inputs
        elif given is not None:
            raise TypeError(f"Expected no `image_inputs` in `generate`, got {type_name(given)}. Pass `pixel_values`.")
        if images.image_rows is not None:
            refuse_to_cache("`generate`")
        if kwargs.get("output_cross_attentions") is not None:
            raise ValueError(
                "Expected no `output_cross_attentions` in `generate`, which would not return them, got "
                f"{kwargs['output_cross_attentions']!r}. Pass `output_attentions=True` and "
                "`return_dict_in_generate=True`."
            )
        cache = kwargs.pop("cache", None)
        if cache is not None:
            cache = kwargs[CACHE] = adopt_cache(cache, images)
        request = self._read_request(inputs, images, cache if isinstance(cache, XAttnCache) else None, kwargs)
        if request.text.rows is not None:
            kwargs[IMAGES] = request
        base: Any = super()
        try:
            return request.result(base.generate(inputs, *args, **kwargs))
        finally:
            if isinstance(cache, XAttnCache):  # after an error, the mask must not apply to another text
                cache.progress = replace(cache.progress, coming=None)

    def _read_request(
        self, inputs: torch.Tensor | None, images: ImageInputs, cache: XAttnCache | None, kwargs: dict[str, Any]
    ) -> _Request:
        """Checks that the text of a call of `generate` fits its images, masks and cache, and finds the new text.

        `cache` is None if the call has no cache, or one for text alone.
        """
        if isinstance(cache, ImageCache) and not cache.cross_attention_cache.rows and images.images is None:
            raise ValueError(
                "Expected `cache` to hold the images of `encode_images`, got a cache without any: `reset` "
                "removes them, too."
            )
        input_ids = inputs if inputs is not None else kwargs.get("input_ids")
        mask, embeds = kwargs.get("attention_mask"), kwargs.get("inputs_embeds")
        text = input_ids if input_ids is not None else embeds
        if text is None:
            if images is not NO_IMAGES:
                raise ValueError(
                    "Expected `input_ids` or `inputs_embeds` beside images, got neither. Pass the text that the answer "
                    "follows: at least one token for each row, such as the BOS token."
                )
            return _Request(images, TextOfCall(None, 1), 1, None)
        if input_ids is None:
            text_inputs.check_embeds(text, self.model.text_model.get_input_embeddings())
        else:
            text_inputs.check_ids("input_ids" if inputs is None else "inputs", input_ids)
        rows, length = text.shape[:2]
        known = None if cache is None or cache.text_rows is None else cache  # the cache that holds text
        if mask is not None and (input_ids is None or embeds is None):  # of both, the mask covers the longer one
            starts = known is None and (cache is not None or kwargs.get(CACHE) is None)  # one for text may hold some
            text_inputs.check_attention_mask(mask, rows, length, starts)
        images.check_rows(rows, 0 if cache is None else cache.cross_attention_cache.rows)
        marker = self.config.image_token_id if input_ids is not None else None
        if marker is not None and known is None:
            self._check_markers(text, images, cache)
        of_call = TextOfCall(rows, length) if known is None else _text_after(known, text, mask)
        if of_call.cached and marker is not None and self.config.image_visibility != "all":
            of_call = of_call._replace(markers=text[:, -of_call.new :] == marker)
        return _Request(images, of_call, length, mask)

    def _prepare_generation_config(self, *args: Any, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        """The method of transformers, which collects the options that `generate` will use.

        Raises a `ValueError` for an option with which transformers would answer without the images.
        """
        base: Any = super()
        config, model_kwargs = base._prepare_generation_config(*args, **kwargs)
        request, cache = model_kwargs.get(IMAGES), model_kwargs.get(CACHE)
        sees = isinstance(request, _Request) and request.inputs is not NO_IMAGES
        sees = sees or (isinstance(cache, XAttnCache) and cache.cross_attention_cache.rows > 0)
        text_inputs.check_options(self, config, sees, masked=model_kwargs.get("attention_mask") is not None)
        if config.suppress_tokens == [None]:  # TRL suppresses the image marker, which is None without markers
            config.suppress_tokens = None
        return config, model_kwargs

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises a `ValueError`, because continuous batching in transformers passes no images to the steps."""
        raise ValueError(
            f'Continuous batching (`generate_batch`, `init_continuous_batching`, `cache_implementation="paged"`) is '
            f"not supported by {type(self).__name__}: it passes no images to the steps. Call `generate` with a batch. "
            "For text alone, call `generate_batch` of `model.model.text_model`."
        )

    def _prepare_cache_for_generation(self, generation_config, model_kwargs: dict[str, Any], *args, **kwargs):
        given = model_kwargs.get(CACHE)
        if given is not None and generation_config.use_cache is False:  # each step would add the whole text again
            raise ValueError(
                f"Expected `use_cache=True` with `cache`, of type {type(given).__name__}, got "
                "`use_cache=False`, given or in the generation configuration. Pass `use_cache=True`, or no cache."
            )
        if (reason := self.model.why_uncached()) is not None and generation_config.use_cache is not False:
            if given is not None:
                raise ValueError(f"{reason}, so `cache` cannot be used. Call `model.eval()`.")
            logger.warning_once(f"{reason}, so `generate` works without a cache, slowly. Call `model.eval()`.")
            generation_config.use_cache = model_kwargs["use_cache"] = False
        image_cache = given if isinstance(given, ImageCache) and not int(given.get_seq_length()) else None
        if image_cache is not None:
            # `generate` uses a fork of the cache, because the caller may use the cache again.
            del model_kwargs[CACHE]
        elif isinstance(given, ImageCache):
            logger.warning_once(HOLDS_TEXT)
        base: Any = super()
        result = base._prepare_cache_for_generation(generation_config, model_kwargs, *args, **kwargs)
        request: _Request | None = model_kwargs.pop(IMAGES, None)
        if request is not None:
            model_kwargs[REQUEST] = request
            request.collects = generation_config.return_dict_in_generate and generation_config.output_attentions
            decoder, chunk = self.model._interface, getattr(generation_config, "prefill_chunk_size", None)
            if chunk is not None or decoder.keeps_state or decoder.forgets:
                self._choose_chunk(generation_config, request, model_kwargs, given)
        cache = model_kwargs.get(CACHE)
        if image_cache is not None:
            assert cache is not None
            cache = image_cache.fork(cache)
        if cache is None:
            # There is no cache of text. The images are encoded once, and every step reads their keys and values.
            if request is not None:
                encoded = XAttnCache(DynamicCache())
                images = self.model.add_images(encoded, request.inputs, request.text)
                if images.layout is not None:
                    model_kwargs[IMAGES] = PreparedImages(encoded.cross_attention_cache, images.mask)
            return result
        if not isinstance(cache, XAttnCache):
            if cache is given:
                return result  # the caller's cache, which has no place for images
            cache = XAttnCache(cache)
        model_kwargs[CACHE] = cache
        if request is not None:
            images = self.model.add_images(cache, request.inputs, request.text)
            if images.mask is not None or not cache.progress.is_blank:
                cache.progress = replace(cache.current_progress(), coming=images.mask)
        if isinstance(cache.self_attention_cache, StaticCache):
            cache.cross_attention_cache.mark_static()
        if cache.offloads:
            cache.cross_attention_cache.offload_all()
            # torch 2.11 frees a stream of a compiled, offloaded cache too early, and the process ends (seen on a GPU)
            if generation_config.compile_config is not None:
                logger.warning_once("`compile_config` has no effect: a step with an offloaded cache is not compiled.")
            generation_config.disable_compile = True
        return result

    def _choose_chunk(
        self, generation_config: Any, request: _Request, model_kwargs: dict[str, Any], given: Cache | None
    ) -> None:
        """Chooses how many tokens of the prompt each forward reads.

        It follows `prefill_chunk_size`. But if the decoder would forget cached text, it reads the new tokens one by
        one.
        """
        text, decoder = request.text, self.model._interface
        chunk = getattr(generation_config, "prefill_chunk_size", None)
        if decoder.forgets and chunk not in (None, 1) and (text.cached or chunk < text.new):
            raise ValueError(
                f"Expected `prefill_chunk_size` to be None or 1, got {chunk}: {decoder.name} drops its state when it "
                "reads several tokens after cached text."
            )
        if decoder.forgets and text.cached and text.new > 1:
            if model_kwargs.get("inputs_embeds") is not None:
                raise ValueError(
                    f"Expected no `inputs_embeds` after cached text, got it with {text.new} new tokens: {decoder.name} "
                    "reads them one at a time."
                )
            chunk = generation_config.prefill_chunk_size = 1
        mask, text_half = model_kwargs.get("attention_mask"), getattr(given, "self_attention_cache", given)
        if isinstance(mask, torch.Tensor) and text.rows:
            mask = mask[:: max(mask.shape[0] // text.rows, 1)]  # without the copies for beams and return sequences
        decoder.check_padding(mask, text.new, text_half, by_one=1 in (chunk, text.new), generates=True)
        if chunk is not None and not has("prefill_chunk_size") and (text.cached or holds_text(text_half)):
            what = f"Reading several new tokens with {decoder.name}" if decoder.forgets else "`prefill_chunk_size`"
            raise ValueError(needs("prefill_chunk_size", f"{what} after cached text"))

    def _check_markers(self, input_ids: torch.Tensor, images: ImageInputs, cache: XAttnCache | None) -> None:
        """Raises a `ValueError` if the numbers of image markers and of images in a first call do not fit together."""
        marker = self.config.image_token_id
        markers = (input_ids == marker).sum(dim=-1)
        cached = 0 if cache is None else cache.cross_attention_cache.rows
        if images.images is None and not cached:
            if markers.any():
                raise ValueError(
                    f"`input_ids` holds image markers (token {marker}; {markers.tolist()} a row), but no images were "
                    "given: pass `pixel_values`, `vision_features`, `cross_attention_states` or a cache of "
                    "`encode_images`."
                )
            return
        if self.config.image_visibility == "all" or images.text_mask is not None:
            return  # the rule or the mask decides what the text sees, and not the markers
        if cached and images.images is None and not markers.any():
            logger.warning_once(NO_MARKERS)
        if cached or images.images is None:
            return
        real = images.real_images
        counts = torch.full(images.images.shape[:1], images.images.shape[1]) if real is None else real.sum(dim=-1).cpu()
        if counts.shape == markers.shape and not torch.equal(markers.cpu(), counts):
            raise ValueError(
                f"`input_ids` holds {markers.tolist()} image markers (token {marker}) a row, but {counts.tolist()} "
                f"images were given: with `image_visibility={self.config.image_visibility!r}` each image needs its "
                "marker."
            )

    @takes_cache
    def prepare_inputs_for_generation(
        self,
        input_ids: torch.LongTensor,
        next_sequence_length: int | None = None,
        cache: Cache | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,  # transformers refuses it if this method has no such argument
        is_first_iteration: bool | None = False,
        **kwargs,
    ) -> dict[str, Any]:
        """The method of transformers, with two changes.

        A decoder that has only state-space layers gets no mask after its prompt. And assisted decoding does not read
        text again that the given cache already holds.
        """
        request: _Request | None = kwargs.get(REQUEST)
        for name in NOT_FOR_FORWARD:
            kwargs.pop(name, None)
        if request is not None and request.text.cached:
            whole = is_first_iteration and next_sequence_length is None and input_ids.shape[1] >= request.length
            if whole and request.cached_in_ids:
                next_sequence_length = input_ids.shape[1] - request.cached_in_ids
            attention_mask = request.covered(attention_mask, input_ids.shape[1])
        if isinstance(cache, XAttnCache) and cache.is_stateful() and not is_first_iteration:
            attention_mask = None
        base: Any = super()
        return base.prepare_inputs_for_generation(
            input_ids,
            next_sequence_length=next_sequence_length,
            attention_mask=attention_mask,
            inputs_embeds=inputs_embeds,
            is_first_iteration=is_first_iteration,
            **{CACHE: cache},
            **kwargs,
        )

    def _update_model_kwargs_for_generation(self, outputs, model_kwargs: dict[str, Any], *args, **kwargs):
        """The method of transformers, which runs after every step. It also collects the cross-attentions, if asked."""
        request: _Request | None = model_kwargs.get(REQUEST)
        if request is not None and request.collects:
            accepted = kwargs.get("num_new_tokens")  # only assisted decoding passes it
            request.add(outputs.cross_attentions, None if accepted is None else int(accepted))
            if accepted is not None and outputs.attentions == ():
                outputs.attentions = (None,)  # assisted decoding looks at the first entry; SDPA leaves none
        base: Any = super()
        return base._update_model_kwargs_for_generation(outputs, model_kwargs, *args, **kwargs)

    def get_compiled_call(self, compile_config: CompileConfig | None) -> Callable[..., Any]:
        """The method of transformers, which compiles a step or a chunk of the prompt.

        When a CUDA graph runs again, it overwrites its earlier results. transformers copies the logits. This method
        also copies the other results that are needed after the call.
        """
        base: Any = super()
        compiled = base.get_compiled_call(compile_config)

        def call(*args: Any, **kwargs: Any) -> Any:
            outputs = compiled(*args, **kwargs)
            for name in outputs.keys() & OF_LAYERS:
                outputs[name] = tuple(None if each is None else each.clone() for each in outputs[name])
            if isinstance(cache := outputs.get(CACHE), XAttnCache):
                cache.leave_graph()
            return outputs

        return call

    def _beam_search(self, *args: Any, **kwargs: Any) -> Any:
        """The method of transformers, after which the cache cannot be used for more text.

        It orders the cache by the beams that still run, and these may be other beams than those that it returns.
        """
        base: Any = super()
        output = base._beam_search(*args, **kwargs)
        if isinstance(cache := kwargs.get(CACHE), XAttnCache):
            cache.broken = OF_BEAMS
        return output

    def _get_candidate_generator(self, *args: Any, **kwargs: Any) -> Any:
        """The method of transformers. The assistant gets the arguments of `generate`, but collects no attentions."""
        given = kwargs.get("model_kwargs", {})
        kwargs["model_kwargs"] = {name: value for name, value in given.items() if name != REQUEST}
        base: Any = super()
        return base._get_candidate_generator(*args, **kwargs)

    @takes_cache
    def create_masks_for_generate(self, config, cache: Cache | None = None, **kwargs):
        """Makes the masks of the text model, from the text half of the cache.

        A decoder that has only state-space layers takes the mask as it is.
        """
        if isinstance(cache, EncoderDecoderCache):
            if isinstance(cache, XAttnCache) and cache.is_stateful():
                return kwargs.get("attention_mask")
            cache = cache.self_attention_cache
        own: Any = getattr(self.model.text_model, "create_masks_for_generate", create_masks_for_generate)
        text_config = self.model.text_model.config
        return own(config=text_config, **{CACHE: cache}, **kwargs)


def _text_after(cache: XAttnCache, text: torch.Tensor, attention_mask: Any) -> TextOfCall:
    """Finds how much of the text is new, after the text in `cache`.

    `text` is the whole text, or only the new text if the `attention_mask` is longer.

    Raises:
        ValueError: if the cache holds as much text as is given, or more; or if the length of the mask is not that of
            the cached text and the new text together.
    """
    rows, length = text.shape[:2]
    cached = int(cache.get_seq_length())
    if isinstance(attention_mask, torch.Tensor) and attention_mask.dim() == 2 and attention_mask.shape[1] != length:
        if attention_mask.shape[1] != cached + length:
            raise ValueError(
                f"Expected `attention_mask` of shape (batch, {length}) for the whole text, or (batch, "
                f"{cached + length}) if `input_ids` are new behind the {cached} tokens in `cache`, got "
                f"{tuple(attention_mask.shape)}. The last token that `generate` returned is new, too."
            )
        return TextOfCall(rows, length, cached)
    if cached and length <= cached:
        raise ValueError(
            f"Expected `input_ids` with the text in `cache` ({cached} tokens) and new text, got {length} "
            "tokens. Pass the whole text, or only the new one with an `attention_mask` for all of it."
        )
    return TextOfCall(rows, length - cached, cached)
