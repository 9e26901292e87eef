"""Starts a connector by a ridge regression from the features of patches to the hidden states of words.

Usually a connector starts with random weights. Then the word `seven` and the patch that shows a seven are no nearer to
each other than to anything else, and the blocks take many steps to bring them together. After this start, the image
tokens of the patch are near the hidden state of the word. `block_start.py` lets the blocks compare the two.

A caption does not say which patch a word belongs to. The words are therefore assigned to patches in three stages:

1. Each image token of an image gets all words of its text as targets (one number for each word), minus the mean over
   all images. A feature that occurs with one word more often than with others becomes a sign of this word. Words that
   every caption has drop out, and so do words that the images do not tell (`alignment_words.py`).
2. This regression already tells the patches of an image apart. So the next regression gives each word only to the
   patches that are most like it. This is repeated a few times: expectation and maximisation, as in Brown et al., "The
   Mathematics of Statistical Machine Translation", 1993 (model 1).
3. The words are replaced by their hidden states. A regression predicts too little of a rare word, even in its own
   patches. So each word is first scaled up to the size that it has in the patches that it was given to.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import nn

from ..images.connector import check_square
from ..modeling_xattn import XAttnForConditionalGeneration, XAttnModel
from ..processing_xattn import XAttnProcessor
from ..utils.architectures import text_num_hidden_layers
from ..utils.projection import to_dtype_of
from ..utils.tensor_checks import check_trainable
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


KEPT = 2**30  # most bytes of features that are kept from one pass to the next
SOLVED = ("linear", "mlp", "mlp_2d")  # connectors that end with a linear layer
PASSES = 3  # regressions of the second stage
SHARPER = 2.0  # exponent of the share of a word that a patch gets
MOST_LARGER = 10.0  # a word is scaled up by at most this factor, because its errors grow with it
WORDS_AT_ONCE = 64


class Pictures:
    """Yields, for each row, the inputs of the connector's last layer for all image tokens, and the words of the text.

    It is iterated several times. For the first images, as many as fit into `KEPT` bytes, the tower runs only once.
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
        images = [[picture] for pictures, _ in waiting for picture in pictures]
        try:
            batches = [self.processor(images=images)]
        except ValueError:  # images of several sizes
            batches = [self.processor(images=[each]) for each in images]
        features = [each for batch in batches for each in _features(self.body, dict(batch))]
        for pictures, words in waiting:
            own, features = features[: len(pictures)], features[len(pictures) :]
            half = torch.cat(own).to(torch.bfloat16)  # rounding is far below what tells words apart
            if half.nbytes <= self._room:
                self._room -= half.nbytes
                self._kept.append((half, words))
            else:
                self._room = 0  # keep no later ones: `__iter__` expects that the kept rows are the first ones
            yield half.float(), words


def _features(body: Any, inputs: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """Returns the inputs of the connector's last layer for each image: `(tokens, width)`, in float32.

    Args:
        inputs (`dict`): image inputs of the processor, each `(images, 1, ...)`.
    """
    connector = body.connector
    if "pixel_values" in inputs:
        check_square(body.config, inputs["pixel_values"])
    output, tiles = tower_output(body, inputs)
    if tiles is not None:  # without padding tiles, which no text sees
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


def solved_layer(body: XAttnModel) -> nn.Linear:
    """Returns the layer whose weights are solved: the last linear one. Only a position encoding may follow it."""
    assert body.connector is not None
    return [layer for layer in body.connector.layers if isinstance(layer, nn.Linear)][-1]


class ConnectorAlignment(NamedTuple):
    """What [`align_connector`] has used.

    Attributes:
        pictures (`int`): number of images.
        words (`int`): number of words that were aligned.
        explained (`float`): share of the targets, as a sum of squares, that the regression explains.
    """

    pictures: int
    words: int
    explained: float


def align_connector(
    model: XAttnModel | XAttnForConditionalGeneration,
    processor: XAttnProcessor,
    rows: Sequence[Any],
    *,
    noise: float = 0.25,
    blocks: bool = True,
    batch_size: int = 8,
    seed: int = 0,
) -> ConnectorAlignment:
    """Starts the connector and the blocks of a fresh model from the words of captions or answers, in place.

    The connector must be `"linear"`, `"mlp"` or `"mlp_2d"`. Its last linear layer becomes a ridge regression. The
    regression maps the features of an image token to the hidden states that the text model has, in front of the first
    block, at the words of the image's text. Each word is assigned to the image tokens that are most like it.

    The blocks start so that text attends to the image tokens of the words that it reads (see `block_start.py`). The
    output projections of the blocks, the vision tower and the text model do not change, so the model still gives the
    text model's answers.

    Rows without an image are skipped. Consecutive rows about the same images count as one.

    Args:
        model ([`XAttnForConditionalGeneration`] or [`XAttnModel`]): with a vision tower. Changed in place.
        processor ([`XAttnProcessor`]): the processor of the model.
        rows (`Sequence`): rows as for [`XAttnDataCollator`], for example from [`load_rows`]. They are read five times,
            and some of them once more for the blocks.
        noise (`float`, defaults to 0.25): root mean square of the random component that is added to the image tokens. A
            token with words has a root mean square of about 1. The alignment keeps only the content of an image that
            words describe; the random component lets other details, such as position, through.
        blocks (`bool`, defaults to `True`): start the blocks, too.
        batch_size (`int`, defaults to 8): images at a time.
        seed (`int`, defaults to 0): seed of the random component.

    Returns:
        [`ConnectorAlignment`]: the numbers of images and words, and the share of the targets that is explained.

    Raises:
        TypeError: for a model without blocks, or for another processor.
        ValueError: for a model that cannot be started so: without a vision tower, with a connector of another type,
            with image tokens of another width than the text, with quantized weights, with trained blocks, or with
            blocks that have a position encoding. Also for rows without images, or whose words do not differ between
            images. The model is not changed in these cases.

    Example:

    ```python
    >>> import hf_xattn
    >>> from transformers import AutoImageProcessor, AutoTokenizer

    >>> text, vision = "HuggingFaceTB/SmolLM2-135M-Instruct", "google/siglip-base-patch16-224"
    >>> model = hf_xattn.retrofit(text, vision, dtype="float32")
    >>> processor = hf_xattn.XAttnProcessor(
    ...     AutoImageProcessor.from_pretrained(vision), AutoTokenizer.from_pretrained(text)
    ... )
    >>> found = hf_xattn.align_connector(model, processor, hf_xattn.load_rows("pictures"))
    >>> found.pictures
    3
    ```
    """
    body: Any = body_of(model)
    try:
        _check(body, processor)
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
            raise CannotAlign("Expected `rows` with images that differ as their words do, got no such difference.")
        if blocks:  # before the connector is written, because reading the texts may fail
            shares = torch.tensor([texts.shares[word] for word in texts.words])
            start_blocks(body, processor, rows, texts.words, states, shares)
        _write(body, regression.sums, solved, noise, seed)
    return ConnectorAlignment(texts.pictures, len(texts.words), explained)


class _Pass:
    """A regression from the inputs of the connector's last layer to words, summed in a pass through all images.

    Each word of an image is given to the image tokens that are most like it. The regression of the pass before tells
    which these are.

    Args:
        texts (`Texts`): their words are the outputs.
        before (`RidgeSums`): the sums of the pass before.
    """

    def __init__(self, texts: Texts, before: RidgeSums):
        self.sums: RidgeSums = RidgeSums(before.bias, before)
        self.squares = 0.0  # sum of the squares of all targets
        self._given = torch.zeros(len(texts.words), dtype=torch.float64)  # sum over all tokens, of each word
        self._squares: Any = 0.0  # (inputs, inputs): each token counts by how much of words it gets
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
        """Returns weights `(inputs, hidden_size)` from features to states, and the explained share of the targets.

        The image tokens that these weights make have a mean of zero. Their mean square is 1, where each token counts by
        how much of words it gets.
        """
        solved = self.sums.solve()
        squares = (solved * (self.sums.squares @ solved)).sum()
        found = (solved * self.sums.products).sum(0)  # predicted size of each word in the tokens that it is given to
        explained = float((2 * found.sum() - squares) / max(self.squares, 1e-9))
        given = self._given.to(solved.device)
        larger = (given / found.clamp(min=1e-9)).clamp(max=MOST_LARGER)
        weights = (solved * larger) @ states.double().to(solved.device)
        if self.sums.bias:  # the last input is a constant 1
            weights[-1] -= self.sums.squares[-1] @ weights / self.sums.count
        size = (weights * (self._squares @ weights)).sum() / (given.sum() * weights.shape[1])
        return weights / size.sqrt(), explained


def _check(body: Any, processor: Any) -> None:
    check_processor(processor)
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
            "Expected `model` with image tokens of the same width as the text's hidden states, so that words and image "
            f"tokens can be compared: `context_size` {block.hidden_size}, got {block.context_size}."
        )
    if min(config.cross_attention_layers) >= text_num_hidden_layers(config.text_config):
        raise ValueError("Expected `model` with a block in front of a layer, got only blocks behind the last layer.")
    check_trainable("the connector", body.connector, "Load the base with `quantization_config`: the connector stays.")


def _states(body: Any, processor: XAttnProcessor, texts: Texts) -> torch.Tensor:
    """Returns the state of each word `(words, hidden_size)`, as the norm of the first block gives it to the queries."""
    first = min(body.config.cross_attention_layers)
    found = word_states(body.text_model, processor.tokenizer, first, texts.words, texts.prompts, WORDS_AT_ONCE)
    states = told_apart(found) * body.blocks[0].attn_norm.weight.float().cpu()
    if not bool(torch.isfinite(states).all()):
        raise CannotAlign("Expected `model` to give words different, finite hidden states, got NaN or equal ones.")
    return states


def _write(body: Any, sums: RidgeSums, solved: torch.Tensor, noise: float, seed: int) -> None:
    """Writes the regression, scaled to the size of the words' states, and the random component."""
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
