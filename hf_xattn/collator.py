"""Batches of people's own data: chat messages with images, to tensors with labels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from transformers.utils import logging

from .answer_spans import AnswerSpan, find_answers, squeezed
from .loss import IGNORED
from .processing_xattn import XAttnProcessor
from .tensor_checks import type_name
from .training_rows import Conversation, read_row, text_of


logger = logging.get_logger(__name__)

TRAIN_ON = ("answers", "all")
SIDES = ("left", "right")


class _Tokens(NamedTuple):
    """One row: `(text_len,)` each."""

    ids: torch.Tensor
    labels: torch.Tensor


class XAttnDataCollator:
    r"""Rows of chat messages to a batch with labels. For `Trainer` (with `remove_unused_columns=False`), for TRL's `SFTTrainer` and
    for a `DataLoader`.

    A row is a dict: `messages`, or TRL's `prompt` and `completion`, both lists of chat messages. Images stand in the parts of a
    message (`{"type": "image", "image": ...}`, or `path`, `url`, `base64`), or in a column `images` beside the messages: bare image
    parts take these in order; where no message has an image part, they come in front of the first user message. Other columns are
    ignored.

    With `train_on="answers"` the labels are what the assistant says, in every one of its turns (of a row with `prompt` and
    `completion`: in the completion), with the token that ends the turn, so that the model learns to stop. Everything else is -100:
    prompts, headers, image markers, padding. Each answer is found in the text of the chat template, and its labels are decoded and
    compared with it. Reasoning is part of the answer where the template writes it.

    Args:
        processor ([`XAttnProcessor`]): needs a chat template. A tokenizer without padding token gets its `eos_token` as one.
        train_on (`str`, defaults to `"answers"`): or `"all"`: the labels are the whole text, without image markers and padding.
        max_length (`int`, *optional*): longer rows are cut, at the tokenizer's `truncation_side`. A row that loses all its answers
            or an image marker raises an error.
        padding_side (`str`, *optional*): `"left"` or `"right"`. None: as the tokenizer.
        pad_to_multiple_of (`int`, *optional*): lengths are rounded up to a multiple of this number.

    Raises:
        TypeError: for a processor that is none.
        ValueError: for unknown options, or a tokenizer without offsets or without padding and end token.
    """

    def __init__(
        self,
        processor: XAttnProcessor,
        train_on: str = "answers",
        max_length: int | None = None,
        padding_side: str | None = None,
        pad_to_multiple_of: int | None = None,
    ):
        if not isinstance(processor, XAttnProcessor):
            raise TypeError(f"Expected `processor` to be an XAttnProcessor, got {type_name(processor)}.")
        if train_on not in TRAIN_ON:
            raise ValueError(f"`train_on` must be one of {TRAIN_ON}, got {train_on!r}.")
        for name, size in (("max_length", max_length), ("pad_to_multiple_of", pad_to_multiple_of)):
            if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
                raise ValueError(f"`{name}` must be an integer of at least 1, got {size!r}.")
        if padding_side is not None and padding_side not in SIDES:
            raise ValueError(f"`padding_side` must be one of {SIDES} or None, got {padding_side!r}.")
        tokenizer = processor.tokenizer
        if not tokenizer.is_fast:
            raise ValueError(
                f"`processor` has a slow tokenizer ({type_name(tokenizer)}), which does not tell where its tokens stand in the text: "
                "load the fast one with `AutoTokenizer`."
            )
        if tokenizer.pad_token is None:
            if tokenizer.eos_token is None:
                raise ValueError(
                    "`processor` has a tokenizer without `pad_token` and `eos_token`: set `processor.tokenizer.pad_token`."
                )
            tokenizer.pad_token = tokenizer.eos_token  # padding is told apart by its place, not by its id
        self.processor = processor
        self.train_on = train_on
        self.max_length = max_length
        self.padding_side = padding_side
        self.pad_to_multiple_of = pad_to_multiple_of

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        """
        Args:
            rows (`Sequence[Mapping]`): the rows of a batch; not changed.

        Returns:
            `dict`: `input_ids`, `attention_mask` and `labels` `(batch, text_len)`, and, where a row has an image, what the processor
            makes of it: `pixel_values`, `image_mask`, `aspect_ratio_ids`, `aspect_ratio_mask`.

        Raises:
            TypeError, ValueError: for a row that cannot be trained on. The message names the row.
        """
        if not isinstance(rows, (list, tuple)):
            raise TypeError(f"Expected `rows` to be a list of rows, got {type_name(rows)}.")
        if not rows:
            raise ValueError("`rows` is an empty list: give one row or more.")
        conversations = [_named(index, row, read_row, row) for index, row in enumerate(rows)]
        try:
            batch = self._processed(conversations)
        except Exception:
            for index, conversation in enumerate(conversations):  # which row was it?
                _named(index, conversation, self._processed, [conversation])
            raise
        offsets, ids, mask = batch.pop("offset_mapping"), batch.pop("input_ids"), batch.pop("attention_mask").bool()
        tokens = [
            _named(
                index, conversation, self._labelled, conversation, ids[index][mask[index]], offsets[index][mask[index]]
            )
            for index, conversation in enumerate(conversations)
        ]
        return {**self._padded(tokens), **batch}

    def _processed(self, conversations: Sequence[Conversation]) -> dict[str, torch.Tensor]:
        made: Any = self.processor.apply_chat_template(
            [conversation.messages for conversation in conversations],
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
            processor_kwargs={"padding": True, "return_offsets_mapping": True},
        )
        return dict(made)

    def _labelled(self, conversation: Conversation, ids: torch.Tensor, offsets: torch.Tensor) -> _Tokens:
        """A row's ids and labels, cut to `max_length`."""
        processor = self.processor
        if self.train_on == "answers":
            text, spans = find_answers(
                self._render,
                conversation.messages,
                conversation.answers,
                self._special_tokens(),
                processor.image_token,
            )
            labels = self._labels_of(text, spans, ids, offsets)
        else:
            labels = ids.clone()
        if processor.image_token_id is not None:
            labels = labels.masked_fill(ids == processor.image_token_id, IGNORED)
        if self.max_length is not None and len(ids) > self.max_length:
            ids, labels = self._cut(ids, labels, self.max_length)
        if not (labels != IGNORED).any():
            raise ValueError("There is nothing to train on: the text is empty.")
        return _Tokens(ids, labels)

    def _render(self, messages: list[dict[str, Any]], **kwargs: Any) -> str:
        return self.processor.apply_chat_template(messages, tokenize=False, **kwargs)

    def _special_tokens(self) -> list[str]:
        tokenizer = self.processor.tokenizer
        tokens = {str(token) for token in tokenizer.added_tokens_decoder.values()} | set(tokenizer.all_special_tokens)
        return sorted(tokens - {self.processor.image_token})

    def _labels_of(self, text: str, spans: list[AnswerSpan], ids: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """Labels of the tokens that stand in a span, decoded and compared with the text."""
        labels = torch.full_like(ids, IGNORED)
        starts, ends = offsets.unbind(-1)
        for span in spans:
            inside = (starts < span.end) & (ends > span.start) & (ends > starts)
            labels = torch.where(inside, ids, labels)
            said = ids[inside]
            expected = (
                text[int(starts[inside].min()) : int(ends[inside].max())] if len(said) else text[span.start : span.end]
            )
            if not len(said) or not self._decodes_to(said, expected):
                raise ValueError(
                    f"The labels of message {span.message} do not decode to its answer: expected {expected!r}, got "
                    f"{self._decode(said)!r}. The tokenizer does not tell where its tokens stand in the text."
                )
        return labels

    def _decodes_to(self, ids: torch.Tensor, expected: str) -> bool:
        """Whether ids stand for a text, as far as the tokenizer keeps it: white space, case, unknown words."""
        decoded = squeezed(self._decode(ids))
        if decoded == squeezed(expected):
            return True
        kept = self.processor.tokenizer(expected, add_special_tokens=False)["input_ids"]
        return decoded == squeezed(self._decode(kept))

    def _decode(self, ids: Any) -> str:
        return self.processor.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def _cut(self, ids: torch.Tensor, labels: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        kept = slice(-length, None) if self.processor.tokenizer.truncation_side == "left" else slice(length)
        marker = self.processor.image_token_id
        if marker is not None and (ids == marker).sum() != (ids[kept] == marker).sum():
            raise ValueError(
                f"`max_length={length}` cuts an image marker off a text of {len(ids)} tokens: set a larger one."
            )
        all_labels, labels = (labels != IGNORED).sum(), labels[kept]
        left = (labels != IGNORED).sum()
        if not left:
            raise ValueError(
                f"`max_length={length}` cuts all answers off a text of {len(ids)} tokens: set a larger one."
            )
        if left < all_labels:
            logger.warning_once(
                f"`max_length={length}` cuts answers: what is left of them is trained on, without their end."
            )
        return ids[kept], labels

    def _padded(self, rows: list[_Tokens]) -> dict[str, torch.Tensor]:
        tokenizer = self.processor.tokenizer
        multiple = self.pad_to_multiple_of or 1
        length = -(-max(len(row.ids) for row in rows) // multiple) * multiple
        ids = torch.full((len(rows), length), tokenizer.pad_token_id)
        mask, labels = torch.zeros_like(ids), torch.full_like(ids, IGNORED)
        for index, row in enumerate(rows):
            left = (self.padding_side or tokenizer.padding_side) == "left"
            place = slice(length - len(row.ids), None) if left else slice(len(row.ids))
            ids[index, place], mask[index, place], labels[index, place] = row.ids, 1, row.labels
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def _named(index: int, row: Any, function: Callable[..., Any], *args: Any) -> Any:
    """Calls a function. Its error names the row: by its place in the batch, and by its first words."""
    try:
        return function(*args)
    except Exception as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"Row {index} of the batch{_first_words(row)}: {error}") from error


def _first_words(row: Any) -> str:
    messages = row.messages if isinstance(row, Conversation) else None
    if isinstance(row, Mapping):
        messages = row.get("messages") or row.get("prompt")
    try:
        text = " ".join(next(words for message in messages or [] if (words := text_of(message).split())))
    except (AttributeError, KeyError, StopIteration, TypeError):
        return ""
    return f" ({text if len(text) <= 40 else text[:40] + '...'!r})"


__all__ = ["XAttnDataCollator"]
