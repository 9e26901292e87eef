"""The blocks at one place of a decoder: in most models one block, otherwise several that run one after the other.

Several blocks are one submodule of the layer, so the layer holds the same two names however many blocks it has. A single block keeps
its names without a number: `cross_attention_block.attn...` of one, `cross_attention_block.0.attn...` of the first of several.
"""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import nn

from .block import GatedCrossAttentionBlock
from .block_places import blocks_at
from .configuration_xattn import XAttnConfig
from .context import CrossAttentionContext
from .cross_cache import KeyValue


class BlockStack(nn.Sequential):
    """Several blocks at one place, in the order in which they run."""

    def forward(
        self, hidden_states: torch.Tensor, cross_attention: CrossAttentionContext | None = None
    ) -> torch.Tensor:
        """`(batch, text_len, hidden_size)` to the same shape, through every block."""
        for block in self:
            hidden_states = block(hidden_states, cross_attention=cross_attention)
        return hidden_states

    def encode(self, cross_attention: CrossAttentionContext) -> tuple[KeyValue, ...]:
        """Returns keys and values of new images, of every block."""
        return tuple(block.encode(cross_attention) for block in self)  # type: ignore[operator]


Blocks: TypeAlias = "GatedCrossAttentionBlock | BlockStack"


def make_blocks(config: XAttnConfig, place: int) -> Blocks | None:
    """Makes the blocks in front of layer `place`; None if it has none."""
    found = blocks_at(config.cross_attention_layers, place)
    blocks = [GatedCrossAttentionBlock(config.cross_attention_config, layer_idx=index) for index in found]
    return BlockStack(*blocks) if len(blocks) > 1 else blocks[0] if blocks else None
