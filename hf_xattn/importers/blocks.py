"""Loads cross-attention blocks from a state dict, which holds neither a whole text model nor a vision tower."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import PreTrainedConfig, PreTrainedModel

from ..configuration_xattn import CrossAttentionConfig, XAttnConfig
from ..decoders.decoder import find_decoder
from ..images.connector import XAttnConnector
from ..layers.block import GatedCrossAttentionBlock
from ..modeling_xattn import XAttnForConditionalGeneration
from ..utils.checkpoint_files import read_headers
from .conversion import block_names, check_names, check_shape


def shape_of(state: dict[str, torch.Tensor], name: str) -> tuple[int, ...]:
    """Returns the shape of a tensor. Raises a `ValueError` if there is no tensor of that name."""
    if name not in state:
        raise ValueError(f"`state_dict` holds no {name}.")
    return tuple(state[name].shape)


# Parts of names that FSDP, DDP, torch.compile and activation checkpointing add.
WRAPPERS = r"^module\.|(?:^|(?<=\.))(?:_fsdp_wrapped_module|_checkpoint_wrapped_module|_orig_mod)\."
# Buffers that older releases of transformers saved.
OLD_BUFFERS = r".+\.(?:rotary_emb\.inv_freq|(?:attn|attention)\.(?:bias|masked_bias))"


def unwrapped(state_dict: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Renames the tensors of a wrapped model (FSDP, DDP, ...) to the names of the model without the wrappers."""
    return {re.sub(WRAPPERS, "", name): tensor for name, tensor in state_dict.items()}


def read_state_dict(file: str | Path) -> dict[str, torch.Tensor]:
    """Reads a state dict from a .safetensors file or a file of `torch.save`. No code in the file runs.

    Raises:
        pickle.UnpicklingError: for a file of `torch.save` that holds code or is damaged, among other errors of torch.
        ValueError: for a file that holds something else than a state dict of tensors.
    """
    path = Path(file)
    if path.suffix == ".safetensors":
        read_headers([path], {}, where=str(path.parent))
        return load_file(file)
    state = torch.load(file, map_location="cpu", weights_only=True)
    inner = state
    while inner is not None:
        state = inner
        keys = ("model_state_dict", "state_dict", "model") if isinstance(state, dict) else ()
        inner = next((state[key] for key in keys if key in state), None)
    if not isinstance(state, dict) or not all(isinstance(tensor, torch.Tensor) for tensor in state.values()):
        raise ValueError(f"{file} holds no state dict of tensors.")
    return state


def language_weights(
    text: PreTrainedModel, state: dict[str, torch.Tensor]
) -> tuple[dict[str, torch.Tensor], PreTrainedConfig]:
    """Checks the weights of a text model that a state dict holds.

    Returns:
        the weights, and the configuration of `text` with as many embeddings as the state dict has.

    Raises:
        ValueError: for names that `text` does not have, and for shapes that differ in more than the vocabulary size.
    """
    own, everything = dict(text.named_parameters(remove_duplicate=False)), text.state_dict()
    # Tensors with one row for each token: the embedding, and the head with its bias (GPT-J has one).
    tables = {
        weight.data_ptr()
        for part in (text.get_input_embeddings(), text.get_output_embeddings())
        if part is not None
        for weight in part.parameters()
    }
    taken, sizes = {}, set()
    found: dict[int, tuple[str, torch.Tensor]] = {}
    for name, tensor in state.items():
        is_old_buffer = name not in own and re.fullmatch(OLD_BUFFERS, name) is not None
        if name not in everything and not is_old_buffer:
            raise ValueError(f"`state_dict` holds {name}, which `text` ({type(text).__name__}) does not have.")
        if is_old_buffer or (name not in own and not everything[name].is_floating_point()):
            continue  # a buffer that is computed. Others are learned without a gradient, such as the balance of experts
        there = everything[name]
        grows = there.data_ptr() in tables
        if not tensor.is_floating_point():
            raise ValueError(f"`state_dict` holds {name} of dtype {tensor.dtype}: expected floating-point weights.")
        if tensor.shape[grows:] != there.shape[grows:]:
            raise ValueError(
                f"`state_dict` holds {name} of shape {tuple(tensor.shape)}, but `text` ({type(text).__name__}) has "
                f"shape {tuple(there.shape)}. The state dict belongs to another text model: pass that one."
            )
        other, first = found.setdefault(there.data_ptr(), (name, tensor))
        if first is not tensor and not torch.equal(first, tensor):
            raise ValueError(
                f"`state_dict` holds {name} with other values than {other}, but `text` ties them. Load `text` with "
                "`tie_word_embeddings=False`."
            )
        if grows:
            sizes.add(tensor.shape[0])
        taken[name] = tensor
    if len(sizes) > 1:
        raise ValueError(f"`state_dict` holds embeddings and a head of {sorted(sizes)} tokens, expected one size.")
    config = copy.deepcopy(text.config)
    if sizes:
        config.vocab_size = sizes.pop()
    return taken, config


def block_tensors(text: PreTrainedModel, blocks: dict[int, dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Returns the tensors of blocks under their parameter names in the model.

    Args:
        blocks: the state dict of each block, by the layer that the block stands in front of.
    """
    return {
        f"{place}.{name}": tensor
        for place, block in zip(_block_names(text, list(blocks)), blocks.values())
        for name, tensor in block.items()
    }


def check_parts(config: XAttnConfig, text: PreTrainedModel, parts: dict[str, torch.Tensor]) -> None:
    """Checks, before a model is built, that tensors are exactly those of its blocks and its connector.

    Args:
        parts: the tensors, by parameter name. A model without a vision tower has no connector.

    Raises:
        ValueError: for tensors that are missing, unknown, or of a wrong shape.
    """
    modules: dict[str, torch.nn.Module] = {}
    with torch.device("meta"):
        if config.vision_config is not None:
            modules["model.connector"] = XAttnConnector(config)
        block = GatedCrossAttentionBlock(config.cross_attention_config, layer_idx=0)
    modules |= dict.fromkeys(_block_names(text, config.cross_attention_layers), block)
    expected = {
        f"{prefix}.{name}": tuple(parameter.shape)
        for prefix, module in modules.items()
        for name, parameter in module.named_parameters()
    }
    check_names("`state_dict`", parts, expected)
    for name, tensor in parts.items():
        if not tensor.is_floating_point():
            raise ValueError(f"`state_dict`: expected floating-point weights for {name}, got {tensor.dtype}.")
        check_shape("`state_dict`", name, tuple(tensor.shape), expected[name])


def add_once(block: dict[str, torch.Tensor], key: str, tensor: torch.Tensor, name: str) -> None:
    """Adds a tensor to its block. Raises a `ValueError` if the block has other values under that name already."""
    other = block.setdefault(key, tensor)
    if other is not tensor and (other.shape != tensor.shape or not torch.equal(other, tensor.to(other))):
        raise ValueError(f"`state_dict` holds {name} and a tensor of the same block with other values, for {key}.")


@torch.no_grad()
def load_parts(model: XAttnForConditionalGeneration, parts: dict[str, torch.Tensor]) -> None:
    """Copies tensors into the model, by parameter name. Shapes may differ by axes of size 1."""
    own = model.state_dict()
    for name, tensor in parts.items():
        own[name].copy_(tensor.reshape(own[name].shape))


def block_options(
    state: dict[str, torch.Tensor], names: dict[str, str], num_heads: int, head_dim: int, **options: Any
) -> CrossAttentionConfig:
    """Makes a [`CrossAttentionConfig`] from the shapes of a block's tensors.

    The shapes give only the product of the number and the width of the heads, so both are arguments.

    Args:
        names: names of the weights of the projections, by `q`, `k` and `down`.
        options: further fields of the configuration.

    Raises:
        ValueError: if the heads do not fit the shapes.
    """
    inner, hidden = shape_of(state, names["q"])
    keys, context = shape_of(state, names["k"])
    keys //= options.pop("keys_and_values", 1)
    if inner != num_heads * head_dim or keys % head_dim:
        raise ValueError(
            f"`num_attention_heads` ({num_heads}) of width {head_dim} do not fit the {inner} query rows and {keys} key "
            "rows of `state_dict`."
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


def _block_names(text: PreTrainedModel, places: list[int]) -> list[str]:
    _, layers = find_decoder(text)
    stack = next(name for name, module in text.named_modules() if module is layers)
    return block_names(f"model.text_model.{stack}", places, len(layers))
