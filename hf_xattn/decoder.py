"""How a text decoder is called: which arguments it takes, under which name its cache goes in, and how images reach its layers."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from .channel import carrying
from .context import CrossAttentionContext
from .insertion import KEYWORD, find_cache_argument, find_decoder, layers_receive_keywords


class DecoderInterface(NamedTuple):
    """What has to be known of a decoder to call it.

    Attributes:
        arguments (`frozenset[str]`): names of the arguments of its `forward`.
        cache_argument (`str`): name under which it takes its cache.
        receives_keywords (`bool`): whether its layers get the keyword arguments of its `forward`.
    """

    arguments: frozenset[str]
    cache_argument: str
    receives_keywords: bool

    @classmethod
    def of(cls, text_model: PreTrainedModel) -> DecoderInterface:
        return cls(
            frozenset(inspect.signature(text_model.forward).parameters),
            find_cache_argument(text_model),
            layers_receive_keywords(text_model),
        )

    def call(
        self,
        runner: Callable[..., Any],
        arguments: dict[str, Any],
        context: CrossAttentionContext | None,
        cache: Cache | None,
        use_cache: bool,
    ) -> Any:
        """Calls the decoder (`runner`: with or without its head) with the context as a keyword, or beside it where it
        would not hand keywords on."""
        arguments = {name: value for name, value in arguments.items() if self._passes(name, value)}
        beside: contextlib.AbstractContextManager = contextlib.nullcontext()
        if context is not None and self.receives_keywords:
            arguments[KEYWORD] = context
        elif context is not None:
            beside = carrying(context)
        with beside:
            return runner(**arguments, **{self.cache_argument: cache}, use_cache=use_cache, return_dict=True)

    def _passes(self, name: str, value: Any) -> bool:
        """Arguments that `generate` makes for every model, but not every decoder takes."""
        return value is not None and (name in self.arguments or name not in ("position_ids", "logits_to_keep"))


def headless(text_model: PreTrainedModel) -> nn.Module:
    """The part of a causal language model that gives hidden states."""
    base = text_model.base_model
    return base if base is not text_model else find_decoder(text_model)[0]
