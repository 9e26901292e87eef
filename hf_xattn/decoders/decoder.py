"""Inspects a text model: finds its layers, its arguments, and the way in which images reach its layers.

`decoders/insertion.py` inserts the blocks.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import textwrap
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, LinearAttentionCacheLayerMixin, StaticCache
from transformers.utils import logging

from ..layers.context import KEYWORD, CrossAttentionContext, carrying
from ..utils import memoized
from ..utils.architectures import Architecture, architecture, text_num_hidden_layers
from ..utils.keywords import LOSS, keywords_of, refuse_unknown
from ..utils.tensor_checks import has_values
from ..utils.transformers_api import HAS_RECORDING, check_recorded, is_before, needs


logger = logging.get_logger(__name__)

# Names of the cache among the arguments of causal language models: since transformers 5.24; before; in state-space
# models.
CACHE_ARGUMENTS = ("cache", "past_key_values", "cache_params")

# Attribute names of the stack of layers in decoders.
LAYER_ATTRIBUTES = ("layers", "h", "blocks", "block", "layer")


def find_decoder(language_model: PreTrainedModel) -> tuple[PreTrainedModel, nn.ModuleList]:
    """Finds the module that runs the decoder layers of a text model, and these layers.

    Raises a `ValueError` if the model has no stack of `num_hidden_layers` layers.
    """
    num_layers = text_num_hidden_layers(language_model.config)
    candidates = []
    for name, module in language_model.named_modules():
        for attribute in LAYER_ATTRIBUTES:
            layers = module._modules.get(attribute)
            if isinstance(layers, nn.ModuleList) and len(layers) == num_layers:
                candidates.append(
                    (name.count(".") + bool(name), LAYER_ATTRIBUTES.index(attribute), name, module, layers)
                )
    if not candidates:
        raise ValueError(
            f"{type(language_model).__name__} (model_type {language_model.config.model_type!r}) has no stack of "
            f"{num_layers} decoder layers under one of {list(LAYER_ATTRIBUTES)}, so there is no place for "
            "cross-attention blocks."
        )
    *_, decoder, layers = min(candidates, key=lambda candidate: candidate[:3])
    return decoder, layers


def find_cache_argument(language_model: PreTrainedModel) -> str:
    """Returns the name of the cache among the arguments of a text model.

    The name depends on the version of transformers, and may be another one in custom code.

    Raises a `ValueError` if the model takes no `Cache`.
    """
    arguments = inspect.signature(language_model.forward).parameters
    for name in CACHE_ARGUMENTS:
        if name in arguments:
            return name
    raise ValueError(
        f"{type(language_model).__name__} (model_type {language_model.config.model_type!r}) takes no cache of "
        f"transformers: expected one of {list(CACHE_ARGUMENTS)} among the arguments of its `forward`."
    )


def layers_receive_keywords(language_model: PreTrainedModel) -> bool:
    """Whether the `**kwargs` of a model's `forward` reach the layers of its decoder, through every model in between.

    The function reads the source code and does not run the model, which may be too large, or have no weights yet.
    """
    decoder, _ = find_decoder(language_model)
    path = next(name for name, module in language_model.named_modules() if module is decoder)
    outer: nn.Module = language_model
    for child in path.split(".") if path else ():
        if isinstance(outer, PreTrainedModel) and not _hands_keywords_on(type(outer), child):
            return False
        outer = getattr(outer, child)
    return _hands_keywords_on(type(decoder), None)


@memoized
def _hands_keywords_on(model_class: type[nn.Module], child: str | None) -> bool:
    """Whether `forward` passes its own `**kwargs` on to `self.<child>`.

    If `child` is None, it must pass them on to the layers, which in the code are variables of loops.
    """
    forward = inspect.unwrap(model_class.forward)
    try:
        function = ast.parse(textwrap.dedent(inspect.getsource(forward))).body[0]
    except (OSError, TypeError, SyntaxError, IndentationError):
        return False
    if not isinstance(function, ast.FunctionDef) or function.args.kwarg is None:
        return False
    keywords = function.args.kwarg.arg
    looped = {
        node.id
        for loop in ast.walk(function)
        if isinstance(loop, ast.For)
        for node in ast.walk(loop.target)
        if isinstance(node, ast.Name)
    }
    for call in (node for node in ast.walk(function) if isinstance(node, ast.Call)):
        passes = any(
            keyword.arg is None and isinstance(keyword.value, ast.Name) and keyword.value.id == keywords
            for keyword in call.keywords
        )
        if child is None:
            is_called = isinstance(call.func, ast.Name) and call.func.id in looped
        else:
            is_called = f"{ast.unparse(call.func)}.".startswith(f"self.{child}.")
        if passes and is_called:
            return True
    return False


class DecoderInterface(NamedTuple):
    """How to call a text model, and what its decoder can do."""

    layers: str  # name of the list of layers in the text model
    arguments: frozenset[str]  # names of the arguments of the text model's `forward`
    cache_argument: str  # name of the cache among these arguments
    receives_keywords: bool  # whether the layers get the keyword arguments of `forward`
    keywords: frozenset[str]  # names of keyword arguments that the text model reads, with its head
    body_keywords: frozenset[str]  # names of keyword arguments that it reads without its head
    is_custom_code: bool  # whether it is custom code, which may read further keyword arguments
    name: str  # name of the text model in errors
    packs: bool = False  # whether it keeps several samples of a row apart by their positions
    forgets: bool = False  # whether its layers drop their state when they read several tokens after cached text
    counts_from_zero: bool = False  # whether it counts text after cached text from 0 without `position_ids`
    keeps_state: bool = False  # whether some layers keep a running state of the text in place of keys and values
    only_states: bool = False  # whether all layers keep such a state
    not_static: str | None = None  # why it cannot have a static cache

    @classmethod
    def of(cls, text_model: PreTrainedModel) -> DecoderInterface:
        decoder, layers = find_decoder(text_model)
        around = [
            model
            for model in text_model.modules()
            if isinstance(model, PreTrainedModel) and any(inner is decoder for inner in model.modules())
        ]
        cache_argument = find_cache_argument(text_model)
        handled = {"self", "kwargs", cache_argument}
        body = keywords_of(model for model in around if model is not text_model) - handled
        model_type = text_model.config.model_type
        differs, name = architecture(model_type), f"{type(text_model).__name__} (model_type {model_type!r})"
        kinds = _cache_layers(text_model)
        states = [isinstance(kind, LinearAttentionCacheLayerMixin) for kind in kinds]
        return cls(
            next(name for name, module in text_model.named_modules() if module is layers),
            frozenset(inspect.signature(text_model.forward).parameters),
            cache_argument,
            layers_receive_keywords(text_model),
            (keywords_of(around) | LOSS) - handled,
            body,
            text_model.is_custom_code(),
            name,
            differs.packs and not any(states) and not text_model.is_custom_code(),
            differs.forgets,
            differs.counts_from_zero,
            any(states),
            any(states) and not any(isinstance(kind, CacheLayerMixin) for kind in kinds),
            _why_not_static(differs, name),
        )

    def check_continues(self, length: int, cache: Cache, mask: Any) -> None:
        """Checks that `length` new tokens with the `attention_mask` `mask` can follow the text in a cache.

        Raises:
            ValueError: for an unusable cache, for several tokens after text that would be forgotten, and for a mask
                that covers only the new text, which would hide cached text, or the new text.
        """
        if not HAS_RECORDING:
            check_recorded(cache)
        if self.not_static is not None and isinstance(cache, StaticCache):
            raise ValueError(self.not_static)
        if self.forgets and length > 1 and _holds_state(cache):
            raise ValueError(
                f"Expected one token at a time after the text in `cache`, got {length}: {self.name} drops "
                "its state when it reads several. Pass one token a call, or call `generate` with an "
                "`EncoderDecoderCache`, which does so."
            )
        if not isinstance(mask, torch.Tensor) or mask.dim() != 2 or torch.compiler.is_compiling():
            return
        past: Any = None
        for layer in cache.layers:
            if isinstance(layer, CacheLayerMixin):  # state-space layers do not count the text, and take such a mask
                past = layer.get_seq_length()
                break
        if isinstance(past, torch.Tensor):  # in a static cache. On a GPU, only a short mask is worth waiting for
            known = has_values(past) and (past.device.type == "cpu" or mask.shape[1] == length)
            past = int(past) if known else None
        if past is not None and mask.shape[1] < past + length:
            raise ValueError(
                f"Expected `attention_mask` of shape (batch, {past + length}), for the text in `cache` too "
                f"({past} tokens), got {tuple(mask.shape)}."
            )

    def check_padding(
        self, mask: object, length: int, cache: Cache | None, by_one: bool, generates: bool = False
    ) -> None:
        """Refuses padding that a running state would read, or warns of it.

        Args:
            mask (`torch.Tensor`, *optional*): The `attention_mask`. Only a mask of two axes is checked; others are made
                by a caller or by transformers.
            length (`int`): Number of new tokens.
            cache (`Cache`, *optional*): The cache of the text.
            by_one (`bool`): Whether the new tokens are read one at a time. The layers then mask no padding.
            generates (`bool`, defaults to `False`): Whether `generate` calls this method, before its first step.

        Raises:
            ValueError: for padding in front of text with `by_one`; for padding after text in a later turn or in the
                prompt of `generate`. Other padding after text only gets a warning.
        """
        if not self.keeps_state or not isinstance(mask, torch.Tensor) or mask.dim() != 2 or not has_values(mask):
            return
        if length == 1 and mask.device.type != "cpu":
            return  # otherwise every step would wait for the device
        real, cached = mask != 0, cache is not None and _holds_state(cache)
        if cached and mask.shape[1] == length:
            real = torch.cat([torch.ones_like(real[:, :1]), real], dim=1)  # the mask covers only the new text
        before = real.cumsum(dim=1)
        follows = real[:, 1:]
        if generates:
            follows = torch.cat([follows, torch.ones_like(real[:, :1])], dim=1)  # the first new token
        ends = follows.shape[1]
        between = (follows & ~real[:, :ends] & (before[:, :ends] > 0)).any(dim=1)
        unmasked = (before[:, -length:] == 0).any(dim=1) & by_one
        if not (between | unmasked).any():
            return
        rows = (between | unmasked).nonzero().flatten().tolist()
        blame = f"{self.name} keeps a running state of the text and reads this padding into it, without blocks, too"
        if unmasked.any():
            raise ValueError(
                f"Expected no padding in front of text that is read one token at a time, got it in rows {rows}: "
                f"{blame}. Pass the text in one call, or with a `prefill_chunk_size` of at least 2."
            )
        message = (
            "Expected padding in `attention_mask` in front of all text of a row, got it after text in rows "
            f"{rows}: {blame}."
        )
        if length == 1 or not (cached or generates):
            logger.warning_once(message)
            return
        raise ValueError(
            f"{message} Pass the whole text, padded in front, with an empty cache, or continue each row alone."
        )

    def check_keywords(self, caller: Callable[..., Any], given: dict[str, Any], body: bool = False) -> None:
        """Raises a `TypeError` for keyword arguments that the text model does not read.

        `body` says whether it runs without its head.
        """
        refuse_unknown(caller, given, self.body_keywords if body else self.keywords, only_near=self.is_custom_code)

    def call(
        self,
        runner: Callable[..., Any],
        arguments: dict[str, Any],
        context: CrossAttentionContext | None,
        cache: Cache | None,
        use_cache: bool,
    ) -> Any:
        """Calls the text model with the context. `runner` is the text model with or without its head.

        The context is a keyword argument. If the decoder does not pass keyword arguments to its layers, the context
        goes through the channel (see `layers/context.py`).
        """
        left_out = {"position_ids", "logits_to_keep"} - self.arguments  # `generate` passes them to all models
        arguments = {name: value for name, value in arguments.items() if value is not None and name not in left_out}
        text = arguments["input_ids"] if "input_ids" in arguments else arguments["inputs_embeds"]
        mask = arguments.get("attention_mask")
        if self.only_states and isinstance(mask, torch.Tensor) and mask.dim() == 2:
            arguments["attention_mask"] = mask[:, -text.shape[1] :]  # Mamba multiplies the new tokens by their mask
        if self.counts_from_zero and cache is not None and "position_ids" not in arguments:
            arguments["position_ids"] = torch.arange(text.shape[1], device=text.device)[None] + cache.get_seq_length()
        beside: contextlib.AbstractContextManager = contextlib.nullcontext()
        if context is not None and self.receives_keywords:
            arguments[KEYWORD] = context
        elif context is not None:
            beside = carrying(context)
        with beside:
            return runner(**arguments, **{self.cache_argument: cache}, use_cache=use_cache, return_dict=True)


def _why_not_static(differs: Architecture, name: str) -> str | None:
    if differs.not_static is not None:
        return f"Expected another cache than a static one with {name}, also without blocks: {differs.not_static}."
    return needs(differs.static_since, f"A static cache of {name}") if is_before(differs.static_since) else None


def _cache_layers(text_model: PreTrainedModel) -> list[Any]:
    """Returns the layers of a new cache; none for custom code with kinds of layers that transformers does not know."""
    try:
        return DynamicCache(config=text_model.config).layers
    except KeyError:
        return []


def holds_text(cache: Cache | None) -> bool:
    """Whether the cache of a text model holds keys and values, or a state, of earlier text."""
    if cache is None:
        return False
    keys = (layer for layer in cache.layers if isinstance(layer, CacheLayerMixin))
    return any(int(layer.get_seq_length()) > 0 for layer in keys) or _holds_state(cache)


def _holds_state(cache: Cache) -> bool:
    layers = [layer for layer in cache.layers if isinstance(layer, LinearAttentionCacheLayerMixin)]
    return any(any(layer.has_previous_state.values()) for layer in layers)


def headless(text_model: PreTrainedModel) -> nn.Module:
    """Returns the part of a text model that computes hidden states, without the head."""
    base = text_model.base_model
    return base if base is not text_model else find_decoder(text_model)[0]
