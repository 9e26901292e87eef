"""The weights of a folder that holds only what was added to its bases (`adapter_only=True`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from transformers.core_model_loading import revert_weight_conversion

from ..checkpoints.adapters import PARTS, SmallCheckpoint


def weights_of_folder(name: str, revision: str | None) -> Iterator[tuple[str, torch.Tensor]] | None:
    """All weights of such a model, under the names of a whole folder. None for any other folder.

    Raises:
        ValueError, OSError: for a base that is gone, cannot be loaded or is another one, and a damaged folder.
    """
    saved = SmallCheckpoint.find(name, {} if revision is None else {"revision": revision})
    return None if saved is None else _weights(saved)


def _weights(saved: SmallCheckpoint) -> Iterator[tuple[str, torch.Tensor]]:
    added = saved.added()
    for _, argument, load in PARTS:
        record: Any = saved.manifest.get(argument)
        if record is None:
            continue
        base, prefix = saved.base(argument, load, None, {}), record["prefix"]
        weights = saved.kept(argument, base)
        for name in list(added):
            own = name.removeprefix(prefix)
            if own != name and own in weights:
                weights[own] = added.pop(name)
        # Under the names on disk: transformers holds the experts of a layer in one tensor.
        for name, weight in revert_weight_conversion(base, weights).items():
            yield prefix + name, weight
    yield from added.items()
