"""One model that answers many clients: one thread prepares their requests, and another answers them in turn."""

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


UNFINISHED = "\ufffd"  # stands for the bytes of a character whose other bytes are in the next token
LOOKS = 0.5  # seconds between two looks whether a client is still there


@dataclass(frozen=True)
class Answer:
    """A whole answer."""

    text: str
    num_prompt_tokens: int
    num_tokens: int
    finish_reason: str  # "length" if the answer was cut, else "stop"


def place_of_stop(text: str, stops: list[str]) -> int | None:
    """Where the first stop string of a text begins; None without one."""
    return min((place for stop in stops if (place := text.find(stop)) >= 0), default=None)


def shown_length(text: str, stops: list[str]) -> int:
    """How many characters of an unfinished text stand in front of a stop string, and of what may begin one."""
    place = place_of_stop(text, stops)
    if place is not None:
        return place
    longest = min(len(text), max(map(len, stops), default=1) - 1)
    begun = (n for n in range(longest, 0, -1) if any(stop.startswith(text[-n:]) for stop in stops))
    return len(text) - next(begun, 0)


class _Pieces(BaseStreamer):
    """Gives the text of an answer token by token. What may begin a stop string waits for the next token."""

    def __init__(self, tokenizer: Any, stops: list[str], give: Callable[[str], Any]):
        self.tokenizer, self.stops, self.give = tokenizer, stops, give
        self.ids: list[int] = []
        self.given, self.begun = "", False

    def put(self, value: torch.Tensor) -> None:
        if self.begun:  # what comes first is the prompt
            self.ids += value.flatten().tolist()
            text = self.tokenizer.decode(self.ids, skip_special_tokens=True)
            if not text.endswith(UNFINISHED) and text.startswith(self.given):
                self._show(text[: shown_length(text, self.stops)])
        self.begun = True

    def end(self) -> None:
        """Transformers calls this at the end of an answer, but only `finish` knows its whole text."""

    def finish(self, text: str) -> None:
        """Gives the rest of the answer."""
        self._show(text)

    def _show(self, text: str) -> None:
        if len(text) > len(self.given):
            self.give(text[len(self.given) :])
            self.given = text


class Answering:
    """Asks one model. Answers are those of `generate`."""

    def __init__(self, model: XAttnForConditionalGeneration, processor: Any):
        self.model, self.processor = model, processor
        self.tokenizer = getattr(processor, "tokenizer", processor)
        # One request is unpacked at a time.
        self._preparing, self._answering = ThreadPoolExecutor(1), ThreadPoolExecutor(1)

    async def prepare(self, asked: Asked) -> dict[str, Any]:
        """The arguments of `generate`. Raises [`Refused`] for a prompt that fills the model's context."""
        return await asyncio.get_running_loop().run_in_executor(self._preparing, self._prepare, asked)

    def _prepare(self, asked: Asked) -> dict[str, Any]:
        unpack_pictures(asked.images)
        inputs, room = chat_inputs(self.model, self.processor, asked.messages, **asked.variables)
        if room <= 0:
            length = inputs["input_ids"].shape[1]
            raise Refused(
                f"Expected a prompt of fewer than {length + room} tokens, the limit of the model, got {length}."
            )
        return {**inputs, **asked.options, "max_new_tokens": min(asked.options["max_new_tokens"], room)}

    async def pieces(
        self, asked: Asked, arguments: dict[str, Any], has_left: Callable[[], Awaitable[bool]] | None = None
    ) -> AsyncGenerator[str | Answer, None]:
        """Yields the text of an answer as it is generated, if a stream was asked for, and at its end the [`Answer`].

        Generation ends if the caller closes the iterator, or if the client `has_left`.
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
        # More tokens than the longest stop string has: a token holds a byte or more, a character up to four.
        window = 4 * max(map(len, asked.stops), default=0) + 4

        def ends(input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            """Which rows have a stop string in their last token, special tokens included.

            Transformers' own criterion compares every stop string with every token of the vocabulary first, which takes
            seconds for strings that a client chooses. And it leaves the string in the answer.
            """
            last = input_ids[:, max(length, input_ids.shape[1] - window) :] if asked.stops else input_ids[:, :0]
            texts = self.tokenizer.batch_decode(last, skip_special_tokens=False)
            done = [left.is_set() or place_of_stop(text, asked.stops) is not None for text in texts]
            return torch.tensor(done, device=input_ids.device)

        if left.is_set():  # while the request waited
            return Answer("", length, 0, "stop")
        devices = [self.model.device] if self.model.device.type == "cuda" else []
        # Later requests draw on as before.
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
