"""Helpers for several processes that run one model.

The collective operations of the processes must match, so all of them must call the same modules.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

import torch
from torch import nn
from transformers import PreTrainedModel


Method = TypeVar("Method", bound=Callable[..., Any])


def is_distributed() -> bool:
    found = torch.distributed
    return found.is_available() and found.is_initialized() and found.get_world_size() > 1


def has_units(module: nn.Module | None) -> bool:
    """Whether FSDP gathers the weights of parts of a module when they run. All processes must then run these parts."""
    if module is None or not torch.distributed.is_available():
        return False
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    return any(isinstance(part, (FSDPModule, FullyShardedDataParallel)) for part in module.modules())


def fsdp_forward(method: Method) -> Method:
    """Decorates a method that computes with the weights of a model, so that FSDP gathers them as for `forward`."""
    name = method.__name__

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if is_distributed() and name not in self.__dict__:
            from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method

            if isinstance(self, FSDPModule):
                register_fsdp_forward_method(cast(Any, self), name)
                return getattr(self, name)(*args, **kwargs)
        return method(self, *args, **kwargs)

    return cast(Method, call)


def check_callable(name: str, module: nn.Module) -> None:
    """Raises a `ValueError` if the weights of a module are sharded and a call of the module does not gather them."""
    weight = next(module.parameters(), None)
    if weight is None or not is_split(weight):
        return
    from torch.distributed.fsdp import FSDPModule

    if not isinstance(module, FSDPModule):
        raise ValueError(
            f"Expected `{name}` to be a unit of FSDP, because it is called outside of the model's `forward`, got "
            "weights that are sharded with the rest. Call `fully_shard` on each of `hf_xattn.sharding_units(model)`."
        )


def is_split(weight: torch.Tensor) -> bool:
    """Whether this process holds only a part of a weight (FSDP2, tensor parallelism)."""
    return getattr(weight, "device_mesh", None) is not None


def compute_device(weight: torch.Tensor) -> torch.device:
    """Returns the device on which a weight is used. With CPU offload its shard is on the CPU in the meantime."""
    mesh = getattr(weight, "device_mesh", None)
    if mesh is None or mesh.device_type == "cpu":
        return weight.device
    return torch.device(mesh.device_type, torch.get_device_module(mesh.device_type).current_device())


def gathered_weights(model: nn.Module) -> dict[str, torch.Tensor] | None:
    """Gathers the weights of a sharded model (FSDP2, tensor parallelism) on the CPU of the first process.

    All processes must call this function.

    Returns:
        the whole weights in the first process, and an empty `dict` in the others. None for a model that is not sharded.

    Raises:
        ValueError: for a model in the wrapper `FullyShardedDataParallel`, which alone can gather its weights.
    """
    if not torch.distributed.is_available():
        return None
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.tensor import DTensor

    wrapped = any(isinstance(part, FullyShardedDataParallel) for part in model.modules())
    if wrapped or any(hasattr(weight, "_is_fsdp_flattened") for weight in model.parameters()):
        raise ValueError(
            "The weights of this model are sharded by `FullyShardedDataParallel`. Gather them in all processes, and "
            "pass them: `save_pretrained(folder, state_dict=accelerator.get_state_dict(model), "
            "is_main_process=accelerator.is_main_process)`."
        )
    if not any(isinstance(weight, DTensor) for weight in model.parameters()):
        return None
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    weights: Any = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    return weights


def is_sharded_by_transformers(model: PreTrainedModel) -> bool:
    """Whether the model was loaded with a `distributed_config`. transformers itself then gathers the weights."""
    return getattr(model.config, "distributed_config", None) is not None


@contextlib.contextmanager
def saved_by_one(model: PreTrainedModel) -> Iterator[None]:
    """Context in which transformers writes the weights that it is given, and neither gathers weights nor waits for
    other processes.
    """
    if not is_sharded_by_transformers(model):
        yield
        return
    config = model.config
    known, config.distributed_config = config.distributed_config, None
    try:
        yield
    finally:
        config.distributed_config = known
