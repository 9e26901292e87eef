"""Which of several processes this one is, as `torchrun`, `accelerate launch` or MPI say it in the environment."""

from __future__ import annotations

import os
from typing import Any


RANKS = ("RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK")
SIZES = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
# What a run says if `is_lone_on_cpu`.
ALONE = (
    "One process trains: `accelerate launch --cpu` starts several only through MPI (`--mpirun_hostfile`). Use "
    "`accelerate launch --multi_gpu --num_processes N` or `torchrun --nproc-per-node N`, with `--device cpu`."
)


def num_processes() -> int:
    return _first(SIZES, 1)


def is_first_process() -> bool:
    return _first(RANKS, 0) == 0


def gpus_of_a_process(device: str) -> int:
    """How many batches `Trainer` splits between the GPUs of this process (`DataParallel`); 1 without GPUs."""
    import torch

    alone = num_processes() == 1 and device != "cpu"
    return max(1, torch.cuda.device_count()) if alone else 1


def say(text: Any) -> None:
    """Prints in the first process only."""
    if is_first_process():
        print(text, flush=True)


def quiet_other_processes() -> None:
    """Stops transformers' warnings and progress bars in all processes but the first. Errors are still raised."""
    if not is_first_process():
        from transformers.utils import logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()


def is_lone_on_cpu() -> bool:
    """Whether `accelerate launch --cpu --num_processes N` has started one process, for want of MPI."""
    of_accelerate = os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes")
    launched = of_accelerate and "MASTER_PORT" in os.environ
    return launched and not any(name in os.environ for name in (*RANKS, *SIZES))


def _first(names: tuple[str, ...], default: int) -> int:
    return next((int(os.environ[name]) for name in names if os.environ.get(name)), default)
