"""Trains blocks in front of upper decoder layers without running the layers below them twice.

Layers below the first block are frozen and see no image, so the hidden states in front of it are computed once for each
text. All texts begin alike (system prompt, header of the user's turn), in front of the image marker: the keys and
values of this beginning are computed once for all texts. A training step runs only the layers from the first block on,
and gives the results of the whole model.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import DynamicCache, EncoderDecoderCache

from ..modeling_xattn import XAttnForConditionalGeneration
from ..utils.transformers_api import CACHE


TEXTS_AT_ONCE = 12  # of like length, so that few tokens are padding


class Example(NamedTuple):
    """A text to train on."""

    ids: tuple[int, ...]  # after the common beginning
    labels: tuple[int, ...]  # -100 for tokens that are not trained on


class Beginning:
    """The keys and values of the tokens that all texts begin with, computed once by a causal decoder without a head.

    `ids` may be empty. `dtype` is that of autocast, and of what is remembered.
    """

    def __init__(self, body: Any, ids: list[int], dtype: torch.dtype):
        self.length = len(ids)
        cache = DynamicCache()
        if ids:
            with torch.no_grad(), autocast(body.device, dtype):
                body(input_ids=torch.tensor([ids], device=body.device), use_cache=True, **{CACHE: cache})
        layers: list[Any] = list(cache.layers)
        self._states = [(layer.keys.to(dtype), layer.values.to(dtype)) for layer in layers]

    def cache(self, rows: int) -> DynamicCache:
        """Returns a new cache that holds the beginning in each row."""
        states = [(key.expand(rows, -1, -1, -1), value.expand(rows, -1, -1, -1)) for key, value in self._states]
        return DynamicCache(ddp_cache_data=states)


def autocast(device: torch.device, dtype: torch.dtype) -> torch.autocast:
    """Autocast to `dtype`; none for float32."""
    return torch.autocast(device.type, dtype, enabled=dtype != torch.float32)


class UpperLayers:
    """Runs the upper part of a model on texts whose lower part it remembers.

    Args:
        model ([`XAttnForConditionalGeneration`]): its decoder has `layers` and `norm`, as Llama's.
        beginning (`list[int]`): the tokens that all texts begin with. No image marker is among them.
        dtype (`torch.dtype`): dtype for autocast, and of what is remembered.
    """

    def __init__(self, model: XAttnForConditionalGeneration, beginning: list[int], dtype: torch.dtype):
        self.model, self.dtype = model, dtype
        self.first = min(model.config.cross_attention_layers)
        self.body: Any = model.model.text_model.get_decoder()
        self.head: Any = model.get_output_embeddings()
        self._states: dict[tuple[int, ...], torch.Tensor] = {}
        self._beginning = Beginning(self.body, beginning, dtype)
        self._image_tokens: int | None = None

    def logits(
        self, examples: list[Example], pixel_values: torch.Tensor, image_mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Computes the logits at the trained tokens.

        Args:
            examples (`list[Example]`): one for each row.
            pixel_values (`torch.Tensor`): `(rows, 1, channels, height, width)`.
            image_mask (`torch.BoolTensor`, *optional*): `(rows, 1)`, False for a row without an image.

        Returns:
            logits `(count, vocab_size)` float32, the labels `(count,)` and the row of each `(count,)`.
        """
        self._remember([example.ids for example in examples])
        rows, length = len(examples), max(len(example.ids) for example in examples)
        begun = self._beginning.length
        device = self.model.device
        states = torch.zeros(rows, length, self.body.config.hidden_size, device=device)
        labels = torch.full((rows, length), -100)
        mask = torch.zeros(rows, begun + length, dtype=torch.long, device=device)
        mask[:, :begun] = 1
        for row, (ids, targets) in enumerate(examples):
            states[row, : len(ids)] = self._states[ids]
            labels[row, : len(ids) - 1] = torch.tensor(targets[1:])  # each position predicts the next token
            mask[row, begun : begun + len(ids)] = 1
        num_tokens = self._num_image_tokens(pixel_values)
        seen = torch.ones(rows, length, num_tokens, dtype=torch.bool, device=device)
        if image_mask is not None:
            seen &= image_mask.to(device)[:, :, None]
        with autocast(self.model.device, self.dtype), self._only(slice(self.first, None)):
            hidden = self.model.model(
                inputs_embeds=states,
                attention_mask=mask,
                pixel_values=pixel_values.to(device),
                cross_attention_mask=seen,
                cache=EncoderDecoderCache(self._beginning.cache(rows), DynamicCache()),
                use_cache=True,
            ).last_hidden_state
            where = labels.to(device) != -100
            logits = self.head(hidden[where])
        return logits.float(), labels[labels != -100].to(device), where.nonzero()[:, 0]

    def difference(self, example: Example, beginning: list[int], pixel_values: torch.Tensor) -> float:
        """Returns the largest difference from the whole model's logits, as a share of the largest logit."""
        mine, _, _ = self.logits([example], pixel_values)
        with torch.no_grad(), autocast(self.model.device, self.dtype):
            ids = torch.tensor([[*beginning, *example.ids]], device=self.model.device)
            whole = self.model(input_ids=ids, pixel_values=pixel_values.to(self.model.device)).logits[0].float()
        places = [len(beginning) + place - 1 for place, label in enumerate(example.labels) if label != -100]
        return ((mine - whole[places]).abs().max() / whole.abs().max()).item()

    def _remember(self, texts: list[tuple[int, ...]]) -> None:
        new = sorted({ids for ids in texts if ids not in self._states}, key=len)
        for start in range(0, len(new), TEXTS_AT_ONCE):
            part = new[start : start + TEXTS_AT_ONCE]
            ids = nn.utils.rnn.pad_sequence([torch.tensor(each) for each in part], batch_first=True)  # causal: no mask
            with torch.no_grad(), autocast(self.model.device, self.dtype), self._only(slice(self.first), norm=False):
                hidden = self.body(
                    input_ids=ids.to(self.model.device),
                    use_cache=True,
                    **{CACHE: self._beginning.cache(len(part))},
                ).last_hidden_state
            for each, states in zip(part, hidden):
                self._states[each] = states[: len(each)].to(self.dtype, copy=True)

    def _num_image_tokens(self, pixel_values: torch.Tensor) -> int:
        if self._image_tokens is None:
            with torch.no_grad():
                features: Any = self.model.get_image_features(pixel_values[:1].to(self.model.device))
            self._image_tokens = features.pooler_output.shape[-2]
        return self._image_tokens

    @contextlib.contextmanager
    def _only(self, kept: slice, norm: bool = True) -> Iterator[None]:
        """The decoder runs only some of its layers, and with or without its last norm."""
        layers, last = self.body.layers, self.body.norm
        self.body.layers = layers[kept]
        if not norm:
            self.body.norm = nn.Identity()
        try:
            yield
        finally:
            self.body.layers, self.body.norm = layers, last
