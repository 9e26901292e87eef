"""Several processes that run one model. Their collective operations must match, so all must call the same modules."""

from __future__ import annotations

from typing import Any

import torch


def is_distributed() -> bool:
    return (
        torch.distributed.is_available()
        and torch.distributed.is_initialized()
        and torch.distributed.get_world_size() > 1
    )


def gathered_weights(model: Any) -> dict[str, torch.Tensor] | None:
    """The whole weights of a model that `fully_shard` (FSDP2) has sharded, on the CPU of the first process; empty on the others.

    All processes must call this. Models that transformers has sharded gather their weights themselves.

    Returns:
        `dict`, or None for a model whose weights are whole.

    Raises:
        ValueError: for a model in FSDP's wrapper (`FullyShardedDataParallel`), which alone can gather them.
    """
    if not torch.distributed.is_available() or getattr(model.config, "distributed_config", None) is not None:
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
