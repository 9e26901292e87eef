"""Checks whether several processes run the model. Their collective operations must match, so all must call the same modules."""

from __future__ import annotations

import torch


def is_distributed() -> bool:
    return (
        torch.distributed.is_available()
        and torch.distributed.is_initialized()
        and torch.distributed.get_world_size() > 1
    )
