"""What the model passes to its blocks: one keyword argument that goes through the decoder's own layers.

A layer gets one of two values, which are `ModelOutput`s, that is mappings and pytrees:

- [`ImageTokens`], without text: the blocks project the tokens of new images to keys and values, once.
- [`CrossAttentionContext`], with the text: the blocks read the keys and values of all images.

So accelerate's device hooks move their tensors, FSDP casts them, and activation checkpointing passes them to the
recomputation. Nothing is stored on modules, in globals or in hooks: under DDP, deepcopy and recomputation it would be
missing, and gradients would silently be zero.

Decoders that do not pass keyword arguments to their layers get the context through a channel of one thread and one
call: a layer's `__call__` reads the channel, and passes the context to the layer's `forward` as the same keyword.
Activation checkpointing wraps `forward`, so the recomputation gets the context as an argument. By then the channel is
empty: a `forward` that read the channel would lose the image's gradient.

Letters of the mask: B text rows, R image rows (B = R * r, each image row serves r text rows), T text tokens, N image
tokens, G query heads that share a K/V head.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree
from transformers.utils import ModelOutput

from ..cache.cross_cache import CrossCache, KeyValue
from ..cache.image_layout import ImageLayout, RealTokens, rows_to
from ..configuration_xattn import CrossAttentionConfig
from ..utils.tensor_checks import check_bool, check_tensor, type_name
from .positions import Positions, positions_in_images, token_positions


# Name of the keyword argument. No decoder of transformers has an argument of this name.
KEYWORD = "cross_attention_context"

# If at most this many text positions share an image row, the mask is repeated for each head of a group. Otherwise the
# heads share the mask and attention takes them apart, which is as fast for long text and needs a smaller mask.
MAX_POSITIONS_PER_HEAD = 256


class Recorder:
    """Collects the attention weights of the blocks of one forward, and so tells which blocks have run.

    Device hooks, FSDP and export copy the context, but all copies share one recorder: `to` returns the object itself,
    and as a pytree node it has no leaves.
    """

    def __init__(self, weights: bool = False) -> None:
        self.wants_weights = weights
        self.weights: dict[int, torch.Tensor | None] = {}

    def to(self, *args, **kwargs) -> Recorder:
        return self


class _SameRecorder:
    """A recorder in a pytree. Instances with equal `wants` are equal, so that input structures are equal."""

    def __init__(self, recorder: Recorder):
        self.recorder = recorder

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _SameRecorder) and self.wants() == other.wants()

    def __hash__(self) -> int:
        return hash(tuple(self.wants()))

    def wants(self) -> list[bool]:
        return [self.recorder.wants_weights]


pytree.register_pytree_node(
    Recorder,
    lambda recorder: ([], _SameRecorder(recorder)),
    lambda leaves, context: context.recorder,
    serialized_type_name="hf_xattn.context.Recorder",
    to_dumpable_context=lambda context: context.wants(),
    from_dumpable_context=lambda wants: _SameRecorder(Recorder(*wants)),
    flatten_with_keys_fn=lambda recorder: ([], _SameRecorder(recorder)),
)


@dataclass
class ImageTokens(ModelOutput):
    """The tokens of new images, which the blocks project. Padding is left out where that is possible.

    Every default is None: accelerate rebuilds a `ModelOutput` from one dict, which it reads only if all other fields
    are None.
    """

    states: torch.Tensor | None = None  # `(R, N, context_size)`, or `(1, M, context_size)`, their real tokens alone
    real: RealTokens | None = None  # where the real tokens stand, if they alone are given
    positions: torch.Tensor | None = None  # `(1, N or M)`, of each token in its image; None for 0 ... N - 1
    null_key: bool | None = None  # whether the null key of quiet softmax comes in front of the keys

    @classmethod
    def of(
        cls, config: CrossAttentionConfig, states: torch.Tensor, layout: ImageLayout | None, first: bool
    ) -> ImageTokens:
        """
        Args:
            states (`torch.Tensor`): `(R, N, context_size)`.
            layout ([`ImageLayout`], *optional*): of the images; None for images without padding.
            first (`bool`): whether no images stand in front of these.
        """
        null_key = config.quiet_softmax and first
        if layout is None:
            return cls(states=states, null_key=null_key)
        real = None if layout.token_mask is None else layout.real_tokens(states.shape[0])
        positions = None if config.position == "none" else positions_in_images(layout.sizes, states.device)
        if real is None:
            return cls(states=states, positions=positions, null_key=null_key)
        positions = None if positions is None else positions[:, real.coordinates[1].to(positions.device)]
        return cls(states=real.take(states), real=real, positions=positions, null_key=null_key)


@dataclass
class CrossAttentionContext(ModelOutput):
    """What the blocks of one forward read. Every default is None, as in [`ImageTokens`]."""

    cache: CrossCache | None = None  # keys and values of all images, for every block
    keys_values: KeyValue | None = None  # those of a layer that is used on its own, in place of `cache`
    mask: torch.Tensor | None = None  # see [`FoldedMask`]
    visible: torch.Tensor | None = None  # see [`FoldedMask`]
    # `(B,)`, the row of keys and values of each text row; None if the text shares the rows in equal numbers, in order
    rows: torch.Tensor | None = None
    positions: Positions | None = None  # of text and images; None for 0 ... T - 1 and 0 ... N - 1
    recorder: Recorder | None = None  # what blocks record to

    def read(self, layer_idx: int) -> KeyValue:
        """The keys and values of a block, on its device."""
        if self.keys_values is not None:
            return self.keys_values
        assert self.cache is not None
        key, value = self.cache.layers[layer_idx].read()
        if self.rows is None:
            return key, value
        rows = self.rows.to(key.device)
        return key[rows], value[rows]


class _Channel(threading.local):
    context: CrossAttentionContext | None = None


_channel = _Channel()


@contextlib.contextmanager
def carrying(context: CrossAttentionContext) -> Iterator[None]:
    """Gives `context` to all layers that are called inside the `with` statement."""
    before, _channel.context = _channel.context, context
    try:
        yield
    finally:
        _channel.context = before


def carried_context() -> CrossAttentionContext | None:
    """The context of the call that runs in this thread."""
    return _channel.context


class FoldedMask(NamedTuple):
    """Which keys each query may attend to. All blocks of a forward share it.

    `mask` is `(R, 1, 1, N)` if all queries of an image row see the same tokens, `(R, 1, r * T * G, N)` with an entry
    for each query, or `(R, 1, r * T, N)` if the heads of a group share an entry.
    """

    mask: torch.Tensor | None  # True = attend; no row is all False; None if every query may attend to every key
    visible: torch.Tensor | None  # `(B or 1, T or 1, 1)`, whether a text position sees any image token; None if all do


EVERYTHING = FoldedMask(None, None)


def fold_mask(
    sees: torch.Tensor | None, *, image_rows: int, text_rows: int, text_len: int, group: int, null_key: bool = False
) -> FoldedMask:
    """Folds a mask, and makes a softmax safe for every query.

    For a query that sees nothing the softmax is NaN in some kernels. Its mask becomes all True instead, and the block
    discards the output at this position (`visible`).

    Args:
        sees (`torch.BoolTensor`, *optional*): `(rows, T or 1, N)`, with rows that divide B and are a multiple of R.
        image_rows, text_rows, text_len, group (`int`): R, B, T and G.
        null_key (`bool`): whether the keys start with a null key (quiet softmax). A null key is always visible.
    """
    if sees is None:
        return EVERYTHING
    visible = sees.any(dim=-1, keepdim=True)
    mask = torch.cat([torch.ones_like(visible), sees], dim=-1) if null_key else sees | ~visible
    rows, steps, num_keys = mask.shape
    visible = rows_to(visible, text_rows)
    if rows == image_rows and steps == 1:
        return FoldedMask(mask[:, None], visible)
    repeats = text_rows // image_rows
    heads = group if repeats * text_len <= MAX_POSITIONS_PER_HEAD else 1
    mask = rows_to(mask, text_rows).view(image_rows, repeats, steps, 1, num_keys)
    mask = mask.expand(-1, -1, text_len, heads, -1).reshape(image_rows, 1, -1, num_keys)
    return FoldedMask(mask, visible)


def no_context(given: Any) -> TypeError:
    return TypeError(
        f"Expected `cross_attention` to be a CrossAttentionContext, which only a model makes, got {type_name(given)}. "
        "Pass `cross_attention_states` and `cross_attention_mask` instead."
    )


def check_cross_attention_mask(mask: torch.Tensor, batch_size: int, text_len: int, num_tokens: int) -> None:
    """Raises if a mask is not boolean, or not `(batch, num_image_tokens)` or `(batch, text_len, num_image_tokens)`."""
    check_tensor("cross_attention_mask", mask)
    check_bool("cross_attention_mask", mask)
    shapes = {2: (batch_size, num_tokens), 3: (batch_size, text_len, num_tokens)}
    if tuple(mask.shape) != shapes.get(mask.dim()):
        raise ValueError(
            f"Expected `cross_attention_mask` of shape {shapes[2]} (batch, num_image_tokens) or {shapes[3]} (batch, "
            f"text_len, num_image_tokens), got {tuple(mask.shape)}."
        )


def plain_context(
    hidden_states: torch.Tensor,
    keys_values: KeyValue,
    cross_attention_mask: torch.Tensor | None,
    config: CrossAttentionConfig,
    output_attentions: bool = False,
) -> CrossAttentionContext:
    """Makes the context of a layer that is used on its own, with one image row for each text row."""
    batch_size, text_len = hidden_states.shape[:2]
    sees = positions = None
    if cross_attention_mask is not None:
        num_tokens = keys_values[0].shape[2] - int(config.quiet_softmax)
        check_cross_attention_mask(cross_attention_mask, batch_size, text_len, num_tokens)
        sees = cross_attention_mask
        if sees.dim() == 2:
            positions = Positions(None, token_positions(sees)) if config.counts_text else None
            sees = sees[:, None]
    mask, visible = fold_mask(
        sees,
        image_rows=batch_size,
        text_rows=batch_size,
        text_len=text_len,
        group=config.num_attention_heads // config.num_key_value_heads,
        null_key=config.quiet_softmax,
    )
    return CrossAttentionContext(
        keys_values=keys_values,
        mask=mask,
        visible=visible,
        positions=positions,
        recorder=Recorder(weights=True) if output_attentions else None,
    )
