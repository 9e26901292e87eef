"""Computes logits where a label needs them: in front of the tokens of answers, not at each token of a prompt.

Logits are as wide as the vocabulary. For SmolLM2-135M those of a token take the multiplications of eight of its thirty
layers. The loss stays what it was: it reads the logits at labels alone.
"""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch

from ..decoders.loss import IGNORED
from .started_rate import StartedRateTrainer


def shifted(labels: torch.Tensor) -> torch.Tensor:
    """What each position predicts: the label of the next one, and nothing at the end. `(batch, text_len)`."""
    return torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED)


class LabelledLogitsTrainer(StartedRateTrainer):
    """A `Trainer` whose model computes the logits of positions that predict a label in one of the rows, and no others.

    All logits are computed for a decoder without `logits_to_keep`, and where one process trains on several GPUs, each
    of which would get a part of the positions.
    """

    def __init__(self, **given: Any):
        super().__init__(**given)
        text_model: Any = self.model.model.text_model  # type: ignore[union-attr]
        self._keeps = self.args.n_gpu <= 1 and "logits_to_keep" in inspect.signature(text_model.forward).parameters

    def at_labels(self, labels: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
        """The labels of the positions whose logits are computed `(batch, count)`, and what the model needs for that."""
        targets = shifted(labels)
        places = (targets != IGNORED).any(0).nonzero().flatten()
        if not self._keeps or not len(places):
            return targets, {}
        return targets[:, places], {"logits_to_keep": places}

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        if "labels" in inputs:
            labels, kept = self.at_labels(inputs["labels"])
            if kept:
                others = {name: value for name, value in inputs.items() if name != "labels"}
                inputs = {**others, "shift_labels": labels, **kept}
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    def prediction_step(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        labels = inputs["labels"]
        count, rows = (shifted(labels) != IGNORED).sum(), labels.shape[0]
        made: Any = super().prediction_step(model, inputs, *args, **kwargs)
        count = count.to(made[0].device)
        of_a_row = torch.stack([made[0].float() * count, count]) / rows
        self._of_rows.append(self.accelerator.gather_for_metrics(of_a_row.expand(rows, 2).contiguous()).double().cpu())
        return made

    def evaluation_loop(self, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any) -> Any:
        """transformers' own, but the loss is a mean over labels, as in training. A mean over batches would depend on
        their size.
        """
        self._of_rows: list[torch.Tensor] = []
        base: Any = super()
        output = base.evaluation_loop(*args, metric_key_prefix=metric_key_prefix, **kwargs)
        total, count = torch.cat(self._of_rows).sum(0).tolist()
        output.metrics[f"{metric_key_prefix}_loss"] = total / count if count else math.nan
        return output
