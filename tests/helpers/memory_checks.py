"""Memory of this process, and new memory that holds NaN."""

import contextlib

import torch


@contextlib.contextmanager
def memory_of_nan():
    """New memory holds NaN, so that a value that nobody writes is seen."""
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.utils.deterministic.fill_uninitialized_memory and torch.empty(3).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(False)
