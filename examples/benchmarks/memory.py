"""Memory of a training step, from the profiler's own records of allocations."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from timing import DEVICE


class Memory(NamedTuple):
    """Bytes beyond those that were allocated before the step: weights, and gradients that exist.

    Attributes:
        kept (`int`): still allocated between forward and backward: activations, and what the caller holds.
        peak (`int`): the most at any time of the step.
    """

    kept: int
    peak: int


def memory_of(forward: Callable[[], torch.Tensor]) -> Memory:
    """Runs forward and backward, and measures their memory. The first of two steps allocates the gradients, which do
    not count.

    Args:
        forward (`Callable`): returns the loss.
    """
    forward().backward()
    with Records() as before:
        loss = forward()
    with Records() as after:
        loss.backward()
    return Memory(before.live, max(before.peak, before.live + after.peak))


class Records:
    """Bytes that the code inside allocates: those that are left at the end, and the most at any time."""

    live = peak = 0

    def __enter__(self) -> Records:
        if DEVICE == "cuda":
            torch.cuda.reset_peak_memory_stats()
            self._start = torch.cuda.memory_allocated()
        else:
            activities = [torch.profiler.ProfilerActivity.CPU]
            self._profile = torch.profiler.profile(profile_memory=True, activities=activities)
            self._profile.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        if DEVICE == "cuda":
            torch.cuda.synchronize()
            self.live = torch.cuda.memory_allocated() - self._start
            self.peak = torch.cuda.max_memory_allocated() - self._start
            return
        self._profile.__exit__(None, None, None)
        events = self._profile.profiler.kineto_results.events()
        for event in sorted(events, key=lambda event: event.start_ns()):
            if event.name() == "[memory]":
                self.live += event.nbytes()
                self.peak = max(self.peak, self.live)
