"""The words of an alignment: finds them in the texts, keeps those that images tell, and computes their hidden states.

Answers are full of words that no image tells, such as `yes`, `there` and `is`. If image tokens were aligned to the
states of these words, too, keys and queries would mostly compare noise. So a word is kept only if a regression that is
fitted to half of the images finds the word in the other half ([`ToldWords`]). The regression needs only sums, which
take the same memory for any number of images ([`RidgeSums`]).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..data.rows import IMAGE_SOURCES, image_parts, read_row, text_of
from ..decoders.decoder import find_decoder
from ..processing_xattn import XAttnProcessor


if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PENALTY = 1.0
WORD = re.compile(r"\w+(?:['’-]\w+)*")
MOST_WORDS = 4096  # at most this many words are aligned, the most frequent ones
PROMPTS = 4  # a word's state is the mean over this many texts in front of it
TOLD = 0.04  # a word is left out if its squared correlation with the prediction for the other half is smaller
MANY = 50  # a word is judged if at least this many images have it, and as many lack it; otherwise it is kept


class RidgeSums:
    """The sums of a ridge regression `min |features @ weight.T + bias - targets|² + PENALTY (|weight|² + |bias|²)`.

    Args:
        bias (`bool`): whether the regression has a bias.
        before (`RidgeSums`, *optional*): sums of the same features with other targets. The sums that depend only on the
            features are taken from it and not computed again.
    """

    def __init__(self, bias: bool = True, before: RidgeSums | None = None):
        self.bias = bias
        self.products: Any = 0.0  # (inputs, outputs), float64
        self._adds_features = before is None
        self.count: int = 0 if before is None else before.count
        self.squares: Any = 0.0 if before is None else before.squares  # (inputs, inputs)

    def add(self, features: torch.Tensor, targets: torch.Tensor) -> None:
        """Adds examples.

        Args:
            features (`torch.Tensor`): `(count, inputs)`.
            targets (`torch.Tensor`): `(count, outputs)`, or `(outputs,)` for one target that all examples share.
        """
        inputs, targets = self._inputs(features), with_float64(targets).double()
        alike = targets.dim() == 1
        self.products = self.products + (inputs.sum(0)[:, None] * targets if alike else inputs.T @ targets)

    def add_some(self, features: torch.Tensor, targets: torch.Tensor, outputs: torch.Tensor, count: int) -> None:
        """Adds examples whose targets are zero for most outputs.

        Args:
            features (`torch.Tensor`): `(tokens, inputs)`.
            targets (`torch.Tensor`): `(tokens, len(outputs))`.
            outputs (`torch.Tensor`): indices of the outputs that `targets` has.
            count (`int`): number of all outputs.
        """
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
        """Returns the sums over the examples of both."""
        both = RidgeSums(self.bias)
        both.count = self.count + other.count
        both.squares, both.products = self.squares + other.squares, self.products + other.products
        return both

    def solve(self) -> torch.Tensor:
        """Returns the solution `(inputs, outputs)` in float64. With a bias, the bias is its last row."""
        penalty = PENALTY * torch.eye(len(self.squares), dtype=torch.float64, device=self.squares.device)
        return torch.linalg.solve(self.squares + penalty, self.products)


def with_float64(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor on a device that has float64. Apple's GPUs do not have it."""
    return tensor.cpu() if tensor.device.type == "mps" else tensor


def with_one(features: torch.Tensor) -> torch.Tensor:
    """Appends a constant 1 to the features, for the bias: `(count, inputs + 1)`."""
    return torch.cat([features, torch.ones_like(features[:, :1])], dim=1)


class CannotAlign(ValueError):
    """A model or rows that cannot be aligned. A broken row raises another error."""


class Texts:
    """The words in which the images of the rows differ, and the share of the images that have each word."""

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
            raise CannotAlign(f"Expected `rows` with images and answers or captions, got none in {len(rows)} rows.")
        differing = Counter({word: count for word, count in counts.items() if count < self.pictures})
        self.words = sorted(word for word, _ in differing.most_common(MOST_WORDS))
        self.shares = {word: counts[word] / self.pictures for word in self.words}
        if len(self.words) < 2:
            raise CannotAlign(
                f"Expected `rows` whose texts name what images differ in, got {self.pictures} image(s) whose texts "
                f"differ in {len(self.words)} word(s)."
            )


def rendered(processor: XAttnProcessor, messages: list[dict[str, Any]], where: str = "", **options: Any) -> str:
    """Renders a chat. Any error of the template becomes a `ValueError`, which names the row `where`."""
    try:
        text: Any = processor.apply_chat_template(messages, tokenize=False, **options)
    except Exception as error:
        place = where or "One of `rows`"
        raise ValueError(f"{place}: expected messages that the chat template takes, got {messages}: {error}") from error
    return text


def grouped(rows: Sequence[Any]) -> Iterator[tuple[list[Any], set[str], list[dict[str, Any]]]]:
    """Joins consecutive rows about the same images.

    Yields the images, the words of all answers about them, and the messages in front of the first answer.
    """

    def read() -> Iterator[tuple[list[Any], set[str], list[dict[str, Any]]]]:
        for index in range(len(rows)):
            try:
                conversation = read_row(rows[index])
            except (TypeError, ValueError) as error:
                if hasattr(rows, "where"):  # `Rows` name the row in their error
                    raise
                raise type(error)(f"`rows[{index}]`: {error}") from error
            parts = image_parts(conversation.messages)
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
    """A regression from the inputs of the connector's last layer to words. All tokens of an image have all its words.

    The images are dealt to two halves, so that each half can judge the regression of the other one.

    Args:
        bias (`bool`): whether the layer has a bias.
        texts (`Texts`): their words are the outputs.
    """

    def __init__(self, bias: bool, texts: Texts):
        self._texts, self._places = texts, {word: place for place, word in enumerate(texts.words)}
        self._shares = torch.tensor([texts.shares[word] for word in texts.words])
        self._tokens = RidgeSums(bias), RidgeSums(bias)  # one of each half; a half has every other image
        self._means = RidgeSums(bias), RidgeSums(bias)  # the same for the mean token of each image
        # Sum of the squares of the targets of each word, in each half.
        self._squares = [torch.zeros(len(texts.words), dtype=torch.float64) for _ in range(2)]
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
        """Removes the words from the texts that the images do not tell. Returns the sums for the other words.

        Raises [`CannotAlign`] if the images tell fewer than two words.
        """
        share, told = self._shares, self.told()
        judged = self._pictures * torch.minimum(share, 1 - share) >= MANY
        kept = (~judged | (told >= TOLD)).nonzero().flatten()
        words = [self._texts.words[place] for place in kept.tolist()]
        if len(words) < 2:
            raise CannotAlign(
                f"Expected `rows` whose texts name what images show, got {self._pictures} images that tell "
                f"{len(words)} of {len(self._texts.words)} words."
            )
        self._texts.words = words
        sums = self._tokens[0].plus(self._tokens[1])
        sums.products = sums.products[:, kept.to(sums.products.device)]
        return sums

    def told(self) -> torch.Tensor:
        """Returns how well each word is predicted in the other half `(words,)`.

        This is the squared correlation between the word and the prediction from the mean token of an image.
        """
        found = torch.zeros(len(self._places), dtype=torch.float64)
        if self._pictures < 2:
            return found
        for tokens, means, squares in zip(self._tokens, reversed(self._means), reversed(self._squares)):
            solved = tokens.solve()
            both = (solved * means.products).sum(0).clamp(min=0).cpu()
            found += both**2 / ((solved * (means.squares @ solved)).sum(0).cpu() * squares).clamp(min=1e-12) / 2
        return found


class _Reached(Exception):
    """Ends a forward pass when all hidden states that are needed are there."""


@torch.no_grad()
def states_in_front(
    text_model: PreTrainedModel, layers: Sequence[int], input_ids: list[list[int]]
) -> dict[int, list[torch.Tensor]]:
    """Returns the hidden states in front of layers: for each text `(tokens, hidden_size)`, in float32.

    Layers behind the last of these do not run.

    Args:
        input_ids (`list[list[int]]`): the texts. They are padded on the right, because a causal decoder never attends
            to later tokens.
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
    tokenizer: PreTrainedTokenizerBase,
    layer: int,
    words: Sequence[str],
    prompts: Sequence[str],
    at_once: int = 1,
) -> torch.Tensor:
    """Returns the hidden states in front of a layer at the last token of each word `(words, hidden_size)`.

    Args:
        prompts (`Sequence[str]`): texts in front of the word. A state is the mean over them.
        at_once (`int`): batch size.
    """
    texts = [prompt + word for word in words for prompt in prompts]
    states: list[torch.Tensor] = []
    for start in range(0, len(texts), at_once):
        ids = tokenizer(texts[start : start + at_once], add_special_tokens=False)["input_ids"]
        states += [each[-1].cpu() for each in states_in_front(text_model, [layer], ids)[layer]]
    return torch.stack(states).unflatten(0, (len(words), len(prompts))).mean(1)


def told_apart(states: torch.Tensor) -> torch.Tensor:
    """Returns what tells the states of words apart: the states minus their mean, each with a mean square of 1."""
    different = states - states.mean(0)
    return different / different.square().mean(-1, keepdim=True).sqrt()
