"""Where an answer ends: in front of a stop string, whole or as a stream, or when nobody waits for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import StoppingCriteria


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


class StopWhenAsked(StoppingCriteria):
    """Ends an answer after the token at which `asked` returns True."""

    def __init__(self, asked: Callable[[], bool]):
        self.asked = asked

    def __call__(self, input_ids: torch.LongTensor, scores: Any, **kwargs: Any) -> torch.BoolTensor:
        stops: Any = torch.full((input_ids.shape[0],), self.asked(), device=input_ids.device, dtype=torch.bool)
        return stops
