"""Inserts blocks into a decoder of vLLM, and prepares weights for vLLM.

Two kinds of weights need this: those of a decoder with additional tokens, and those of a folder that only holds what
was added to its bases (`adapter_only=True`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from transformers.core_model_loading import revert_weight_conversion

from ..checkpoints.adapters import PARTS, SmallCheckpoint
from ..configuration_xattn import XAttnConfig
from ..decoders.block_stack import blocks_at
from ..decoders.insertion import BLOCKS
from ..utils import memoized
from .served import Decoder


Weights = Iterable[tuple[str, torch.Tensor]]


@memoized
def crossing_class(layer_class: type[nn.Module]) -> type[nn.Module]:
    """Derives a class of layers that run their blocks before the layer itself.

    Most layers of vLLM get the hidden states in two parts, and add the second part, `residual`, to the first. The
    blocks read the sum. The layer itself then gets no `residual`, as the first layer of the decoder.
    """
    forward: Any = layer_class.forward
    names = list(inspect.signature(forward).parameters)[1:]
    if "hidden_states" not in names:
        raise ValueError(
            f"Expected layers with an argument `hidden_states`, got {layer_class.__name__} of this vLLM with {names}."
        )
    first = names.index("hidden_states")
    second = names.index("residual") if "residual" in names else None

    def crossing_forward(self, *args, **kwargs):
        before, after = (self._modules.get(name) for name in BLOCKS)
        if before is not None:
            hidden_states = args[first] if len(args) > first else kwargs["hidden_states"]
            residual = None
            if second is not None:
                residual = args[second] if len(args) > second else kwargs.get("residual")
            if residual is not None:
                hidden_states = hidden_states + residual
            args, kwargs = _with(args, kwargs, first, "hidden_states", before(hidden_states))
            if second is not None:
                args, kwargs = _with(args, kwargs, second, "residual", None)
        output = forward(self, *args, **kwargs)
        if after is None:
            return output
        if not isinstance(output, tuple):
            return after(output)
        if second is None:
            return (after(output[0]), *output[1:])
        summed = after(output[0] + output[1])
        return (summed, torch.zeros_like(summed), *output[2:])

    return type(f"Crossing{layer_class.__name__}", (layer_class,), {"forward": crossing_forward})


def _with(args: tuple, kwargs: dict[str, Any], place: int, name: str, value: Any) -> tuple[tuple, dict[str, Any]]:
    """Returns the arguments of a call, in which one argument has another value."""
    if len(args) > place:
        return (*args[:place], value, *args[place + 1 :]), kwargs
    return args, {**kwargs, name: value}


def insert(decoder: nn.Module, served: Decoder, config: XAttnConfig, make_block: Callable[[int], nn.Module]) -> None:
    """Inserts the blocks of a model into the layers of a decoder, in place. `make_block` takes the index of a block."""
    layers = decoder.get_submodule(served.layers)
    for index, layer in enumerate(layers.children()):
        places = [index] if index < len(layers) - 1 else [index, index + 1]  # type: ignore[arg-type]
        found = False
        for name, place in zip(BLOCKS, places):
            blocks = [make_block(each) for each in blocks_at(config.cross_attention_layers, place)]
            if blocks:
                layer.add_module(name, nn.Sequential(*blocks))
                found = True
        if found:
            layer.__class__ = crossing_class(type(layer))


def block_weight(name: str) -> str | None:
    """Returns the name that a block's weight has after [`insert`]. None for a weight that does not belong to a block.

    In a checkpoint, the name has no number if there is one block at a place.
    """
    for kind in BLOCKS:
        before, found, rest = name.partition(f".{kind}.")
        if found:
            return name if rest.split(".")[0].isdigit() else f"{before}.{kind}.0.{rest}"
    return None


def with_additional(weights: Weights, served: Decoder, added: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Appends the rows of added tokens to the embedding and to the head, because vLLM keeps each in one tensor.

    Args:
        weights: names and tensors of the decoder.
        served ([`Decoder`]): where the decoder has its embedding and its head.
        added (`int`): `additional_vocab_size`. If the head has no rows for the added tokens, these rows are zeros, and
            `XAttnForVLLM.compute_logits` hides their logits.
    """
    if not added:
        yield from weights
        return
    held: dict[str, torch.Tensor] = {}
    for name, weight in weights:
        if name.startswith((f"{served.embedding}.", f"{served.head}.")):
            held[name] = weight
        else:
            yield name, weight
    for name, weight in held.items():
        if ".additional." not in name:
            stem, kind = name.rsplit(".", 1)
            more = held.get(f"{stem}.additional.{kind}")
            yield name, torch.cat([weight, weight.new_zeros(added, *weight.shape[1:]) if more is None else more])


def weights_of_folder(name: str, revision: str | None) -> Iterator[tuple[str, torch.Tensor]] | None:
    """Returns all weights of an `adapter_only=True` folder, with the names of a whole folder. None for other folders.

    Raises:
        ValueError, OSError: if a base is missing, cannot be loaded or has other weights, or if the folder is damaged.
    """
    saved = SmallCheckpoint.find(name, {"revision": revision})
    return None if saved is None else _weights(saved)


def _weights(saved: SmallCheckpoint) -> Iterator[tuple[str, torch.Tensor]]:
    added = saved.added()
    for _, argument, load in PARTS:
        record: Any = saved.manifest.get(argument)
        if record is None:
            continue
        base, prefix = saved.base(argument, load, None, {}), record["prefix"]
        weights = saved.kept(argument, base)
        for name in list(added):
            own = name.removeprefix(prefix)
            if own != name and own in weights:
                weights[own] = added.pop(name)
        # vLLM expects the names on disk. In memory, transformers holds all experts of a layer in one tensor.
        for name, weight in revert_weight_conversion(base, weights).items():
            yield prefix + name, weight
    yield from added.items()
