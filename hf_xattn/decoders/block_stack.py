"""The blocks at one place of a decoder: in most models one block, otherwise several that run one after the other.

Several blocks are one submodule of the layer, so the layer holds the same two names however many blocks it has. A
single block keeps its names without a number: `cross_attention_block.attn...` of one,
`cross_attention_block.0.attn...` of the first of several.
"""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import nn
from transformers.modeling_utils import local_torch_dtype

from ..cache.cross_cache import KeyValue
from ..configuration_xattn import XAttnConfig
from ..layers.block import GatedCrossAttentionBlock
from ..layers.context import CrossAttentionContext, ImageTokens
from ..utils.tensor_checks import is_quantized


def blocks_at(layers: list[int], place: int) -> list[int]:
    """Returns the indices of the blocks in front of layer `place`, in the order in which they run.

    `layers` are the places of all blocks. The number of layers is the place after the last one.
    """
    return [index for index, each in enumerate(layers) if each == place]


class BlockStack(nn.Sequential):
    """Several blocks at one place, in the order in which they run."""

    def forward(
        self, hidden_states: torch.Tensor, cross_attention: CrossAttentionContext | None = None
    ) -> torch.Tensor:
        """`(batch, text_len, hidden_size)`, through every block."""
        for block in self:
            hidden_states = block(hidden_states, cross_attention=cross_attention)
        return hidden_states

    def encode(self, images: ImageTokens) -> tuple[KeyValue, ...]:
        """The keys and values of new images, of every block."""
        return tuple(pair for block in self for pair in block.encode(images))  # type: ignore[operator]


Blocks: TypeAlias = "GatedCrossAttentionBlock | BlockStack"


@torch.no_grad()
def weight_of(layer: nn.Module) -> torch.Tensor:
    """A weight that has the device and the dtype of a layer: a matrix, because vectors may stay in float32."""
    weights = list(layer.parameters())
    return next((weight for weight in weights if weight.dim() > 1), weights[0])


def make_blocks(config: XAttnConfig, place: int, like: torch.Tensor, computes_in: torch.dtype) -> Blocks | None:
    """Makes the blocks in front of layer `place`, on the device and in the dtype of a layer; None if it has none.

    In half precision, gates and norms are float32.

    Args:
        place (`int`): a layer, or the number of layers for the blocks after the last one.
        like (`torch.Tensor`): a weight of the layer. On the meta device, the blocks are as torch's defaults say.
        computes_in (`torch.dtype`): dtype of the blocks where that weight is quantized: it is stored as integers.
    """
    found = blocks_at(config.cross_attention_layers, place)
    if not found:
        return None
    dtype = torch.get_default_dtype() if like.is_meta else computes_in if is_quantized(like) else like.dtype
    with local_torch_dtype(dtype):
        blocks = [GatedCrossAttentionBlock(config.cross_attention_config, layer_idx=index) for index in found]
    for tensor in (tensor for block in blocks for tensor in (*block.parameters(), *block.buffers())):
        if not (like.is_meta or tensor.is_meta):
            tensor.data = tensor.data.to(like.device)
    return BlockStack(*blocks) if len(blocks) > 1 else blocks[0]
