"""Tells which of several processes this one is. `torchrun`, `accelerate launch` and MPI set it in the environment."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from ..utils.tensor_checks import is_quantized


if TYPE_CHECKING:
    from transformers import PreTrainedModel

Made = TypeVar("Made")


def num_processes() -> int:
    return _as_launched().world_size


def is_first_process() -> bool:
    return _as_launched().rank == 0


def _as_launched() -> Any:
    """Returns rank and number of processes, as the launcher has set them, for CPUs and GPUs."""
    # Imported here, because an environment for vLLM has no accelerate.
    from accelerate.utils import get_cpu_distributed_information

    return get_cpu_distributed_information()


def gpus_of_a_process(device: str) -> int:
    """Returns the number of GPUs on which `Trainer` runs this process (`DataParallel`), or 1 without a GPU."""
    alone = num_processes() == 1 and device != "cpu"
    return max(1, torch.cuda.device_count()) if alone else 1


def say(text: object) -> None:
    """Prints a text, in the first process only."""
    if is_first_process():
        print(text, flush=True)


def on_device(model: PreTrainedModel, device: torch.device, function: Callable[[], Made]) -> Made:
    """Calls a function while a model is on a device, and moves the model back afterwards.

    If the model does not fit into the memory of the device, the function is called where the model is. A model with
    quantized weights is not moved.
    """
    moved: Any = model  # mypy does not know that `model.to` takes a device
    home = model.device
    if home.type != "cpu" or device.type == "cpu" or any(map(is_quantized, model.parameters())):
        return function()
    try:
        moved.to(device)
        return function()
    except torch.OutOfMemoryError:  # for example if the run trains the model in shards
        say(f"The model does not fit into the memory of {device}, so this runs on the CPU.")
        moved.to(home)
        return function()
    finally:
        moved.to(home)
