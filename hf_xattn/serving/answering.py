"""One model that answers many clients: one thread prepares the requests, and another thread answers one at a time."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers import StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from .chat_session import chat_inputs
from .request_limits import Refused
from .request_pictures import unpack_pictures
from .served_requests import Asked


if TYPE_CHECKING:
    from ..modeling_xattn import XAttnForConditionalGeneration


UNFINISHED = "\ufffd"  # A tokenizer decodes a character to this if some of its bytes are in the next token.
LOOKS = 0.5  # seconds between two checks whether a client is still connected


@dataclass(frozen=True)
class Answer:
    """A complete answer."""

    text: str
    num_prompt_tokens: int
    num_tokens: int
    finish_reason: str  # "length" if the answer was cut off, otherwise "stop"


def place_of_stop(text: str, stops: list[str]) -> int | None:
    """Returns the index at which the first stop string begins in a text. None if the text has no stop string."""
    return min((place for stop in stops if (place := text.find(stop)) >= 0), default=None)


def shown_length(text: str, stops: list[str]) -> int:
    """Returns how many characters of an unfinished text can be shown.

    These are the characters before a stop string. If the text ends with the beginning of a stop string, that beginning
    is not shown yet.
    """
    place = place_of_stop(text, stops)
    if place is not None:
        return place
    longest = min(len(text), max(map(len, stops), default=1) - 1)
    begun = (n for n in range(longest, 0, -1) if any(stop.startswith(text[-n:]) for stop in stops))
    return len(text) - next(begun, 0)


class _Pieces(BaseStreamer):
    """Streams the text of an answer. Text that may be the beginning of a stop string waits for the next token."""

    def __init__(self, tokenizer: Any, stops: list[str], give: Callable[[str], Any]):
        self.tokenizer, self.stops, self.give = tokenizer, stops, give
        self.ids: list[int] = []
        self.given, self.begun = "", False

    def put(self, value: torch.Tensor) -> None:
        if self.begun:  # The first call passes the prompt.
            self.ids += value.flatten().tolist()
            text = self.tokenizer.decode(self.ids, skip_special_tokens=True)
            if not text.endswith(UNFINISHED) and text.startswith(self.given):
                self.finish(text[: shown_length(text, self.stops)])
        self.begun = True

    def end(self) -> None:
        """transformers calls this at the end of an answer. It does nothing, because [`finish`] gives the rest."""

    def finish(self, text: str) -> None:
        """Streams the rest of a text, of which the beginning was streamed before."""
        if len(text) > len(self.given):
            self.give(text[len(self.given) :])
            self.given = text


class Answering:
    """Answers requests with one model. The answers are those of `generate`.

    Args:
        model ([`XAttnForConditionalGeneration`]): the model.
        processor: an [`XAttnProcessor`], or a tokenizer for a model without images.
    """

    def __init__(self, model: XAttnForConditionalGeneration, processor: Any):
        self.model, self.processor = model, processor
        self.tokenizer = getattr(processor, "tokenizer", processor)
        # Each has one thread: the images of one request are decoded at a time, and one request is answered at a time.
        self._preparing, self._answering = ThreadPoolExecutor(1), ThreadPoolExecutor(1)

    async def prepare(self, asked: Asked) -> dict[str, Any]:
        """Returns the arguments of `generate`. Raises [`Refused`] if the prompt leaves no place for an answer."""
        return await asyncio.get_running_loop().run_in_executor(self._preparing, self._prepare, asked)

    def _prepare(self, asked: Asked) -> dict[str, Any]:
        unpack_pictures(asked.images)
        inputs, room = chat_inputs(self.model, self.processor, asked.messages, **asked.variables)
        if room <= 0:
            length = inputs["input_ids"].shape[1]
            raise Refused(
                f"Expected a prompt of fewer than {length + room} tokens, the limit of the model, got {length}. Send a "
                "shorter conversation."
            )
        return {**inputs, **asked.options, "max_new_tokens": min(asked.options["max_new_tokens"], room)}

    async def pieces(
        self, asked: Asked, arguments: dict[str, Any], has_left: Callable[[], Awaitable[bool]] | None = None
    ) -> AsyncGenerator[str | Answer, None]:
        """Yields the [`Answer`] when it is complete. If the request asks for a stream, first yields pieces of its text.

        Generation stops if the caller closes the iterator, or if `has_left` says that the client is gone.
        """
        loop, left = asyncio.get_running_loop(), threading.Event()
        pieces: asyncio.Queue[str | None] = asyncio.Queue()

        def give(piece: str) -> None:
            loop.call_soon_threadsafe(pieces.put_nowait, piece)

        done = loop.run_in_executor(self._answering, self._answer, asked, arguments, give, left)
        done.add_done_callback(lambda _: pieces.put_nowait(None))
        try:
            while True:
                try:
                    piece = await asyncio.wait_for(pieces.get(), LOOKS)
                except asyncio.TimeoutError:
                    if has_left is not None and await has_left():
                        return
                    continue
                if piece is None:
                    break
                yield piece
            yield done.result()
        finally:
            left.set()

    def _answer(
        self, asked: Asked, arguments: dict[str, Any], give: Callable[[str], Any], left: threading.Event
    ) -> Answer:
        length = arguments["input_ids"].shape[1]
        pieces = _Pieces(self.tokenizer, asked.stops, give)
        # The longest stop string has fewer tokens than this: a character has at most four bytes, a token at least one.
        window = 4 * max(map(len, asked.stops), default=0) + 4

        def ends(input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            """Returns which rows end with a stop string, or were left by their client. Special tokens count, too.

            The criterion of transformers first compares every stop string with every token of the vocabulary, which
            takes seconds for strings that a client chooses. It also leaves the stop string in the answer.
            """
            last = input_ids[:, max(length, input_ids.shape[1] - window) :] if asked.stops else input_ids[:, :0]
            texts = self.tokenizer.batch_decode(last, skip_special_tokens=False)
            done = [left.is_set() or place_of_stop(text, asked.stops) is not None for text in texts]
            return torch.tensor(done, device=input_ids.device)

        if left.is_set():  # The client has left while the request waited.
            return Answer("", length, 0, "stop")
        devices = [self.model.device] if self.model.device.type == "cuda" else []
        # The seed of one request must not change the random numbers of later requests.
        with torch.random.fork_rng(devices, enabled=asked.seed is not None):
            if asked.seed is not None:
                torch.manual_seed(asked.seed)
            tokens: Any = self.model.generate(
                **arguments,
                tokenizer=self.tokenizer,
                stopping_criteria=StoppingCriteriaList([ends]),
                streamer=pieces if asked.stream else None,
            )
        ids = tokens[0, length:].tolist()
        text = self.tokenizer.decode(ids, skip_special_tokens=True)
        stop = place_of_stop(text, asked.stops)
        pieces.finish(text[:stop])
        cut = stop is None and len(ids) >= arguments["max_new_tokens"]
        return Answer(text[:stop], length, len(ids), "length" if cut else "stop")
