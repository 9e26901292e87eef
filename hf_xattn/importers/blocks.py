"""State dicts of cross-attention blocks, for families whose text decoder and vision tower are checkpoints of their own."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from ..configuration_xattn import CrossAttentionConfig
from ..insertion import find_decoder
from ..modeling_xattn import XAttnForConditionalGeneration
from .recipe import fits


def shape_of(state: dict[str, torch.Tensor], name: str) -> tuple[int, ...]:
    """Shape of a tensor.

    Raises:
        ValueError: where it is not there.
    """
    if name not in state:
        raise ValueError(f"`state_dict` holds no {name}.")
    return tuple(state[name].shape)


def load_parts(model: XAttnForConditionalGeneration, parts: dict[str, torch.Tensor], prefixes: tuple[str, ...]) -> None:
    """Puts tensors into a model, all or none.

    Args:
        model ([`XAttnForConditionalGeneration`]): changed in place.
        parts (`dict[str, torch.Tensor]`): by name in the model.
        prefixes (`tuple[str, ...]`): parts of names; everything in the model that has one of them must be there.

    Raises:
        ValueError: for missing, unknown or misshapen tensors, before anything is changed.
    """
    own = dict(model.named_parameters())
    if unknown := sorted(set(parts) - set(own)):
        raise ValueError(f"`state_dict` holds more than the model takes: nothing is called {unknown[0]}.")
    expected = {name for name in own if any(prefix in name for prefix in prefixes)}
    if missing := sorted(expected - set(parts)):
        raise ValueError(f"`state_dict` is not complete: nothing becomes {missing[0]} ({len(missing)} missing).")
    for name, tensor in parts.items():
        if not fits(tuple(tensor.shape), tuple(own[name].shape)):
            raise ValueError(
                f"`state_dict`: what becomes {name} has shape {tuple(tensor.shape)}, expected {tuple(own[name].shape)}."
            )
    with torch.no_grad():
        for name, tensor in parts.items():
            own[name].copy_(tensor.reshape(own[name].shape))


def block_options(state: dict[str, torch.Tensor], names: dict[str, str], num_heads: int, head_dim: int, **options: Any):
    """A [`CrossAttentionConfig`] from the shapes of one block's tensors.

    Args:
        state (`dict[str, torch.Tensor]`): tensors of the block.
        names (`dict[str, str]`): what its projections are called: `q`, `k`, `down`.
        num_heads, head_dim (`int`): shapes tell only their product.
        options: further fields.

    Raises:
        ValueError: where heads and shapes do not agree.
    """
    inner, hidden = shape_of(state, names["q"])
    keys, context = shape_of(state, names["k"])
    keys //= options.pop("keys_and_values", 1)
    if inner != num_heads * head_dim or keys % head_dim:
        raise ValueError(
            f"`num_attention_heads` ({num_heads}) of width {head_dim} do not make the {inner} query and {keys} key rows of "
            "`state_dict`."
        )
    return CrossAttentionConfig(
        hidden_size=hidden,
        context_size=context,
        num_attention_heads=num_heads,
        num_key_value_heads=keys // head_dim,
        head_dim=head_dim,
        intermediate_size=shape_of(state, names["down"])[1],
        **options,
    )


def stack_of(text: PreTrainedModel) -> tuple[str, int]:
    """Name and length of the stack of layers."""
    _, layers = find_decoder(text)
    return next(name for name, module in text.named_modules() if module is layers), len(layers)
