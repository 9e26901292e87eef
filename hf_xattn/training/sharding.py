"""The parts of a model that FSDP2 shards one by one."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..decoders.activation_wrappers import WRAPPED, unwrapped
from ..learning.no_split import names_of_units
from .freezing import body_of


def sharding_units(model: Any) -> list[nn.Module]:
    """Returns the modules that FSDP2 shards one by one, for runs without accelerate, which finds them by itself.

    ```python
    for unit in hf_xattn.sharding_units(model):
        fully_shard(unit)
    fully_shard(model)  # the rest: embeddings and head
    ```

    These are the decoder's layers, each with its block, the layers of the vision tower, the tower and the connector. In half precision,
    gates and norms are float32, and FSDP2 wants one dtype in a unit: then the projections of a block are units of their own, too.

    Args:
        model ([`XAttnForConditionalGeneration`] or [`XAttnModel`]): the model, also inside PEFT's wrapper.

    Returns:
        `list[nn.Module]`: modules of `model`, those inside others first. Of a layer in a checkpoint wrapper, the wrapper.

    Raises:
        TypeError: for a model of another kind.
    """
    inner: Any = model.get_base_model() if hasattr(model, "get_base_model") else model
    body_of(inner)
    names = names_of_units(inner)
    modules: list[nn.Module] = list(inner.modules())
    inside = {id(module._modules[WRAPPED]) for module in modules if WRAPPED in module._modules}
    return [
        module for module in reversed(modules) if id(module) not in inside and type(unwrapped(module)).__name__ in names
    ]


__all__ = ["sharding_units"]
