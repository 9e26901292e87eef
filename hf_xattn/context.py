"""The one thing that travels from the model to its blocks: a keyword argument through the decoder's own layers.

It is a transformers `ModelOutput`, a mapping and a pytree, so that accelerate's device hooks move its tensors, FSDP casts
them, and activation checkpointing hands the very same tensors to the recomputation. Nothing is left on modules, in globals
or in hooks: those are missing under DDP, deepcopy and recomputation, where the gradients silently become zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree
from transformers.utils import ModelOutput

from .configuration_xattn import CrossAttentionConfig
from .cross_cache import CrossCache, KeyValue
from .folded_mask import FoldedMask, fold_mask
from .tensor_checks import check_bool, check_tensor, type_name


# The keyword under which it travels. No decoder of transformers has an argument of this name.
KEYWORD = "cross_attention_context"


class Recorder:
    """Collects what the blocks of one forward report: attention weights, and keys and values of new images.

    Keys and values get into a cache when the forward has succeeded, for all blocks at once. There is one recorder a forward, whoever
    copies the context on the way: `to` returns the object itself to device hooks, and so does the pytree node, without leaves, to FSDP
    and to export.
    """

    def __init__(self) -> None:
        self.weights: dict[int, torch.Tensor | None] = {}
        self.keys_values: dict[int, KeyValue] = {}

    def to(self, *args, **kwargs) -> Recorder:
        return self

    def collected(self) -> list[KeyValue]:
        """Keys and values in the order of the blocks."""
        return [self.keys_values[index] for index in sorted(self.keys_values)]


class _SameRecorder:
    """A recorder as the context of a pytree node. All are equal: no structure of inputs differs by its recorder."""

    def __init__(self, recorder: Recorder):
        self.recorder = recorder

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _SameRecorder)

    def __hash__(self) -> int:
        return hash(_SameRecorder)


pytree.register_pytree_node(
    Recorder,
    lambda recorder: ([], _SameRecorder(recorder)),
    lambda leaves, context: context.recorder,
    serialized_type_name="hf_xattn.context.Recorder",
    to_dumpable_context=lambda context: None,
    from_dumpable_context=lambda context: _SameRecorder(Recorder()),
    flatten_with_keys_fn=lambda recorder: ([], _SameRecorder(recorder)),
)


@dataclass
class CrossAttentionContext(ModelOutput):
    """What the blocks of one forward share.

    Every default is None: a mapping that accelerate rebuilds from a dict must not look half filled.

    Attributes:
        cross_attention_states (`torch.Tensor`, *optional*): `(R, N, context_size)`, images that are new in this forward.
        cache ([`CrossCache`], *optional*): images of earlier forwards. It is read here, never written.
        mask, visible (`torch.BoolTensor`, *optional*): see [`FoldedMask`].
        query_positions (`torch.LongTensor`, *optional*): `(B or 1, T)`, for a relative position bias.
        key_positions (`torch.LongTensor`, *optional*): `(rows, N)`, likewise; 0 ... N - 1 where it is None.
        output_attentions (`bool`, *optional*): blocks report their attention weights.
        keep_keys_values (`bool`, *optional*): blocks report the keys and values of new images, for a cache.
        encode_only (`bool`, *optional*): blocks report these and do nothing else.
        recorder ([`Recorder`], *optional*): where blocks report.
    """

    cross_attention_states: torch.Tensor | None = None
    cache: CrossCache | None = None
    mask: torch.Tensor | None = None
    visible: torch.Tensor | None = None
    query_positions: torch.Tensor | None = None
    key_positions: torch.Tensor | None = None
    output_attentions: bool | None = None
    keep_keys_values: bool | None = None
    encode_only: bool | None = None
    recorder: Recorder | None = None

    @property
    def folded_mask(self) -> FoldedMask:
        return FoldedMask(self.mask, self.visible)

    def cached(self, layer_idx: int) -> KeyValue | None:
        """Keys and values of the images that a block has projected before; None where there are none."""
        if self.cache is None or not self.cache.layers:
            return None
        return self.cache.layers[layer_idx].read()


def check_context(context: Any) -> None:
    """Raises a `TypeError` for anything but what a model makes."""
    if not isinstance(context, CrossAttentionContext):
        raise TypeError(
            f"`cross_attention` is what a model hands to its blocks, a CrossAttentionContext, got {type_name(context)}: pass "
            "`cross_attention_states` and `cross_attention_mask`."
        )


def check_cross_attention_mask(mask: torch.Tensor, batch_size: int, text_len: int, num_tokens: int) -> None:
    """Raises where a layer's `cross_attention_mask` is not `(batch, num_image_tokens)` or `(batch, text_len, num_image_tokens)`.

    Raises:
        TypeError: for a mask that is not boolean.
        ValueError: for a wrong rank or size.
    """
    check_tensor("cross_attention_mask", mask)
    check_bool("cross_attention_mask", mask)
    shapes = {2: (batch_size, num_tokens), 3: (batch_size, text_len, num_tokens)}
    if tuple(mask.shape) != shapes.get(mask.dim()):
        raise ValueError(
            f"Expected `cross_attention_mask` of shape {shapes[2]} (batch, num_image_tokens) or {shapes[3]} (batch, text_len, "
            f"num_image_tokens), got {tuple(mask.shape)}."
        )


def plain_context(
    hidden_states: torch.Tensor,
    cross_attention_states: torch.Tensor,
    cross_attention_mask: torch.Tensor | None,
    config: CrossAttentionConfig,
    output_attentions: bool = False,
) -> CrossAttentionContext:
    """Context of a layer that is used on its own, one image row a text row."""
    batch_size, text_len = hidden_states.shape[:2]
    sees = None
    if cross_attention_mask is not None:
        check_cross_attention_mask(cross_attention_mask, batch_size, text_len, cross_attention_states.shape[1])
        sees = cross_attention_mask[:, None] if cross_attention_mask.dim() == 2 else cross_attention_mask
    mask, visible = fold_mask(
        sees,
        image_rows=batch_size,
        text_rows=batch_size,
        text_len=text_len,
        group=config.num_attention_heads // config.num_key_value_heads,
        null_key=config.quiet_softmax,
    )
    return CrossAttentionContext(
        cross_attention_states=cross_attention_states,
        mask=mask,
        visible=visible,
        output_attentions=output_attentions or None,
    )
