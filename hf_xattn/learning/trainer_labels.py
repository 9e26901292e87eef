"""Masks image markers in the labels before `Trainer` counts the labels.

`Trainer` first counts the labels of all micro-batches of an optimizer step. The model then divides the sum of its losses by that number. So
labels that the model ignores must be -100 before `Trainer` counts. No argument of `Trainer` and no attribute of a model can do this, so
this file wraps the counting method of `Trainer`. The wrapper masks the labels of the batches, for models of this package only. Label
smoothing, which does not pass the labels to the model, then also gets masked labels.
"""

from __future__ import annotations

import functools
from collections.abc import MutableMapping
from typing import Any

import torch

from ..configuration_xattn import XAttnConfig


METHOD = "_get_num_items_in_batch"
DONE = "_hf_xattn_masks_labels"


def mask_labels_in_trainer() -> None:
    """Wraps the counting method of `Trainer`, once in each process."""
    from transformers import Trainer  # imported only if somebody uses a `Trainer`, because the import is slow

    count = getattr(Trainer, METHOD, None)
    if count is None or hasattr(count, DONE):
        return

    @functools.wraps(count)
    def masked_count(self: Trainer, batch_samples: list[Any], *args: Any, **kwargs: Any) -> Any:
        if isinstance(getattr(self.model, "config", None), XAttnConfig):
            for batch in batch_samples:
                _mask(batch, self.model)
        return count(self, batch_samples, *args, **kwargs)

    setattr(masked_count, DONE, True)
    setattr(Trainer, METHOD, masked_count)


def _mask(batch: Any, model: Any) -> None:
    """Replaces the labels of a batch by masked ones. The tensors are not changed."""
    if not isinstance(batch, MutableMapping):
        return
    for name in ("labels", "shift_labels"):
        labels = batch.get(name)
        if isinstance(labels, torch.Tensor):
            batch[name] = model.mask_labels(labels)
