"""Reports what the blocks add to a model: parameters, cache bytes, compute, and whether it sees."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..configuration_xattn import CrossAttentionConfig
from ..images.vision import blank_image


def tokens_per_image(model: Any) -> int | None:
    """Returns the number of tokens that the vision tower makes of one image, or None without a tower.

    Runs the tower on a blank image. On the meta device this computes shapes only. `model` is an [`XAttnForConditionalGeneration`] or
    an [`XAttnModel`], here and below.
    """
    vision, tower = model.config.vision_config, model.base_model.vision_tower
    if vision is None or tower is None:
        return None
    blank = blank_image(vision, tower.device, tower.dtype)
    with torch.no_grad():
        return model.base_model.image_encoder.features(*blank).shape[2]


def key_value_bytes_per_token(config: CrossAttentionConfig, num_blocks: int, dtype: torch.dtype) -> int:
    """Returns the bytes of the keys and values of one image token, summed over all blocks."""
    return 2 * num_blocks * config.num_key_value_heads * config.head_dim * dtype.itemsize


def flops_per_text_token(config: CrossAttentionConfig, num_blocks: int, num_image_tokens: int) -> int:
    """Returns the floating point operations that the blocks add to one text token.

    A multiply-add counts as 2 operations. The K/V projections are not counted: they run once for each image.
    """
    query_size = config.num_attention_heads * config.head_dim
    projections = 2 * 2 * config.hidden_size * query_size
    attention = 2 * 2 * query_size * num_image_tokens
    matrices = 3 if config.mlp_type == "gated" else 2
    mlp = 2 * matrices * config.hidden_size * config.intermediate_size
    return num_blocks * (projections + attention + mlp)


def describe(model: Any) -> dict[str, Any]:
    """Returns the figures of a model by name, ready to print."""
    config, block = model.config, model.config.cross_attention_config
    layers, tower = config.cross_attention_layers, config.vision_config
    added = sum(_num_parameters(block_) for block_ in model.blocks)
    text = _num_parameters(model.base_model.text_model) - added
    vision, connector = _num_parameters(model.base_model.vision_tower), _num_parameters(model.base_model.connector)
    dtype = block_dtype(model)
    tokens = tokens_per_image(model)
    per_token = key_value_bytes_per_token(block, len(layers), dtype)
    heads = f"{block.num_attention_heads}/{block.num_key_value_heads} heads of {block.head_dim}"
    figures: dict[str, Any] = {
        "text decoder": f"{config.text_config.model_type}, {text:,} parameters",
        "vision tower": "none" if tower is None else f"{tower.model_type}, {vision:,} parameters",
        "blocks in front of layers": ", ".join(map(str, layers)),
        "block": f"{heads}, context {block.context_size}, {block.norm_type}, gate {block.gate}",
        "parameters added (blocks)": f"{added:,}",
        "parameters added (connector)": f"{connector:,}",
        "parameters of the base, frozen": f"{text + vision:,}",
        "K/V bytes an image token": f"{per_token:,} ({str(dtype).removeprefix('torch.')})",
    }
    if tokens is not None:
        figures["tokens an image"] = f"{tokens:,}"
        figures["K/V bytes an image"] = f"{tokens * per_token:,}"
        figures["compute added a text token"] = (
            f"{flops_per_text_token(block, len(layers), tokens):,} FLOP with one image"
        )
    else:
        figures["compute added a text token"] = (
            f"{flops_per_text_token(block, len(layers), 0):,} FLOP, and "
            f"{flops_per_text_token(block, len(layers), 1) - flops_per_text_token(block, len(layers), 0):,} an image token"
        )
    return figures


def is_fresh(model: Any) -> bool:
    """Whether the blocks certainly add nothing, because they are as initialised. False if their weights cannot be read."""
    config = model.config.cross_attention_config
    if not config.starts_at_identity:
        return False
    last = [module for block in model.blocks for module in (block.attn.o_proj, block.mlp.down_proj)]
    if config.zero_init:
        weights = [module.weight for module in last]
    else:
        weights = [gate for block in model.blocks for gate in (block.attn_gate, block.mlp_gate)]
    # Sharded weights would have to be gathered by all processes, and an adapter beside a projection adds to its zeros.
    whole = all(type(weight) is nn.Parameter and not weight.is_meta and weight.numel() for weight in weights)
    return whole and all(type(module) is nn.Linear for module in last) and not any(bool(each.any()) for each in weights)


def blindness(model: Any) -> str | None:
    """Returns a sentence on why a model sees nothing yet: it has no vision tower, or its blocks are fresh. None if it may see."""
    fresh = is_fresh(model)
    if model.config.vision_config is None:
        untrained = " They are untrained and see nothing yet." if fresh else ""
        return f"The model is blind: it has no vision tower. Its blocks read features (`cross_attention_states`).{untrained}"
    return "The blocks are untrained: they see nothing yet, and pictures change no answer." if fresh else None


def _num_parameters(module: nn.Module | None) -> int:
    return 0 if module is None else sum(parameter.numel() for parameter in module.parameters())


def block_dtype(model: Any) -> torch.dtype:
    """Returns the dtype of the keys and values, which is the dtype of the key projection."""
    return model.blocks[0].attn.k_proj.weight.dtype
