"""Starts a connector where the words are: a ridge regression from features of patches to the states of words.

A block's queries come from text and its keys from the image. The word `seven` finds the patch with a seven in fewer
steps if both are near each other before the first one, and if both are compared where they are near (`block_start.py`).

A caption does not say which patch a word belongs to. So the words are regressed first, as numbers: all image tokens of
an image have its words, each counted once, without what the images have in common. A feature that comes with one
word more often than with the others is then a sign of that word; what every caption says falls out, and so do words
that no image tells (`alignment_words.py`). Such a regression already tells the patches of an image apart, so the
next one gives each word to the patches that are most like it, and the rest to none, a few times over: expectation and
maximisation, as in Brown et al., "The Mathematics of Statistical Machine Translation", 1993 (model 1). A regression
finds little of a rare word, even in its own patches, as nothing is the safe guess. So each word is made as large as its
patches have it. Words become states at the end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from ..images.connector import check_square
from ..processing_xattn import XAttnProcessor
from ..utils.architectures import text_num_hidden_layers
from ..utils.projection import to_dtype_of
from ..utils.tensor_checks import check_trainable, type_name
from .alignment_words import (
    CannotAlign,
    RidgeSums,
    Texts,
    ToldWords,
    grouped,
    told_apart,
    with_float64,
    with_one,
    word_states,
)
from .answer_spans import check_processor
from .block_start import check_fresh, start_blocks
from .freezing import body_of
from .vision_features import tower_of, tower_output


KEPT = 2**30  # bytes of features that are kept from one pass to the next
SOLVED = ("linear", "mlp", "mlp_2d")  # connectors whose last layer is one of weights alone
PASSES = 3  # in which words are given to patches
SHARPER = 2.0  # power of a patch's share of a word
MOST_LARGER = 10.0  # times that a word is made larger at most: what is wrong in it grows too
WORDS_AT_ONCE = 64


class Pictures:
    """The inputs of the connector's last layer for all image tokens of a row's images, and the words of its text.

    Iterated several times. The first images, as many as fit into `KEPT` bytes, go through the tower only once.
    """

    def __init__(self, body: Any, processor: XAttnProcessor, rows: Sequence[Any], batch_size: int):
        self.body, self.processor, self.rows, self.batch_size = body, processor, rows, batch_size
        self._kept: list[tuple[torch.Tensor, set[str]]] = []
        self._room = KEPT

    def __iter__(self) -> Iterator[tuple[torch.Tensor, set[str]]]:
        for features, words in self._kept:
            yield features.float(), words
        waiting: list[tuple[list[Any], set[str]]] = []
        for pictures, words, _ in islice(grouped(self.rows), len(self._kept), None):
            waiting.append((pictures, words))
            if sum(len(each) for each, _ in waiting) >= self.batch_size:
                yield from self._encoded(waiting)
                waiting = []
        if waiting:
            yield from self._encoded(waiting)

    def _encoded(self, waiting: list[tuple[list[Any], set[str]]]) -> Iterator[tuple[torch.Tensor, set[str]]]:
        for features, words in _encoded(self.body, self.processor, waiting):
            half = features.to(torch.bfloat16)  # rounding is far below what tells words apart
            if (size := half.nbytes) <= self._room:
                self._room -= size
                self._kept.append((half, words))
            else:
                self._room = 0  # those that are kept come first
            yield half.float(), words


def _encoded(
    body: Any, processor: XAttnProcessor, waiting: list[tuple[list[Any], set[str]]]
) -> Iterator[tuple[torch.Tensor, set[str]]]:
    images = [[picture] for pictures, _ in waiting for picture in pictures]
    try:
        batches = [processor(images=images)]
    except ValueError:  # images of several sizes
        batches = [processor(images=[each]) for each in images]
    features = [each for batch in batches for each in _features(body, dict(batch))]
    for pictures, words in waiting:
        own, features = features[: len(pictures)], features[len(pictures) :]
        yield torch.cat(own), words


def _features(body: Any, inputs: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """For each image of `(pictures, 1, ...)`: what the connector's last layer reads, `(tokens, width)`, float32."""
    connector = body.connector
    if "pixel_values" in inputs:
        check_square(body.config, inputs["pixel_values"])
    output, tiles = tower_output(body, inputs)
    if tiles is not None:  # no text sees padding tiles
        found = [each[mask != 0].flatten(0, 1) for each, mask in zip(output[:, 0], tiles.aspect_ratio_mask[:, 0])]
    else:
        drops = body.config.vision_feature_select_strategy == "default"
        found = list(output[:, 1:] if drops else output)
    read = []
    for features in found:
        features = to_dtype_of(connector.layers[0], features)
        for layer in connector.layers:
            if layer is solved_layer(body):
                break
            features = layer(features)
        if not bool(torch.isfinite(features).all()):
            raise ValueError("Expected finite features of the vision tower, got NaN or infinite values.")
        read.append(with_float64(features.float()))
    return read


def solved_layer(body: Any) -> Any:
    """The layer that is solved: the last one with weights. A code of places behind it has none."""
    return [layer for layer in body.connector.layers if isinstance(layer, nn.Linear)][-1]


class ConnectorAlignment(NamedTuple):
    """What [`align_connector`] has used."""

    pictures: int
    words: int  # that have a state
    explained: float  # share of what image tokens have of words that the regression gives


def align_connector(
    model: Any,
    processor: XAttnProcessor,
    rows: Sequence[Any],
    *,
    noise: float = 0.25,
    blocks: bool = True,
    batch_size: int = 8,
    seed: int = 0,
) -> ConnectorAlignment:
    """Starts the connector and the blocks of a fresh model by the words of captions or answers, in place.

    The last linear layer of a `"linear"`, `"mlp"` or `"mlp_2d"` connector becomes the ridge regression from the
    features of each image token to the text model's hidden states, in front of the first block, at the words of the
    image's text; each word goes to the tokens that are most like it. The blocks start so that text attends to the
    tokens of the words that it reads (see `block_start.py`); their output projections, the tower and the text model
    stay as they are. Rows without an image are passed over; rows about the same images that stand together count as
    one.

    Args:
        model ([`XAttnForConditionalGeneration`] or [`XAttnModel`]): with a vision tower. Changed in place.
        processor ([`XAttnProcessor`]): of the model.
        rows (`Sequence`): rows as for [`XAttnDataCollator`], for example of [`load_rows`]. They are read five times,
            and some of them once more for the blocks.
        noise (`float`, defaults to 0.25): root mean square of the random component added to the image tokens, where
            that of a token with words is about 1. The alignment keeps only image content that words describe; this
            component lets other details through.
        blocks (`bool`, defaults to `True`): start the blocks too.
        batch_size (`int`, defaults to 8): images at a time.
        seed (`int`, defaults to 0): of the random weights.

    Returns:
        [`ConnectorAlignment`]: numbers of images and words, and the share of the targets that is explained.

    Raises:
        TypeError: for a model without blocks, another processor, or rows that are no sequence.
        ValueError: for a model without a tower or with a connector of another type, image tokens of another width than
            the text, quantized weights, trained blocks or blocks with a code of positions, and rows without images
            or without words that differ among images. The model is not changed then.
    """
    body: Any = body_of(model)
    try:
        _check(body, processor, rows)
    except ValueError as error:
        raise CannotAlign(str(error)) from error
    with _evaluating(body), torch.no_grad():
        texts = Texts(rows, processor)
        if blocks:
            check_fresh(body)
        pictures = Pictures(body, processor, rows, batch_size)
        first = ToldWords(solved_layer(body).bias is not None, texts)
        for features, words in pictures:
            first.add(features, words)
        sums = first.keep()
        states = _states(body, processor, texts)
        for _ in range(PASSES):
            regression = _Pass(texts, sums)
            for features, words in pictures:
                regression.add(features, words)
            sums = regression.sums
        solved, explained = regression.to_states(states)
        if not bool(torch.isfinite(solved).all()):
            raise CannotAlign("Expected `rows` with pictures that differ as their words do, got no such difference.")
        if blocks:  # first, because it reads texts, which may fail
            shares = torch.tensor([texts.shares[word] for word in texts.words])
            start_blocks(body, processor, rows, texts.words, states, shares)
        _write(body, regression.sums, solved, noise, seed)
    return ConnectorAlignment(texts.pictures, len(texts.words), explained)


class _Pass:
    """A regression from the inputs of the connector's last layer to words, in a pass through all images.

    Each word of an image is given to the image tokens that are most like it.

    Args:
        texts (`Texts`): their words are the outputs.
        before (`RidgeSums`): of the pass before.
    """

    def __init__(self, texts: Texts, before: RidgeSums):
        self.sums: RidgeSums = RidgeSums(before.bias, before)
        self.squares = 0.0  # of what tokens are given
        self._given = torch.zeros(len(texts.words), dtype=torch.float64)  # of each word, to all tokens
        self._squares: Any = 0.0  # (inputs, inputs), of tokens as often as they are given words
        self._places = {word: place for place, word in enumerate(texts.words)}
        self._found = before.solve().float()

    def add(self, features: torch.Tensor, words: set[str]) -> None:
        """Adds the image tokens `(tokens, inputs)` of an image, and the words of its text."""
        own = torch.tensor([self._places[word] for word in words if word in self._places], dtype=torch.long)
        inputs = with_one(features) if self.sums.bias else features
        like = inputs @ self._found[:, own.to(features.device)]
        given = (like / like.amax(0).clamp(min=1e-9)).clamp(0, 1) ** SHARPER
        self.sums.add_some(features, given, own, len(self._places))
        self._squares = self._squares + ((inputs * given.sum(1, keepdim=True)).T @ inputs).double()
        self.squares += float(given.square().sum())
        self._given[own] += given.sum(0).double().cpu()

    def to_states(self, states: torch.Tensor) -> tuple[torch.Tensor, float]:
        """The weights `(inputs, hidden_size)` of tokens whose mean is zero, and the share of the words explained.

        Tokens that are given words have a mean square of 1, each counted as often as it is given some.
        """
        solved = self.sums.solve()
        squares = (solved * (self.sums.squares @ solved)).sum()
        found = (solved * self.sums.products).sum(0)  # of each word, in the tokens that it is given to
        explained = float((2 * found.sum() - squares) / max(self.squares, 1e-9))
        given = self._given.to(solved.device)
        larger = (given / found.clamp(min=1e-9)).clamp(max=MOST_LARGER)
        weights = (solved * larger) @ states.double().to(solved.device)
        if self.sums.bias:  # the last input is the constant one
            weights[-1] -= self.sums.squares[-1] @ weights / self.sums.count
        size = (weights * (self._squares @ weights)).sum() / (given.sum() * weights.shape[1])
        return weights / size.sqrt(), explained


def _check(body: Any, processor: Any, rows: Any) -> None:
    check_processor(processor)
    if isinstance(rows, (str, bytes, Path, dict)) or not (hasattr(rows, "__getitem__") and hasattr(rows, "__len__")):
        raise TypeError(f"Expected `rows` to be a sequence of rows, such as `load_rows` gives, got {type_name(rows)}.")
    tower_of(body)
    config = body.config
    if config.connector_type not in SOLVED:
        raise ValueError(
            f"Expected `model` with a connector of a type of {SOLVED}, whose last layer is solved, got "
            f"{config.connector_type!r}."
        )
    block = config.cross_attention_config
    if block.context_size != block.hidden_size:
        raise ValueError(
            "Expected `model` with image tokens as wide as the text's hidden states, where words and patches can be "
            f"near each other: `context_size` {block.hidden_size}, got {block.context_size}."
        )
    if min(config.cross_attention_layers) >= text_num_hidden_layers(config.text_config):
        raise ValueError("Expected `model` with a block in front of a layer, got blocks after the last layer alone.")
    check_trainable("the connector", body.connector, "Load the base with `quantization_config`: the connector stays.")


def _states(body: Any, processor: XAttnProcessor, texts: Texts) -> torch.Tensor:
    """The state of each word `(words, hidden_size)`, as the first block's norm gives it to its queries."""
    first = min(body.config.cross_attention_layers)
    found = word_states(body.text_model, processor.tokenizer, first, texts.words, texts.prompts, WORDS_AT_ONCE)
    states = told_apart(found) * body.blocks[0].attn_norm.weight.float().cpu()
    if not bool(torch.isfinite(states).all()):
        raise CannotAlign("Expected `model` to give words different, finite hidden states, got NaN or equal ones.")
    return states


def _write(body: Any, sums: RidgeSums, solved: torch.Tensor, noise: float, seed: int) -> None:
    """Writes the regression, as large as the words' states are, and noise."""
    last = solved_layer(body)
    size = body.blocks[0].attn_norm.weight.float().square().mean().sqrt().to(solved.device)
    inputs = last.in_features
    length = (sums.squares.diagonal()[:inputs].sum() / sums.count).sqrt()
    random = torch.randn(last.weight.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    last.weight.copy_((solved[:inputs] * size).T + random.to(solved.device) * noise * size / length)
    if last.bias is not None:
        last.bias.copy_(solved[inputs] * size)


@contextmanager
def _evaluating(body: nn.Module) -> Iterator[None]:
    training = {module: module.training for module in body.modules()}
    try:
        for module in training:
            module.training = False
        yield
    finally:
        for module, was in training.items():
            module.training = was


__all__ = ["ConnectorAlignment", "align_connector"]
