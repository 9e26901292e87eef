"""A conversation with one model: its messages, its images, and a cache that is kept from turn to turn."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers import StoppingCriteriaList, TextIteratorStreamer, TextStreamer
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

from ..cache.xattn_cache import XAttnCache
from ..maps.answer_maps import Word, answer_maps, words_of
from ..maps.attention_maps import AttentionMaps


if TYPE_CHECKING:
    from PIL.Image import Image
    from transformers import PreTrainedTokenizerBase

    from ..modeling_xattn import XAttnForConditionalGeneration
    from ..processing.chat_templates import Processor


@dataclass(frozen=True, eq=False)
class Answer:
    """An answer of a conversation."""

    text: str
    ids: torch.Tensor  # the tokens of the answer
    asked: list[dict[str, Any]]  # the messages before the answer, of which the last one is the question

    @property
    def num_images(self) -> int:
        """Number of images in the question and in all messages before it."""
        return sum(isinstance(message["content"], list) and len(message["content"]) - 1 for message in self.asked)

    def words(self, tokenizer: PreTrainedTokenizerBase) -> list[Word]:
        """Returns the words of the answer. Their tokens are indices into `ids`."""
        return words_of(self.ids.tolist(), tokenizer)


class ChatSession:
    """One conversation.

    Every turn renders the whole conversation with the chat template and passes it to `generate` with the cache of
    earlier turns. The model only reads tokens, and only encodes images, that are not in the cache yet. If the template
    renders earlier turns differently than before, the cache is cropped to the tokens that are still the same.

    With `image_visibility="all"`, all text sees all images. A new image then makes the model read the whole
    conversation again. An image store prevents that it also encodes the earlier images again.

    Args:
        model ([`XAttnForConditionalGeneration`]): the model.
        processor: an [`XAttnProcessor`], or a tokenizer for a model without images.
        system (`str`, *optional*): a system message.
        cache ([`XAttnCache`], *optional*): encoded images, with which the first question begins. `processor` then must
            not return their pixels.
        options: keyword arguments of `generate`, for every turn.
    """

    def __init__(
        self,
        model: XAttnForConditionalGeneration,
        processor: Any,
        system: str | None = None,
        cache: XAttnCache | None = None,
        **options: Any,
    ):
        self.model = model
        self.processor = processor
        self.tokenizer = getattr(processor, "tokenizer", processor)
        self.system = system
        self.options = options
        self._turn = threading.Lock()
        self.clear()
        self._cache: XAttnCache | None = cache

    def clear(self) -> None:
        """Starts a new conversation: drops all messages and images, except the system message."""
        self.messages: list[dict[str, Any]] = []
        if self.system is not None:
            self.messages.append({"role": "system", "content": self.system})
        self.answers: list[Answer] = []
        self._cached_ids = torch.empty(0, dtype=torch.long)
        self.drop_cache()

    def drop_cache(self) -> None:
        """Frees the memory of the cache. The next turn reads the whole conversation again."""
        self._cache = None

    def ask(
        self,
        text: str,
        images: list[Image] | None = None,
        streamer: TextStreamer | None = None,
        stop: Callable[[], bool] | None = None,
    ) -> str:
        """Asks one question, with images, and returns the answer.

        Args:
            text (`str`): the question.
            images (`list[PIL.Image.Image]`, *optional*): images that come before the text.
            streamer (`TextStreamer`, *optional*): receives the answer while it is generated.
            stop (`Callable`, *optional*): is called after each token. The answer ends when it returns True.

        Raises:
            ValueError: if the conversation with its answer would be longer than the model supports. After any error,
                the conversation is the same as before the question.
        """
        messages = [*self.messages, question(text, images)]
        try:
            inputs = self._inputs(messages)
            answer_ids = self._generate(inputs, streamer, stop)
        except BaseException:
            # The cache may hold images of the failed question. Without it, the next turn reads the whole conversation.
            self._cache = None
            raise
        answer = self.tokenizer.decode(answer_ids, skip_special_tokens=True)
        self.messages = [*messages, {"role": "assistant", "content": answer}]
        self.answers.append(Answer(answer, answer_ids, messages))
        return answer

    def stream(
        self, text: str, images: list[Image] | None = None, stop: threading.Event | None = None
    ) -> Iterator[str]:
        """Asks one question in a thread, and yields the answer piece by piece.

        When the iterator ends, the answer is the last of `answers`. If the caller sets `stop` or closes the iterator,
        the answer ends after the current token. A question that comes while another one is being answered waits for
        it. The errors are those of [`~ChatSession.ask`].
        """
        stop = stop or threading.Event()
        pieces = TextIteratorStreamer(self.tokenizer, skip_prompt=True, skip_special_tokens=True)
        done: Future[str] = Future()

        def answer() -> None:
            try:
                with self._turn:
                    done.set_result(self.ask(text, images, pieces, stop.is_set))
            except BaseException as error:
                done.set_exception(error)
            finally:  # The iterator must end, also if the answer has failed.
                pieces.text_queue.put(pieces.stop_signal)

        threading.Thread(target=answer, name="hf_xattn answer", daemon=True).start()
        try:
            yield from filter(None, pieces)
            done.result()
        finally:
            stop.set()

    def maps(self, answer: Answer) -> AttentionMaps:
        """Computes the attention maps of one of `answers`, like [`answer_maps`]. They only cover the answer.

        Raises:
            ValueError: if there are no images in the conversation up to the answer.
        """
        return answer_maps(self.model, self._inputs(answer.asked), answer.ids)

    def _inputs(self, messages: list[dict[str, Any]]) -> dict[str, Any]:
        inputs, room = chat_inputs(self.model, self.processor, messages)
        new_tokens = self.options.get("max_new_tokens", 0)
        if new_tokens > room:
            length = inputs["input_ids"].shape[1]
            raise ValueError(
                f"Expected a conversation of at most {length + room} tokens, the limit of the model, got {length} "
                f"tokens and `max_new_tokens={new_tokens}` for the answer. Start a new conversation."
            )
        return inputs

    def _generate(
        self, inputs: dict[str, Any], streamer: TextStreamer | None, stop: Callable[[], bool] | None
    ) -> torch.Tensor:
        input_ids = inputs["input_ids"]
        layout = None if (cache := self._cache) is None else cache.cross_attention_cache.layout
        known = 0 if layout is None else layout.num_images
        if self.model.config.image_visibility == "all" and "pixel_values" in inputs:
            if inputs["pixel_values"].shape[1] > known:
                self._cache = None  # All text sees all images, and the cached text has not seen the new ones.
        cache = self._cache_for(input_ids[0])
        # If generation fails, the cache must not be used again, because its state is unknown.
        self._cache = None
        stopping = None if stop is None else StoppingCriteriaList([lambda *_, **__: stop()])
        given: dict[str, Any] = {"cache": cache, "streamer": streamer, "stopping_criteria": stopping}
        sequences = self.model.generate(**inputs, **given, use_cache=True, **self.options)
        # The model has not read the last token of an answer.
        if cache.broken is None and int(cache.get_seq_length()) == len(sequences[0]) - 1:
            self._cache, self._cached_ids = cache, sequences[0, :-1]
        return sequences[0, input_ids.shape[1] :]

    def _cache_for(self, input_ids: torch.Tensor) -> XAttnCache:
        """Returns the cache, cropped to the beginning that it shares with `input_ids`, or a new cache."""
        cache = self._cache  # Another thread may drop `self._cache` in the meantime.
        if cache is not None:
            cached = len(self._cached_ids)
            shared = _common_length(self._cached_ids, input_ids[:-1])  # `generate` needs at least one new token.
            if shared == cached:
                return cache
            if shared and cache.can_be_cropped:
                try:
                    cache.crop(shared - cached)
                    return cache
                except (ValueError, RuntimeError):
                    pass  # A sliding window has already dropped tokens that are needed now.
        text_config = self.model.config.get_text_config()
        return XAttnCache.adopt(EncoderDecoderCache(DynamicCache(config=text_config), DynamicCache()))


def question(text: str, images: list[Image] | None) -> dict[str, Any]:
    """Returns a message of the user: the images, followed by the text."""
    if not images:
        return {"role": "user", "content": text}
    parts = [*({"type": "image", "image": image} for image in images), {"type": "text", "text": text}]
    return {"role": "user", "content": parts}


def chat_inputs(
    model: XAttnForConditionalGeneration, processor: Processor, messages: list[Any], **variables: Any
) -> tuple[dict[str, Any], float]:
    """Prepares the inputs of the model for a chat.

    Args:
        messages (`list[dict]`): the messages of the chat.
        variables: variables of the chat template.

    Returns:
        The inputs on the device of the model, and the number of tokens that an answer may have. The number is infinity
        if the model does not limit it.
    """
    made: Any = processor.apply_chat_template(
        messages, tokenize=True, add_generation_prompt=True, return_dict=True, return_tensors="pt", **variables
    )
    inputs = {name: value.to(model.device) for name, value in made.items() if name != "token_type_ids"}
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return inputs, math.inf if longest is None else longest - inputs["input_ids"].shape[1]


def _common_length(first: torch.Tensor, second: torch.Tensor) -> int:
    """Returns the number of leading tokens that two texts share."""
    shorter = min(len(first), len(second))
    differing = (first[:shorter] != second[:shorter]).nonzero()
    return int(differing[0]) if len(differing) else shorter
