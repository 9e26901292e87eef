"""Adds tokens after the vocabulary of the text model.

Llama-3.2-Vision and Idefics have additional tokens, such as the image marker, that have no row in the embedding and the
head of the text model. The embedding and the head keep their weights and the names of these. Each of them gets a
submodule `additional` with the rows of the additional tokens. The ids of these tokens start at `vocab_size`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import (
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    LogitsProcessor,
    LogitsProcessorList,
    NoRepeatNGramLogitsProcessor,
    PreTrainedModel,
    RepetitionPenaltyLogitsProcessor,
)

from ..decoders.derived import derive
from ..utils import memoized


PREFIX = "Extended"
# Logits processors of `generate` that look up the logits of the prompt's tokens.
OF_PROMPT_TOKENS = (
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
)

Part = TypeVar("Part", bound=nn.Module)


class _AllRows(nn.Embedding):
    """Looks up rows of both tables, if the embedding class of a text model calls `super().forward`."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return _rows_of_both(self, super().forward, input)


def _rows_of_both(embedding: Any, lookup: Callable[[torch.Tensor], torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
    first = embedding.num_embeddings
    known = lookup(ids.clamp(max=first - 1))
    added = embedding.additional((ids - first).clamp(min=0))
    return torch.where((ids >= first)[..., None], added, known)


@memoized
def extended_embedding_class(embedding_class: type[nn.Embedding]) -> type[nn.Embedding]:
    """Derives the class of an embedding that also looks up the rows of `additional`, and returns these unchanged."""

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return _rows_of_both(self, partial(embedding_class.forward, self), input_ids)

    return derive(embedding_class, PREFIX, {"forward": forward}, (extended_embedding_class, embedding_class))


@memoized
def scaled_embedding_class(embedding_class: type[nn.Embedding]) -> type[nn.Embedding]:
    """Like [`extended_embedding_class`], for a class that scales or normalizes its rows, and so the added rows, too."""

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return embedding_class.forward(self, input_ids)

    recipe = (scaled_embedding_class, embedding_class)
    return derive(embedding_class, PREFIX, {"forward": forward}, recipe, (_AllRows,))


@memoized
def extended_head_class(head_class: type[nn.Linear]) -> type[nn.Linear]:
    """Derives the class of a head that appends the logits of `additional`."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return torch.cat([head_class.forward(self, hidden_states), self.additional(hidden_states)], dim=-1)

    return derive(head_class, PREFIX, {"forward": forward}, (extended_head_class, head_class))


def vocabulary_options(language_model: PreTrainedModel) -> dict[str, Any]:
    """Returns the fields of the configuration with which [`extend_vocabulary`] was called, if they have an effect."""
    embedding, head = language_model.get_input_embeddings(), language_model.get_output_embeddings()
    additional = getattr(embedding, "additional", None)
    if additional is None:
        return {"additional_vocab_size": 0}
    in_head = getattr(head, "additional", None) is not None
    found = {"additional_vocab_size": additional.num_embeddings, "additional_vocab_in_head": in_head}
    is_plain = extended_embedding_class(nn.Embedding) in type(embedding).__mro__
    return found if is_plain else {**found, "additional_vocab_scaled": isinstance(embedding, _AllRows)}


def extend_vocabulary(language_model: PreTrainedModel, size: int, in_head: bool, scaled: bool) -> None:
    """Adds `size` tokens after the vocabulary of a text model, in place.

    Args:
        language_model (`PreTrainedModel`): The text model.
        size (`int`): Number of added tokens.
        in_head (`bool`): Whether the model can also generate the added tokens. If the text model ties its head to its
            embedding, the added rows are tied, too.
        scaled (`bool`): Whether a text model that scales or normalizes its embeddings, as Gemma and Inkling do, does
            so with the added rows, too.

    Raises:
        ValueError: if the embedding is not an `nn.Embedding`, or the head not an `nn.Linear`.
    """
    embedding = _usual(language_model.get_input_embeddings(), nn.Embedding, language_model)
    head = _usual(language_model.get_output_embeddings(), nn.Linear, language_model)
    options: dict[str, Any] = {"device": embedding.weight.device, "dtype": embedding.weight.dtype}
    embedding.additional = nn.Embedding(size, embedding.embedding_dim, **options)
    is_plain = type(embedding).forward is nn.Embedding.forward
    extended = scaled_embedding_class if scaled and not is_plain else extended_embedding_class
    embedding.__class__ = extended(type(embedding))
    if in_head:
        head.additional = nn.Linear(head.in_features, size, bias=head.bias is not None, **options)
        head.__class__ = extended_head_class(type(head))
        if language_model.config.tie_word_embeddings:
            names = {id(module): name for name, module in language_model.named_modules()}
            tied = {f"{names[id(head.additional)]}.weight": f"{names[id(embedding.additional)]}.weight"}
            language_model._tied_weights_keys = {**(language_model._tied_weights_keys or {}), **tied}
            language_model.all_tied_weights_keys = {**language_model.all_tied_weights_keys, **tied}


class _WithAddedTokens(LogitsProcessor):
    """Calls a logits processor with logits of -inf for `size` added tokens, for which the head has no logits."""

    def __init__(self, processor: LogitsProcessor, size: int):
        self.processor, self.size = processor, size

    def __call__(self, input_ids: torch.LongTensor, scores: torch.Tensor) -> torch.Tensor:
        padded: Any = nn.functional.pad(scores, (0, self.size), value=-torch.inf)
        return self.processor(input_ids, padded)[:, : scores.shape[1]]


class XAttnVocabularyMixin:
    """The extra of [`XAttnForConditionalGeneration`] that allows added tokens in the prompt of `generate`."""

    def _get_logits_processor(self: Any, *args: Any, **kwargs: Any) -> LogitsProcessorList:
        """The method of transformers, whose processors may look up logits of added tokens in the prompt."""
        config, processors = self.config, super()._get_logits_processor(*args, **kwargs)  # type: ignore[misc]
        if config.additional_vocab_in_head or not config.additional_vocab_size:
            return processors
        return LogitsProcessorList(
            _WithAddedTokens(each, config.additional_vocab_size) if isinstance(each, OF_PROMPT_TOKENS) else each
            for each in processors
        )


def _usual(part: nn.Module | None, kind: type[Part], language_model: PreTrainedModel) -> Part:
    if not isinstance(part, kind):
        raise ValueError(
            f"`additional_vocab_size`: expected {type(language_model).__name__} to have an `nn.{kind.__name__}`, got "
            f"{type(part).__name__}."
        )
    return part
