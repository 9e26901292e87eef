"""One model that answers many clients: one thread prepares their requests, and another answers them in turn."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers import StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from .request_errors import Refused
from .request_pictures import unpack_pictures
from .served_requests import Asked
from .stop_strings import StopAtText, StopWhenAsked, place_of_stop, shown_length


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
        made = self.processor.apply_chat_template(
            asked.messages,
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
            **asked.variables,
        )
        inputs = {name: value.to(self.model.device) for name, value in made.items() if name != "token_type_ids"}
        length, new_tokens = inputs["input_ids"].shape[1], asked.options["max_new_tokens"]
        longest = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        if longest is not None:
            if length >= longest:
                raise Refused(
                    f"Expected a prompt of fewer than {longest} tokens, the limit of the model, got {length}."
                )
            new_tokens = min(new_tokens, longest - length)
        return {**inputs, **asked.options, "max_new_tokens": new_tokens}

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
        stopping: list[Any] = [StopWhenAsked(left.is_set)]
        if asked.stops:
            stopping.append(StopAtText(self.tokenizer, asked.stops, length))
        if left.is_set():  # while the request waited
            return Answer("", length, 0, "stop")
        with _drawn_from(asked.seed, self.model.device):
            tokens: Any = self.model.generate(
                **arguments,
                tokenizer=self.tokenizer,
                stopping_criteria=StoppingCriteriaList(stopping),
                streamer=pieces if asked.stream else None,
            )
        ids = tokens[0, length:].tolist()
        text = self.tokenizer.decode(ids, skip_special_tokens=True)
        stop = place_of_stop(text, asked.stops)
        pieces.finish(text[:stop])
        cut = stop is None and len(ids) >= arguments["max_new_tokens"]
        return Answer(text[:stop], length, len(ids), "length" if cut else "stop")


@contextlib.contextmanager
def _drawn_from(seed: int | None, device: torch.device) -> Iterator[None]:
    """Draws from a seed. Later requests draw on as before."""
    if seed is None:
        yield
        return
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield
