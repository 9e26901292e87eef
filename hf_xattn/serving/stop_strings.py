"""Texts at which an answer ends: the answer ends in front of them, whole or as a stream."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

import torch
from transformers import StoppingCriteria


def stops_of(*configs: Any) -> list[str]:
    """The stop strings of generation configurations."""
    found: list[str] = []
    for config in configs:
        given = config.stop_strings or []
        found += [given] if isinstance(given, str) else given
    return found


def place_of_stop(text: str, stops: list[str]) -> int | None:
    """Where the first stop string of a text begins; None without one."""
    return min((place for stop in stops if (place := text.find(stop)) >= 0), default=None)


class StopAtText(StoppingCriteria):
    """Ends a row whose answer has a stop string in its last token, special tokens included.

    Transformers' own criterion compares every stop string with every token of the vocabulary first, which takes seconds
    for strings that a client chooses. And it leaves the string in the answer.
    """

    def __init__(self, tokenizer: Any, stops: list[str], prompt_length: int):
        self.tokenizer, self.stops, self.prompt_length = tokenizer, stops, prompt_length
        self.window = 4 * max(map(len, stops)) + 4  # a token holds a byte or more, a character up to four

    def __call__(self, input_ids: torch.LongTensor, scores: Any, **kwargs: Any) -> torch.BoolTensor:
        start = max(self.prompt_length, input_ids.shape[1] - self.window)
        texts = self.tokenizer.batch_decode(input_ids[:, start:], skip_special_tokens=False)
        done = [place_of_stop(text, self.stops) is not None for text in texts]
        return torch.tensor(done, device=input_ids.device)  # type: ignore[return-value]


class UntilStop:
    """The queue of a streamed answer, as transformers' server reads it, up to a stop string.

    Text that may begin a stop string is held back. The queue has pieces of text, each an `str` or a class of its own;
    other things, such as tool calls; and None at the end.
    """

    def __init__(self, queue: asyncio.Queue, stops: list[str]):
        self.queue, self.stops = queue, stops
        self.held, self.kind = "", str
        self.ready: deque[Any] = deque()

    async def get(self) -> Any:
        while not self.ready:
            self._take(await self.queue.get())
        return self.ready.popleft()

    def get_nowait(self) -> Any:
        """Raises `asyncio.QueueEmpty` if nothing is ready."""
        while not self.ready:
            self._take(self.queue.get_nowait())
        return self.ready.popleft()

    def _take(self, item: Any) -> None:
        if type(item) is not self.kind:  # reasoning and answer are texts of their own
            self._give(self.held)
            self.held = ""
            if not isinstance(item, str):
                self.ready.append(item)
                return
            self.kind = type(item)
        text = self.held + item
        place = place_of_stop(text, self.stops)
        if place is not None:
            self._give(text[:place])
            self.ready.append(None)
            return
        lengths = range(min(len(text), max(map(len, self.stops)) - 1), 0, -1)
        held = next((n for n in lengths if any(stop.startswith(text[-n:]) for stop in self.stops)), 0)
        self._give(text[: len(text) - held])
        self.held = text[len(text) - held :]

    def _give(self, text: str) -> None:
        if text:
            self.ready.append(self.kind(text))
