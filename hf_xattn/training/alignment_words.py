"""The words of an alignment: those of the rows' texts, those that images tell, and the text model's states at them.

Answers are full of words that no image tells, such as the `yes`, `there` and `is` of questions that were asked by
chance. If image tokens were put at the states of these words, too, most of what keys and queries compare would be
noise. So half of the images must let a regression find a word in the other half ([`ToldWords`]). The regression
needs only sums, which take the same memory for any number of images ([`RidgeSums`]).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..data.rows import IMAGE_SOURCES, read_row, text_of
from ..decoders.decoder import find_decoder
from ..processing.chat_messages import IMAGES, parts_of
from ..processing_xattn import XAttnProcessor


PENALTY = 1.0
WORD = re.compile(r"\w+(?:['’-]\w+)*")
MOST_WORDS = 4096  # the most frequent ones have a state
PROMPTS = 4  # different beginnings of answers, of which a word's state is the mean
TOLD = 0.04  # squared correlation with what is found in images that were not fitted; below it a word is left out
MANY = 50  # images with a word, and without it: where there are fewer, it stays


class RidgeSums:
    """The sums of a regression `min |features @ weight.T + bias - targets|² + PENALTY (|weight|² + |bias|²)`.

    Args:
        bias (`bool`): whether there is one.
        before (`RidgeSums`, *optional*): of the same features with other targets: what is of features alone is theirs.
    """

    def __init__(self, bias: bool = True, before: RidgeSums | None = None):
        self.bias = bias
        self.products: Any = 0.0  # (inputs, outputs), float64
        self._adds_features = before is None
        self.count: int = 0 if before is None else before.count
        self.squares: Any = 0.0 if before is None else before.squares  # (inputs, inputs)

    def add(self, features: torch.Tensor, targets: torch.Tensor) -> None:
        """`(count, inputs)` and `(count, outputs)`; or `(tokens, inputs)` and the one target of all, `(outputs,)`."""
        inputs, targets = self._inputs(features), with_float64(targets).double()
        alike = targets.dim() == 1
        self.products = self.products + (inputs.sum(0)[:, None] * targets if alike else inputs.T @ targets)

    def add_some(self, features: torch.Tensor, targets: torch.Tensor, outputs: torch.Tensor, count: int) -> None:
        """`(tokens, inputs)` and `(tokens, len(outputs))`; of the other ones of `count` outputs the target is zero."""
        inputs = self._inputs(features)
        if not isinstance(self.products, torch.Tensor):
            self.products = inputs.new_zeros(inputs.shape[1], count)
        self.products[:, outputs] += inputs.T @ targets.double()

    def _inputs(self, features: torch.Tensor) -> torch.Tensor:
        features = with_float64(features)
        inputs = with_one(features).double() if self.bias else features.double()
        if self._adds_features:
            self.count += len(inputs)
            self.squares = self.squares + inputs.T @ inputs
        return inputs

    def plus(self, other: RidgeSums) -> RidgeSums:
        """The sums of the examples of both."""
        both = RidgeSums(self.bias)
        both.count = self.count + other.count
        both.squares, both.products = self.squares + other.squares, self.products + other.products
        return both

    def solve(self) -> torch.Tensor:
        """`(inputs, outputs)`, in float64; the last row is the bias."""
        penalty = PENALTY * torch.eye(len(self.squares), dtype=torch.float64, device=self.squares.device)
        return torch.linalg.solve(self.squares + penalty, self.products)


def with_float64(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor where sums can be in float64: Apple's GPUs have none."""
    return tensor.cpu() if tensor.device.type == "mps" else tensor


def with_one(features: torch.Tensor) -> torch.Tensor:
    """The features and a constant, for the bias: `(count, inputs + 1)`."""
    return torch.cat([features, torch.ones_like(features[:, :1])], dim=1)


class CannotAlign(ValueError):
    """A model or rows that no alignment suits. A row that is broken is another error."""


class Texts:
    """The words of the rows: those that images differ in, with the share of the images that have them."""

    def __init__(self, rows: Sequence[Any], processor: XAttnProcessor):
        counts: Counter[str] = Counter()
        self.pictures, self.prompts = 0, list[str]()
        for _, words, asked in grouped(rows):
            self.pictures += 1
            counts.update(words)
            if len(self.prompts) < PROMPTS:
                prompt = rendered(processor, asked, add_generation_prompt=True)
                self.prompts += [prompt] * (prompt not in self.prompts)
        if not self.pictures:
            raise CannotAlign(f"Expected `rows` with pictures and answers or captions, got none in {len(rows)} rows.")
        differing = Counter({word: count for word, count in counts.items() if count < self.pictures})
        self.words = sorted(word for word, _ in differing.most_common(MOST_WORDS))
        self.shares = {word: counts[word] / self.pictures for word in self.words}
        if len(self.words) < 2:
            raise CannotAlign(
                f"Expected `rows` whose texts name what pictures differ in, got {self.pictures} picture(s) whose texts "
                f"differ in {len(self.words)} word(s)."
            )


def rendered(processor: XAttnProcessor, messages: list[dict[str, Any]], where: str = "", **options: Any) -> str:
    """The text of a chat. Raises a `ValueError` if the template refuses it, whatever the template raises."""
    try:
        text: Any = processor.apply_chat_template(messages, tokenize=False, **options)
    except Exception as error:
        place = where or "One of `rows`"
        raise ValueError(f"{place}: expected messages that the chat template takes, got {messages}: {error}") from error
    return text


def grouped(rows: Sequence[Any]) -> Iterator[tuple[list[Any], set[str], list[dict[str, Any]]]]:
    """The images of rows that stand together, the words of their answers, and a chat that asks for one."""

    def read() -> Iterator[tuple[list[Any], set[str], list[dict[str, Any]]]]:
        for index in range(len(rows)):
            try:
                conversation = read_row(rows[index])
            except (TypeError, ValueError) as error:
                if hasattr(rows, "where"):  # `Rows` say where the row is
                    raise
                raise type(error)(f"`rows[{index}]`: {error}") from error
            parts = [part for message in conversation.messages for part in parts_of(message) if part["type"] in IMAGES]
            pictures = [next(part[name] for name in IMAGE_SOURCES if name in part) for part in parts]
            said = [text_of(conversation.messages[answer]) for answer in conversation.answers]
            words = set(WORD.findall(" ".join(said)))
            if pictures and words:
                before = conversation.messages[: conversation.answers[0]]
                yield pictures, words, [{"role": each["role"], "content": text_of(each)} for each in before]

    def name(read_one: tuple[list[Any], set[str], Any]) -> list[Any]:
        return [each if isinstance(each, (str, bytes, Path)) else id(each) for each in read_one[0]]

    for _, group in groupby(read(), key=name):
        alike = list(group)
        yield alike[0][0], set().union(*(words for _, words, _ in alike)), alike[0][2]


class ToldWords:
    """A regression from the inputs of the connector's last layer to words, each of which all tokens of an image have.

    Args:
        bias (`bool`): whether the layer has one.
        texts (`Texts`): their words are the outputs.
    """

    def __init__(self, bias: bool, texts: Texts):
        self._texts, self._places = texts, {word: place for place, word in enumerate(texts.words)}
        self._shares = torch.tensor([texts.shares[word] for word in texts.words])
        self._tokens = RidgeSums(bias), RidgeSums(bias)  # of every other image
        self._means = RidgeSums(bias), RidgeSums(bias)  # of the mean token of each image
        self._squares = [torch.zeros(len(texts.words), dtype=torch.float64) for _ in range(2)]  # of the targets
        self._pictures = 0

    def add(self, features: torch.Tensor, words: set[str]) -> None:
        """Adds the image tokens `(tokens, inputs)` of an image, and the words of its text."""
        target, half = -self._shares, self._pictures % 2
        target[[self._places[word] for word in words if word in self._places]] += 1
        self._squares[half] += target.square()
        self._tokens[half].add(features, target.to(features.device))
        self._means[half].add(features.mean(0, keepdim=True), target.to(features.device))
        self._pictures += 1

    def keep(self) -> RidgeSums:
        """Leaves the other words out of the texts. Returns the sums of the rest.

        Raises [`CannotAlign`] if the images tell fewer than two words.
        """
        share, told = self._shares, self.told()
        judged = self._pictures * torch.minimum(share, 1 - share) >= MANY
        kept = (~judged | (told >= TOLD)).nonzero().flatten()
        words = [self._texts.words[place] for place in kept.tolist()]
        if len(words) < 2:
            raise CannotAlign(
                f"Expected `rows` whose texts name what pictures show, got {self._pictures} pictures that tell "
                f"{len(words)} of {len(self._texts.words)} words."
            )
        self._texts.words = words
        sums = self._tokens[0].plus(self._tokens[1])
        sums.products = sums.products[:, kept.to(sums.products.device)]
        return sums

    def told(self) -> torch.Tensor:
        """Squared correlation of each word `(words,)` with what the other half finds in the mean token of an image."""
        found = torch.zeros(len(self._places), dtype=torch.float64)
        if self._pictures < 2:
            return found
        for tokens, means, squares in zip(self._tokens, reversed(self._means), reversed(self._squares)):
            solved = tokens.solve()
            both = (solved * means.products).sum(0).clamp(min=0).cpu()
            found += both**2 / ((solved * (means.squares @ solved)).sum(0).cpu() * squares).clamp(min=1e-12) / 2
        return found


class _Reached(Exception):
    """All hidden states that are asked for are there."""


@torch.no_grad()
def states_in_front(
    text_model: PreTrainedModel, layers: Sequence[int], input_ids: list[list[int]]
) -> dict[int, list[torch.Tensor]]:
    """The hidden states in front of layers, for each text `(tokens, hidden_size)`, in float32. Later layers do not run.

    Args:
        input_ids (`list[list[int]]`): texts. They are padded at the right end, where no causal decoder looks.
    """
    _, decoder = find_decoder(text_model)
    found: dict[int, torch.Tensor] = {}

    def keeper(layer: int) -> Any:
        def keep(_: nn.Module, args: Any, kwargs: Any) -> None:
            found[layer] = (args[0] if args else kwargs["hidden_states"]).detach()
            if layer == max(layers):
                raise _Reached

        return keep

    longest = max(map(len, input_ids))
    padded = torch.tensor([[*each, *[each[-1]] * (longest - len(each))] for each in input_ids])
    hooks = [decoder[layer].register_forward_pre_hook(keeper(layer), with_kwargs=True) for layer in {*layers}]
    try:
        text_model(input_ids=padded.to(text_model.device), use_cache=False)
    except _Reached:
        pass
    finally:
        for hook in hooks:
            hook.remove()
    for layer, rows in found.items():
        if rows.shape[:-1] != padded.shape:
            raise ValueError(
                f"Expected hidden states (batch, text_len, hidden_size) in front of layer {layer} of the text model, "
                f"got shape {tuple(rows.shape)}: `align_connector` knows one stream of them."
            )
    return {layer: [row[: len(ids)].float() for row, ids in zip(rows, input_ids)] for layer, rows in found.items()}


def word_states(
    text_model: PreTrainedModel,
    tokenizer: Any,
    layer: int,
    words: Sequence[str],
    prompts: Sequence[str],
    at_once: int = 1,
) -> torch.Tensor:
    """The hidden states in front of a layer at the ends of words, the mean over `prompts`, `(words, hidden_size)`.

    Args:
        prompts (`Sequence[str]`): texts in front of the word.
        at_once (`int`): texts in a batch.
    """
    texts = [prompt + word for word in words for prompt in prompts]
    states: list[torch.Tensor] = []
    for start in range(0, len(texts), at_once):
        ids = tokenizer(texts[start : start + at_once], add_special_tokens=False)["input_ids"]
        states += [each[-1].cpu() for each in states_in_front(text_model, [layer], ids)[layer]]
    return torch.stack(states).unflatten(0, (len(words), len(prompts))).mean(1)


def told_apart(states: torch.Tensor) -> torch.Tensor:
    """The states of two words or more without their mean, each with a mean square of 1: what tells them apart."""
    different = states - states.mean(0)
    return different / different.square().mean(-1, keepdim=True).sqrt()
