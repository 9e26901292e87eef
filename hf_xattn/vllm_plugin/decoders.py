"""Puts blocks into a decoder of vLLM, and finds the weights: of a decoder with additional tokens, and of a folder that
holds only what was added to its bases (`adapter_only=True`).
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
    """Derives the class of a layer that runs its blocks first.

    Most layers of vLLM take the hidden states in two parts, of which the second, `residual`, is to be added first. The
    blocks read the sum, and the layer then starts as the first layer does: without a second part.
    """
    forward: Any = layer_class.forward
    names = list(inspect.signature(forward).parameters)[1:]
    if "hidden_states" not in names:
        raise ValueError(f"{layer_class.__name__} of this vLLM has no argument `hidden_states`: {names}.")
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
    """The arguments of a call, with another value of one."""
    if len(args) > place:
        return (*args[:place], value, *args[place + 1 :]), kwargs
    return args, {**kwargs, name: value}


def insert(decoder: nn.Module, served: Decoder, config: XAttnConfig, make_block: Callable[[int], nn.Module]) -> None:
    """Puts the blocks of a model into the layers of a decoder, in place. `make_block` takes a block's index."""
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
    """The name of a block's weight in [`insert`]'s modules, or None for another weight. One block has no number."""
    for kind in BLOCKS:
        before, found, rest = name.partition(f".{kind}.")
        if found:
            return name if rest.split(".")[0].isdigit() else f"{before}.{kind}.0.{rest}"
    return None


def with_additional(weights: Weights, served: Decoder, added: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Joins the rows of added tokens to those of the embedding and the head, which vLLM keeps in one tensor.

    Args:
        added (`int`): `additional_vocab_size`. A head without rows for them gets zeros: [`mask_added`] hides them.
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
    """All weights of such a model, under the names of a whole folder. None for any other folder.

    Raises:
        ValueError, OSError: for a base that is gone, cannot be loaded or is another one, and a damaged folder.
    """
    saved = SmallCheckpoint.find(name, {} if revision is None else {"revision": revision})
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
        # Under the names on disk: transformers holds the experts of a layer in one tensor.
        for name, weight in revert_weight_conversion(base, weights).items():
            yield prefix + name, weight
    yield from added.items()
