"""Which of several processes this one is, as `torchrun`, `accelerate launch` or MPI say it in the environment."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from ..utils.tensor_checks import is_quantized


Made = TypeVar("Made")


def num_processes() -> int:
    return _as_launched().world_size


def is_first_process() -> bool:
    return _as_launched().rank == 0


def _as_launched() -> Any:
    """Rank and number of processes, as the launcher has set them, also for GPUs."""
    from accelerate.utils import get_cpu_distributed_information  # an environment of vLLM has no accelerate

    return get_cpu_distributed_information()


def gpus_of_a_process(device: str) -> int:
    """How many batches `Trainer` splits between the GPUs of this process (`DataParallel`); 1 without GPUs."""
    alone = num_processes() == 1 and device != "cpu"
    return max(1, torch.cuda.device_count()) if alone else 1


def say(text: Any) -> None:
    """Prints in the first process only."""
    if is_first_process():
        print(text, flush=True)


def on_device(model: Any, device: torch.device, function: Callable[[], Made]) -> Made:
    """Calls a function with a model on a device, or where the model is if it does not fit there. It is then where it
    was. Quantized weights stay on their device.
    """
    home = model.device
    if home.type != "cpu" or device.type == "cpu" or any(map(is_quantized, model.parameters())):
        return function()
    try:
        model.to(device)
        return function()
    except torch.OutOfMemoryError:  # such as of a model that trains in shards
        say(f"The model does not fit into the memory of {device}, so the CPU does this.")
        model.to(home)
        return function()
    finally:
        model.to(home)
