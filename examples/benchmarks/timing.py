"""Times runs that take turns, in another order each time."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence

import torch


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def seconds(runs: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Median time of each run, the runs taking turns.

    The order changes, because a run leaves the processor's cache and the allocator to the next one. In a fixed order,
    that one would be slow or fast every time.
    """
    times: dict[str, list[float]] = {name: [] for name in runs}
    order, shuffle = list(runs), random.Random(0).shuffle
    for repeat in range(repeats + 1):
        shuffle(order)
        for name in order:
            _synchronize()
            start = time.perf_counter()
            runs[name]()
            _synchronize()
            if repeat:  # the first round warms up
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def recorded(calls: Sequence[Callable[[], object]]) -> Callable[[], object]:
    """One run of all calls. On a GPU they are a CUDA graph: launching a short kernel takes longer than the kernel."""
    if DEVICE != "cuda":
        return lambda: [call() for call in calls]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # warms up: nothing may be compiled or loaded while a graph is recorded
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph.replay


def _synchronize() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()
