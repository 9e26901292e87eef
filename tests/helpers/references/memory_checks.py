"""Memory of this process, and new memory that holds NaN."""

import contextlib
import gc
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import FakeTensor


@contextlib.contextmanager
def memory_of_nan():
    """New memory holds NaN, so that a value that nobody writes is seen."""
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.utils.deterministic.fill_uninitialized_memory and torch.empty(3).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(False)


STATUS = Path("/proc/self/status")


def tensors_alive():
    """Number and bytes of the tensors that anything in this process still holds."""
    gc.collect()
    tensors = (thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor))
    found = [tensor for tensor in tensors if not isinstance(tensor, FakeTensor)]  # without memory, of other tests
    return len(found), sum(tensor.untyped_storage().nbytes() for tensor in found if not tensor.is_meta)


def resident():
    """Bytes of memory of this process."""
    return next(int(line.split()[1]) for line in STATUS.read_text().splitlines() if line.startswith("VmRSS")) * 1024
