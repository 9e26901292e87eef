"""The blocks at one place of a decoder: in most models one block, otherwise several that run one after the other.

Several blocks at one place are one submodule of the layer. So the submodule has the same name however many blocks there
are. The names of a single block have no number: its weights are `cross_attention_block.attn...`, and those of the first
of several blocks are `cross_attention_block.0.attn...`.
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

    `layers` has the place of each block. The place after the last layer is the number of layers.
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
        """Returns the keys and values of new images, one pair for each block."""
        return tuple(pair for block in self for pair in block.encode(images))  # type: ignore[operator]


Blocks: TypeAlias = "GatedCrossAttentionBlock | BlockStack"


@torch.no_grad()
def weight_of(layer: nn.Module) -> torch.Tensor:
    """Returns a weight with the device and the dtype of a layer. It is a matrix, because vectors may be float32."""
    weights = list(layer.parameters())
    return next((weight for weight in weights if weight.dim() > 1), weights[0])


def make_blocks(config: XAttnConfig, place: int, like: torch.Tensor, computes_in: torch.dtype) -> Blocks | None:
    """Makes the blocks in front of layer `place`, on the device and in the dtype of the layer.

    Gates and norms are float32 also in half precision. Returns None if there is no block at this place.

    Args:
        config ([`XAttnConfig`]): Configuration of the model.
        place (`int`): Index of a layer, or the number of layers for the blocks after the last layer.
        like (`torch.Tensor`): A weight of the layer, whose device and dtype the blocks get. If it is on the meta
            device, they get torch's default device and dtype.
        computes_in (`torch.dtype`): Dtype of the blocks if this weight is quantized, that is, stored as integers.
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
