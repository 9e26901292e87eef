"""Several processes that run one model. Their collective operations must match, so all must call the same modules."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

import torch
from torch import nn


Method = TypeVar("Method", bound=Callable[..., Any])


def is_distributed() -> bool:
    found = torch.distributed
    return found.is_available() and found.is_initialized() and found.get_world_size() > 1


def has_units(module: nn.Module | None) -> bool:
    """Whether FSDP gathers weights of a module when its parts run. All processes must then run them."""
    if module is None or not torch.distributed.is_available():
        return False
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    return any(isinstance(part, (FSDPModule, FullyShardedDataParallel)) for part in module.modules())


def fsdp_forward(method: Method) -> Method:
    """Decorates methods that compute with the weights of a model: FSDP gathers them, as it does for `forward`."""
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
    """Raises a `ValueError` if the weights of a module are sharded, and calling it does not gather them."""
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
    """Whether this process holds a part of a weight (FSDP2, tensor parallelism)."""
    return getattr(weight, "device_mesh", None) is not None


def compute_device(weight: torch.Tensor) -> torch.device:
    """The device that a weight is used on. The shard of a weight may wait on the CPU."""
    mesh = getattr(weight, "device_mesh", None)
    if mesh is None or mesh.device_type == "cpu":
        return weight.device
    return torch.device(mesh.device_type, torch.get_device_module(mesh.device_type).current_device())


def gathered_weights(model: Any) -> dict[str, torch.Tensor] | None:
    """The whole weights of a sharded model (FSDP2, tensor parallelism), on the CPU of the first process.

    All processes must call this. The others get an empty `dict`. None for a model whose weights are whole. Raises a
    `ValueError` for a model in FSDP's wrapper (`FullyShardedDataParallel`), which alone can gather them.
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


def is_sharded_by_transformers(model: Any) -> bool:
    """Whether the model was loaded with a `distributed_config`. transformers gathers its weights to save it."""
    return getattr(model.config, "distributed_config", None) is not None


@contextlib.contextmanager
def saved_by_one(model: Any) -> Iterator[None]:
    """Inside, transformers writes the weights that it is given: it gathers nothing and waits for no other process."""
    if not is_sharded_by_transformers(model):
        yield
        return
    config = model.config
    known, config.distributed_config = config.distributed_config, None
    try:
        yield
    finally:
        config.distributed_config = known
