"""Turns rows of chat messages with images into batches with labels, for training.

Most collators pad rows that are tokenized already. This one renders the rows with the chat template, because only the
rendered text tells which tokens are answers and which belong to the prompt.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from transformers.utils import logging

from ..data.rows import Conversation, is_trained, keys_of_template, read_row, text_of
from ..decoders.loss import IGNORED
from ..images.image_inputs import NO_IMAGE
from ..processing_xattn import XAttnProcessor
from ..utils.tensor_checks import type_name
from .answer_spans import AnswerSpan, check_processor, find_answers, special_tokens, squeezed
from .vision_features import VisionFeatures


logger = logging.get_logger(__name__)

ACROSS = (
    "The token {!r} begins in the generation prompt and ends in the answer, so the model is trained on other tokens "
    "than it is asked with. Change the chat template: its prompt should end where a token ends, often without a space."
)

TRAIN_ON = ("answers", "all")
SIDES = ("left", "right")


class _Tokens(NamedTuple):
    ids: torch.Tensor  # (text_len,), as the labels
    labels: torch.Tensor


class XAttnDataCollator:
    """Turns rows of chat messages into a batch with labels, for `Trainer`, TRL's `SFTTrainer` or a `DataLoader`.

    `Trainer` needs `remove_unused_columns=False`.

    A row is a dict with `messages`, or with `prompt` and `completion` as in TRL. Both are lists of chat messages. The
    images are in the parts of the messages (`{"type": "image", "image": ...}`, or `path`, `url`, `base64`), or in a
    column `images`:

    - Image parts without an image take the images of the column, in order.
    - If no message has an image part, `<image>` in a text of a user marks the place of an image of the column.
    - Without image parts and without `<image>`, the images come in front of the first user message.

    A column `system` becomes the system message.

    A key of a message or of a part must be read by this class or by the chat template; any other key is an error.
    Columns are errors in three cases: they hold images under another name, their name is close to one that is read, or
    other trainers use them to control what is learned or shown. All other columns are ignored. The table is in
    `examples/data/README.md`.

    The answers are found in the text that the chat template renders. An answer is all text behind the generation
    prompt, including reasoning or its tags if the template writes them, and the token that ends the turn, so that the
    model learns to stop. The labels of an answer are decoded and compared with this text. All other tokens have the
    label -100: prompts, headers, image markers, padding.

    Args:
        processor ([`XAttnProcessor`]): its chat template renders the rows. If its tokenizer has no padding token,
            `eos_token` becomes the padding token.
        train_on (`str`, defaults to `"answers"`): `"answers"` trains on all assistant messages, or on those of the
            completion in a row with `prompt` and `completion`. Messages with a `weight` of 0 are left out; other names
            of `weight` are `train`, `training`, `loss`, `loss_scale` and `loss_weight`. `"all"` trains on the whole
            text.
        max_length (`int`, *optional*): longer rows are cut at the tokenizer's `truncation_side`. If a row loses all
            its answers or an image marker, this is an error. The `max_length` of TRL's `SFTConfig` does not reach a
            collator.
        padding_side (`str`, *optional*): `"left"` or `"right"`. The default is `"right"`, even if the tokenizer pads on
            the left for `generate`, because a decoder with absolute positions (GPT-2, BERT) counts padding on the left
            as text.
        pad_to_multiple_of (`int`, *optional*): lengths are rounded up to a multiple of this number.
        share_images (`bool`): rows with the same images in the same order share one copy of these images in the batch,
            and `image_rows` of the batch tells which row uses which copy. The vision tower and the K/V projections then
            run once for all questions about an image. The gradients are the same. Rows about one image must be next to
            one another in the data, with `train_sampling_strategy="sequential"` in `TrainingArguments`.
        padding_free (`bool`): all rows of the batch become one packed row without padding. Its `position_ids` start at
            0 again for each row (see `parts/packed_rows.py`), and each row sees only its own text and images. The model
            raises an error if its decoder cannot do this.
        features ([`VisionFeatures`], *optional*): stored outputs of the vision tower for the images, which must then be
            files. Batches hold `vision_features` instead of `pixel_values`, and no image is decoded.

    Raises:
        TypeError: if `processor` is not an `XAttnProcessor`.
        ValueError: for unknown options, for options that exclude one another, for a tokenizer that gives no offsets or
            has neither a padding nor an EOS token, and for features that were made with another image processor.

    Example:

    ```python
    >>> import hf_xattn
    >>> from transformers import AutoProcessor

    >>> collator = hf_xattn.XAttnDataCollator(AutoProcessor.from_pretrained("seeing"))
    >>> rows = hf_xattn.load_rows("pictures")
    >>> batch = collator([rows[0], rows[1]])
    >>> sorted(batch)
    ['attention_mask', 'input_ids', 'labels', 'pixel_values']
    ```
    """

    def __init__(
        self,
        processor: XAttnProcessor,
        train_on: str = "answers",
        max_length: int | None = None,
        padding_side: str | None = None,
        pad_to_multiple_of: int | None = None,
        share_images: bool = False,
        padding_free: bool = False,
        features: VisionFeatures | None = None,
    ):
        check_processor(processor)
        if train_on not in TRAIN_ON:
            raise ValueError(f"`train_on` must be one of {TRAIN_ON}, got {train_on!r}.")
        for name, size in (("max_length", max_length), ("pad_to_multiple_of", pad_to_multiple_of)):
            if size is not None and size < 1:
                raise ValueError(f"`{name}` must be at least 1, got {size}.")
        if padding_side is not None and padding_side not in SIDES:
            raise ValueError(f"`padding_side` must be one of {SIDES} or None, got {padding_side!r}.")
        if padding_free and (share_images or padding_side is not None):
            name = "share_images" if share_images else "padding_side"
            raise ValueError(f"Expected `padding_free` without `{name}`, got both: there is one row, and no padding.")
        if padding_free and processor.image_token_id is None:
            why = "the markers tell which images belong to which text"
            raise ValueError(f"Expected `processor` to have an `image_token` for `padding_free`, got none: {why}.")
        tokenizer = processor.tokenizer
        if tokenizer.pad_token is None:
            if tokenizer.eos_token is None:
                raise ValueError(
                    "Expected a tokenizer with `pad_token` or `eos_token`, got one with neither. Set "
                    "`processor.tokenizer.pad_token`."
                )
            tokenizer.pad_token = tokenizer.eos_token  # safe: this class knows the padding by its position
        self.processor = processor
        self.features = features
        self._reader = processor if features is None else features.reader(processor)
        self.train_on = train_on
        self.max_length = max_length
        self.padding_side = padding_side
        self.pad_to_multiple_of = pad_to_multiple_of
        self.share_images = share_images
        self.padding_free = padding_free

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        """Makes a batch of rows. The rows are not changed.

        Returns:
            `dict`: `input_ids`, `attention_mask` and `labels`, each `(batch, text_len)`. If a row has an image, also
            the image inputs of the processor, or `vision_features` if the collator has `features`. With `share_images`
            the image inputs have a batch size of their own, and `image_rows` `(batch,)` names the image row of each
            row. With `padding_free` the batch size is 1, and there are `position_ids` `(1, text_len)` instead of
            `attention_mask`.

        Raises:
            TypeError, ValueError: for a row that cannot be trained on. The message names the row.
        """
        if not isinstance(rows, (list, tuple)):
            raise TypeError(f"Expected `rows` to be a list of rows, got {type_name(rows)}.")
        if not rows:
            raise ValueError("`rows` is an empty list: give one row or more.")
        keys = keys_of_template(self.processor.chat_template)
        conversations = [_named(index, row, read_row, row, keys) for index, row in enumerate(rows)]
        try:
            batch = self._processed(conversations)
        except Exception:
            for index, conversation in enumerate(conversations):  # find the row that fails
                _named(index, conversation, self._processed, [conversation])
            raise
        offsets, ids, mask = batch.pop("offset_mapping"), batch.pop("input_ids"), batch.pop("attention_mask").bool()
        tokens = []
        for index, conversation in enumerate(conversations):
            real = mask[index]
            made = _named(index, conversation, self._labelled, conversation, ids[index][real], offsets[index][real])
            tokens.append(made)
        if self.padding_free:
            images = batch.pop("image_mask", None)  # the real images of all rows are put into one row
            kept = {name: each.flatten(0, 1) if images is None else each[images] for name, each in batch.items()}
            return {**self._flattened(tokens), **{name: each[None] for name, each in kept.items()}}
        return {**self._padded(tokens), **(_share_images(batch) if self.share_images else batch)}

    def _processed(self, conversations: Sequence[Conversation]) -> dict[str, torch.Tensor]:
        made: Any = self._reader.apply_chat_template(
            [conversation.messages for conversation in conversations],
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
            processor_kwargs={"padding": True, "return_offsets_mapping": True},
        )
        return dict(made)

    def _labelled(self, conversation: Conversation, ids: torch.Tensor, offsets: torch.Tensor) -> _Tokens:
        processor = self.processor
        if self.train_on == "answers":
            messages, answers, special = conversation.messages, conversation.answers, special_tokens(processor)
            text, spans = find_answers(self._render, messages, answers, special, processor.image_token)
            labels = self._labels_of(text, spans, ids, offsets)
        elif all(map(is_trained, conversation.messages)):
            labels = ids.clone()
        else:
            raise ValueError("Expected messages without a `weight` of 0 for `train_on='all'`, got one.")
        if processor.image_token_id is not None:
            labels = labels.masked_fill(ids == processor.image_token_id, IGNORED)
        if self.max_length is not None and len(ids) > self.max_length:
            ids, labels = self._cut(ids, labels, self.max_length)
        if not (labels != IGNORED).any():
            raise ValueError("There is nothing to train on: the text is empty.")
        return _Tokens(ids, labels)

    def _render(self, messages: list[dict[str, Any]], **kwargs: Any) -> str:
        return self.processor.apply_chat_template(messages, tokenize=False, **kwargs)

    def _labels_of(self, text: str, spans: list[AnswerSpan], ids: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """The tokens in the spans, and -100 for all others `(text_len,)`. Checks that they decode to the text."""
        labels = torch.full_like(ids, IGNORED)
        starts, ends = offsets.unbind(-1)
        for span in spans:
            inside = (starts < span.end) & (ends > span.start) & (ends > starts)
            if inside.any():  # the spaces between words too: some tokenizers give them empty offsets
                places = inside.nonzero().flatten()
                inside[int(places[0]) : int(places[-1]) + 1] = True
                if span.prompted and int(starts[places[0]]) < span.start:
                    logger.warning_once(ACROSS.format(text[int(starts[places[0]]) : int(ends[places[0]])]))
            labels = torch.where(inside, ids, labels)
            said, expected = ids[inside], text[span.start : span.end]
            if len(said):  # tokens may reach beyond the answer
                expected = text[int(starts[inside].min()) : int(ends[inside].max())]
            if not len(said) or not self._decodes_to(said, expected):
                raise ValueError(
                    f"The labels of message {span.message} do not decode to its answer: expected {expected!r}, got "
                    f"{self._decode(said)!r}. The tokenizer gives wrong offsets: use another."
                )
        return labels

    def _decodes_to(self, ids: torch.Tensor, expected: str) -> bool:
        """Whether ids decode to a text. White space, case and unknown words, which tokenizers change, do not count."""
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
                f"`max_length={length}` cuts an image marker off {len(ids)} tokens: set a larger `max_length`."
            )
        all_labels, labels = (labels != IGNORED).sum(), labels[kept]
        left = (labels != IGNORED).sum()
        if not left:
            raise ValueError(
                f"`max_length={length}` cuts all answers off {len(ids)} tokens: set a larger `max_length`."
            )
        if left < all_labels:
            logger.warning_once(f"`max_length={length}` cuts answers: the model is trained on what remains of them.")
        return ids[kept], labels

    def _flattened(self, rows: list[_Tokens]) -> dict[str, torch.Tensor]:
        """All rows in one. The first token of each row is no label, because no token of its text stands before it."""
        parts = [(row.ids, row.labels.clone()) for row in rows]
        missing = -sum(len(row.ids) for row in rows) % (self.pad_to_multiple_of or 1)
        if missing:
            pad = torch.full((missing,), self.processor.tokenizer.pad_token_id)
            parts.append((pad, torch.full_like(pad, IGNORED)))
        for _, labels in parts:
            labels[0] = IGNORED
        ids, labels = (torch.cat(each)[None] for each in zip(*parts))
        positions = torch.cat([torch.arange(len(part)) for part, _ in parts])[None]
        return {"input_ids": ids, "position_ids": positions, "labels": labels}

    def _padded(self, rows: list[_Tokens]) -> dict[str, torch.Tensor]:
        tokenizer = self.processor.tokenizer
        multiple = self.pad_to_multiple_of or 1
        length = -(-max(len(row.ids) for row in rows) // multiple) * multiple
        ids = torch.full((len(rows), length), tokenizer.pad_token_id)
        mask, labels = torch.zeros_like(ids), torch.full_like(ids, IGNORED)
        for index, row in enumerate(rows):
            left = self.padding_side == "left"
            place = slice(length - len(row.ids), None) if left else slice(len(row.ids))
            ids[index, place], mask[index, place], labels[index, place] = row.ids, 1, row.labels
            if left:  # only padding stands in front of the first token, so nothing can predict it
                labels[index, place.start] = IGNORED
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def _named(index: int, row: Any, function: Callable[..., Any], *args: Any) -> Any:
    """Calls a function, and adds the row's index in the batch and its first words to the message of an error."""
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


def _share_images(images: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Keeps one row of image inputs `(batch, num_images, ...)` for all rows with the same images in the same order.

    Rows without an image keep no row of image inputs. Adds `image_rows` `(batch,)` if fewer rows of image inputs are
    left than there are rows.
    """
    if not images:
        return {}
    mask = images.get("image_mask")
    rows_of: dict[bytes, int] = {}
    kept: list[int] = []
    index: list[int] = []
    for row in range(len(next(iter(images.values())))):
        if mask is not None and not mask[row].any():
            index.append(NO_IMAGE)
            continue
        content = hashlib.blake2b()
        for tensor in images.values():
            content.update(tensor[row].contiguous().view(torch.uint8).numpy())
        if content.digest() not in rows_of:
            rows_of[content.digest()] = len(kept)
            kept.append(row)
        index.append(rows_of[content.digest()])
    if len(kept) == len(index):
        return dict(images)
    shared = {name: tensor[kept] for name, tensor in images.items()}
    if mask is not None and shared["image_mask"].all():
        del shared["image_mask"]
    return {**shared, "image_rows": torch.tensor(index)}


__all__ = ["XAttnDataCollator"]
