"""Several processes that run one model. Their collective operations must match, so all must call the same modules."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch


def is_distributed() -> bool:
    return (
        torch.distributed.is_available()
        and torch.distributed.is_initialized()
        and torch.distributed.get_world_size() > 1
    )


def gathered_weights(model: Any) -> dict[str, torch.Tensor] | None:
    """The whole weights of a model that is sharded (FSDP2, tensor parallelism), on the CPU of the first process; empty on the others.

    All processes must call this.

    Returns:
        `dict`, or None for a model whose weights are whole.

    Raises:
        ValueError: for a model in FSDP's wrapper (`FullyShardedDataParallel`), which alone can gather them.
    """
    if not torch.distributed.is_available():
        return None
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.tensor import DTensor

    wrapped = any(isinstance(part, FullyShardedDataParallel) for part in model.modules())
    if wrapped or any(hasattr(weight, "_is_fsdp_flattened") for weight in model.parameters()):
        raise ValueError(
            "The weights of this model are sharded by `FullyShardedDataParallel`. Gather them in all processes, and pass them: "
            "`save_pretrained(folder, state_dict=accelerator.get_state_dict(model), is_main_process=accelerator.is_main_process)`."
        )
    if not any(isinstance(weight, DTensor) for weight in model.parameters()):
        return None
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    weights: Any = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    return weights


def is_sharded_by_transformers(model: Any) -> bool:
    """Whether the model was loaded with a `distributed_config`. transformers then gathers its weights when it saves it."""
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
