"""What the model passes to its blocks: one keyword argument, which goes through the layers of the text model.

A layer gets one of two values:

- [`ImageTokens`], in a call without a text: the blocks project the tokens of new images to keys and values, once.
- [`CrossAttentionContext`], in a call with the text: the blocks read the keys and values of all images.

Both are `ModelOutput`s, that is, mappings and pytrees. So accelerate's device hooks move their tensors, FSDP casts
them, and activation checkpointing passes them to the recomputation. Nothing is stored on modules, in globals or in
hooks: under DDP, deepcopy and recomputation it would be missing, and gradients would silently be zero.

Some decoders do not pass keyword arguments to their layers. They get the context through a channel, which belongs to
one thread and one call: the `__call__` of a layer reads the channel, and passes the context to the `forward` of the
layer as the same keyword argument. `forward` itself must not read the channel. Activation checkpointing calls `forward`
again in the backward pass, when the channel is empty, and then the gradient of the image would be lost.

Letters in the shapes of masks: B text rows, R image rows (B = R * r, each image row serves r text rows), T text tokens,
N image tokens, G query heads that share a K/V head.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch.utils import _pytree as pytree
from transformers.utils import ModelOutput

from ..cache.cross_cache import CrossCache, KeyValue
from ..cache.image_layout import RealTokens, rows_to
from ..configuration_xattn import CrossAttentionConfig
from ..utils.tensor_checks import check_bool, check_tensor, type_name
from .positions import Positions, token_positions


# Name of the keyword argument. No decoder of transformers has an argument of this name.
KEYWORD = "cross_attention_context"

# If at most this many text positions share an image row, the mask is repeated for each head of a group. Otherwise the
# heads share the mask, and the attention unfolds them, which is as fast for a long text and needs a smaller mask.
MAX_POSITIONS_PER_HEAD = 256


@dataclass(eq=False)
class Recorder:
    """Collects the attention weights of the blocks of one forward. So it also knows which blocks have run.

    Device hooks, FSDP and export copy the context. All copies share one recorder, because `to` returns the recorder
    itself, and because as a pytree node it has no leaves.
    """

    wants_weights: bool = False
    weights: dict[int, torch.Tensor | None] = field(default_factory=dict)

    def to(self, *args, **kwargs) -> Recorder:
        return self


class _SameRecorder:
    """The recorder in the structure of a pytree. Instances with equal `wants` are equal.

    Otherwise, export would take the inputs of two calls for inputs of different structure.
    """

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
    """The image tokens of new images, which the blocks project. Padding tokens are left out if that is possible.

    All fields default to None, because accelerate rebuilds a `ModelOutput` from a single dict, and transformers reads
    such a dict only if all other fields are None.
    """

    states: torch.Tensor | None = None  # `(R, N, context_size)`, or `(1, M, context_size)` without padding tokens
    real: RealTokens | None = None  # the places of the tokens, if padding tokens are left out
    positions: torch.Tensor | None = None  # `(1, N or M)`, position of each token in its image; None for 0 ... N - 1
    null_key: bool | None = None  # whether the null key of quiet softmax comes in front of the keys


@dataclass
class CrossAttentionContext(ModelOutput):
    """What the blocks of one forward read. All fields default to None, as in [`ImageTokens`]."""

    cache: CrossCache | None = None  # keys and values of all images, for every block
    keys_values: KeyValue | None = None  # keys and values of a layer that is used without a model, in place of `cache`
    mask: torch.Tensor | None = None  # see [`FoldedMask`]
    visible: torch.Tensor | None = None  # see [`FoldedMask`]
    # `(B,)`, the row of keys and values of each text row; None if text rows share image rows in equal numbers, in order
    rows: torch.Tensor | None = None
    positions: Positions | None = None  # positions of text and images; None for 0 ... T - 1 and 0 ... N - 1
    recorder: Recorder | None = None  # collects the attention weights

    def read(self, layer_idx: int) -> KeyValue:
        """Returns the keys and values of a block, on the device of the block."""
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
    """Returns the context of the call that runs in this thread, or None."""
    return _channel.context


class FoldedMask(NamedTuple):
    """Which keys each query may attend to. All blocks of a forward share it.

    `mask` is `(R, 1, 1, N)` if all queries of an image row see the same tokens, `(R, 1, r * T * G, N)` with an entry
    for each query, or `(R, 1, r * T, N)` if the heads of a group share an entry.
    """

    mask: torch.Tensor | None  # True where a query may attend; no row is all False; None if nothing is hidden
    visible: torch.Tensor | None  # `(B or 1, T or 1, 1)`, whether a text position sees any image token; None if all do


EVERYTHING = FoldedMask(None, None)


def fold_mask(
    sees: torch.Tensor | None, *, image_rows: int, text_rows: int, text_len: int, group: int, null_key: bool = False
) -> FoldedMask:
    """Folds a mask as the queries are folded, and keeps the softmax of every query finite.

    For a query that sees nothing, the softmax is NaN in some kernels. The mask of such a query becomes all True, and
    the block discards the output at its position (`visible`).

    Args:
        sees (`torch.BoolTensor`, *optional*): `(rows, T or 1, N)`, True where text sees an image token. The number of
            rows divides B and is a multiple of R.
        image_rows, text_rows, text_len, group (`int`): R, B, T and G.
        null_key (`bool`, defaults to `False`): Whether the keys start with a null key (quiet softmax), which is always
            visible.
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


def no_context(given: object) -> TypeError:
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
    """Makes the context of a layer that is used without a model. Each text row has one image row."""
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
        recorder=Recorder(wants_weights=True) if output_attentions else None,
    )
