"""Puts cross-attention blocks into the layers of a decoder.

A layer stays the same Python object. It gets one submodule, `cross_attention_block`, and a class that derives from its
old class. The derived `forward` takes one more keyword argument, runs the block (or several, see
`decoders/block_stack.py`), and calls the layer's own `forward`. So all parameters of the decoder keep their names. And
everything that treats a layer as one unit (device maps, FSDP, activation checkpointing, `torch.compile`) treats the
block as a part of the layer.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.utils import logging

from ..configuration_xattn import XAttnConfig
from ..layers.context import KEYWORD, CrossAttentionContext, ImageTokens, carried_context
from ..utils import memoized
from ..utils.architectures import architecture
from .block_stack import make_blocks, weight_of
from .decoder import find_cache_argument, find_decoder, layers_receive_keywords
from .derived import derive, is_derived


logger = logging.get_logger(__name__)

# Prefix of a derived class's name. FSDP policies and device maps find layers by this name.
PREFIX = "CrossAttending"

# Submodules of a layer: the block or blocks in front of the layer and, in the last layer only, those after the layer.
IN_FRONT, AFTER = BLOCKS = ("cross_attention_block", "cross_attention_block_after")

# The parts of a model that can be frozen separately, as keyword arguments of `freeze`, and the submodules of
# `XAttnModel` that hold them. The blocks are inside the text model, but they are a part of their own.
PARTS = ("text", "vision", "connector", "blocks")
ROOTS = {"text_model": "text", "vision_tower": "vision", "connector": "connector"}


@memoized
def cross_attending_class(layer_class: type[nn.Module], receives_keywords: bool) -> type[nn.Module]:
    """Derives the class of a decoder layer with a block in front. Equal arguments give the same class object.

    `receives_keywords` says whether the decoder passes keyword arguments to the layer. If it does not, the `__call__`
    of the layer fetches the context (see `layers/context.py`).
    """

    def forward(self, *args, **kwargs):
        context: CrossAttentionContext | ImageTokens | None = kwargs.pop(KEYWORD, None)
        block, after = self._modules.get(IN_FRONT), self._modules.get(AFTER)
        if context is None or (block is None and after is None):
            return layer_class.forward(self, *args, **kwargs)
        if isinstance(context, ImageTokens):
            in_front = () if block is None else block.encode(context)
            return in_front if after is None else (*in_front, *after.encode(context))
        if block is not None and args:
            args = (block(args[0], cross_attention=context), *args[1:])
        elif block is not None:
            kwargs["hidden_states"] = block(kwargs["hidden_states"], cross_attention=context)
        output = layer_class.forward(self, *args, **kwargs)
        if after is None:
            return output
        if isinstance(output, tuple):
            return (after(output[0], cross_attention=context), *output[1:])
        return after(output, cross_attention=context)

    def __call__(self, *args, **kwargs):
        if KEYWORD not in kwargs:
            kwargs[KEYWORD] = carried_context()
        return layer_class.__call__(self, *args, **kwargs)

    members: dict[str, Any] = {"forward": forward}
    if not receives_keywords:
        members["__call__"] = __call__
    return derive(layer_class, PREFIX, members, (cross_attending_class, layer_class, receives_keywords))


def is_cross_attending(layer: nn.Module) -> bool:
    """Whether a decoder layer was prepared by [`insert_blocks`]."""
    return is_derived(layer, PREFIX)


def check_kind(language_model: PreTrainedModel) -> None:
    """Checks the kind of a text model, but not its layers. [`check_insertable`] checks both.

    Raises:
        ValueError: for an encoder-decoder model, an architecture that is not supported, a model that already has
            blocks, or a model without a head.
    """
    config, name = language_model.config, _name(language_model)
    if config.is_encoder_decoder:
        raise ValueError(
            f"Expected a decoder-only model, got {name}, an encoder-decoder model with cross-attention of its own."
        )
    if reason := architecture(config.model_type).refused:
        raise ValueError(f"{name} cannot take cross-attention blocks: {reason}.")
    if config.model_type == "xattn" or any(is_cross_attending(module) for module in language_model.modules()):
        raise ValueError(f"{name} already has cross-attention blocks. Retrofit its text-only base instead.")
    if not language_model.can_generate() or language_model.get_output_embeddings() is None:
        raise ValueError(
            f"{name} is not a causal language model with a head. Load the checkpoint with `AutoModelForCausalLM`."
        )


def check_insertable(language_model: PreTrainedModel) -> None:
    """Checks that blocks can be inserted into a text model, and does not change it.

    Raises:
        ValueError: for a model of the wrong kind ([`check_kind`]), an encoder, a model without a stack of layers or
            without a cache of transformers, or a model with hooks of accelerate.
    """
    check_kind(language_model)
    config, name = language_model.config, _name(language_model)
    if getattr(config, "is_decoder", None) is False and hasattr(config, "add_cross_attention"):
        # BERT-like models attend in both directions unless `is_decoder=True`. GPT-2 has no such switch.
        decoder, _ = find_decoder(language_model)
        if type(decoder).__name__.endswith("Encoder"):
            raise ValueError(
                f"{name} is an encoder: its text attends in both directions. Use a decoder, or set `is_decoder=True`."
            )
    find_cache_argument(language_model)
    _, layers = find_decoder(language_model)
    hooked = [index for index, layer in enumerate(layers) if hasattr(layer, "_hf_hook")]
    if hooked:
        raise ValueError(
            f"{name} was dispatched with a device map: layers {hooked} have accelerate hooks. Retrofit the model "
            "without a device map, save it, and load the saved model with `device_map`."
        )


def _name(language_model: PreTrainedModel) -> str:
    return f"{type(language_model).__name__} (model_type {language_model.config.model_type!r})"


def insert_blocks(language_model: PreTrainedModel, config: XAttnConfig) -> list[str]:
    """Puts a block in front of each layer of `config.cross_attention_layers`, in place.

    If an index is repeated, the layer gets several blocks, one after the other. The number of layers, as an index,
    puts a block after the last layer. All layers get a derived class, also those without a block, because the original
    `forward` does not know the keyword argument with the images. LayerDrop (OPT, XGLM, BioGPT) is set to 0.

    Args:
        language_model (`PreTrainedModel`): A text model that passed [`check_insertable`].
        config ([`XAttnConfig`]): Configuration of the whole model.

    Returns:
        `list[str]`: class names of layers that must not be split across devices.
    """
    decoder, layers = find_decoder(language_model)
    if (layerdrop := getattr(decoder, "layerdrop", 0)) > 0:
        logger.warning(
            f"LayerDrop would skip layers with their blocks: `layerdrop` of {_name(language_model)} is 0 instead of "
            f"{layerdrop} while it has blocks. The configuration keeps its value."
        )
        # 0 is an integer, by which `checkpoints/removal.py` recognizes the change even after the model was pickled.
        decoder.layerdrop = 0  # type: ignore[assignment]
    receives_keywords = layers_receive_keywords(language_model)
    names = {type(layer).__name__ for layer in layers}
    for index, layer in enumerate(layers):
        parameter = weight_of(layer)
        places = [index] if index < len(layers) - 1 else [index, index + 1]
        for name, place in zip(BLOCKS, places):
            blocks = make_blocks(config, place, parameter, language_model.dtype)
            if blocks is not None:
                setattr(layer, name, blocks)
        layer.__class__ = cross_attending_class(type(layer), receives_keywords)
        names.add(type(layer).__name__)
    return sorted(names)


def part_of(name: str) -> str:
    """Returns the part that a weight belongs to, from its name in an [`XAttnModel`], which may hold PEFT's modules."""
    root, *rest = name.split(".")
    return "blocks" if any(each in BLOCKS for each in rest) else ROOTS[root]
