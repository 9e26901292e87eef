"""Times runs that take turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def seconds(runs: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Median time of each run, the runs taking turns."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for repeat in range(repeats + 1):
        for name, run in runs.items():
            _synchronize()
            start = time.perf_counter()
            run()
            _synchronize()
            if repeat:  # the first round warms up
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def _synchronize() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()
