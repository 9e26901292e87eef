"""The one thing that travels from the model to its blocks: a keyword argument through the decoder's own layers.

It is a transformers `ModelOutput`, a mapping and a pytree, so that accelerate's device hooks move its tensors, FSDP casts
them, and activation checkpointing hands the very same tensors to the recomputation. Nothing is left on modules, in globals
or in hooks: those are missing under DDP, deepcopy and recomputation, where the gradients silently become zero.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers.cache_utils import Cache
from transformers.utils import ModelOutput

from .cache import read_key_value, write_key_value
from .configuration_xattn import CrossAttentionConfig
from .visibility import Visibility, check_cross_attention_mask, lay_out


# The keyword that carries a `CrossAttentionContext` to the layers. No decoder of transformers has an argument of this name.
KEYWORD = "cross_attention_context"


class Recorder:
    """Collects what the blocks of one forward report: that they ran, and their attention weights.

    `to` returns the object itself, so that a device hook that copies the context does not copy the list.
    """

    def __init__(self):
        self.weights: dict[int, torch.Tensor | None] = {}

    def to(self, *args, **kwargs) -> Recorder:
        return self


@dataclass
class CrossAttentionContext(ModelOutput):
    """What the blocks of one forward share.

    Every default is None: a mapping that accelerate rebuilds from a dict must not look half filled.

    Attributes:
        cross_attention_states (`torch.Tensor`, *optional*): `(R, N, context_size)`, images that are new in this forward.
        cache (`Cache`, *optional*): cross half of the cache; holds the images of earlier forwards.
        mask, visible (`torch.BoolTensor`, *optional*): see [`Visibility`].
        query_positions (`torch.LongTensor`, *optional*): `(B or 1, T)`, for a relative position bias.
        output_attentions (`bool`, *optional*): blocks report their attention weights.
        encode_only (`bool`, *optional*): layers fill the cache and do nothing else.
        recorder ([`Recorder`], *optional*): where blocks report.
    """

    cross_attention_states: torch.Tensor | None = None
    cache: Cache | None = None
    mask: torch.Tensor | None = None
    visible: torch.Tensor | None = None
    query_positions: torch.Tensor | None = None
    output_attentions: bool | None = None
    encode_only: bool | None = None
    recorder: Recorder | None = None

    @property
    def visibility(self) -> Visibility:
        return Visibility(self.mask, self.visible)

    def key_value(self, block) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values that a block attends to: projected where the images are new, read where they are not."""
        if self.cross_attention_states is None:
            return read_key_value(self.cache, block.layer_idx)
        key, value = block.attn.project_key_value(self.cross_attention_states)
        if self.cache is None:
            return key, value
        return write_key_value(self.cache, block.layer_idx, key, value)

    def record(self, layer_idx: int, weights: torch.Tensor | None) -> None:
        if self.recorder is not None:
            self.recorder.weights[layer_idx] = weights


def plain_context(
    hidden_states: torch.Tensor,
    cross_attention_states: torch.Tensor,
    cross_attention_mask: torch.Tensor | None,
    config: CrossAttentionConfig,
) -> CrossAttentionContext:
    """Context of a block that is used on its own, one image row a text row."""
    batch_size, text_len = hidden_states.shape[:2]
    sees = None
    if cross_attention_mask is not None:
        check_cross_attention_mask(cross_attention_mask, batch_size, text_len, cross_attention_states.shape[1])
        sees = cross_attention_mask[:, None] if cross_attention_mask.dim() == 2 else cross_attention_mask
    mask, visible = lay_out(
        sees,
        image_rows=batch_size,
        text_rows=batch_size,
        text_len=text_len,
        group=config.num_attention_heads // config.num_key_value_heads,
        null_key=config.quiet_softmax,
    )
    return CrossAttentionContext(cross_attention_states=cross_attention_states, mask=mask, visible=visible)
