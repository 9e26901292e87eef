"""A smaller learning rate for what has a start to lose: all weights but those that start at zero.

AdamW moves each weight by about the learning rate, however small its gradient is. The output projections of fresh
blocks start at zero and must get somewhere, so they want a high rate. While they are near zero, the gradients of
queries, keys, values and connector are little more than noise, and a high rate soon moves these weights further than
they are large: a start by words (`align_connector`) is forgotten before it is of use.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import Trainer

from .parameter_groups import starts_at_zero


def check_started_rate(model: nn.Module, started_rate: float) -> None:
    """Raises a `ValueError` for a share that would slow all weights, because none starts at zero."""
    if started_rate != 1.0 and not any(weight.requires_grad for weight in starts_at_zero(model)):
        raise ValueError(
            "`--started-rate`: expected a model whose output projections start at zero, got one with `zero_init=False`."
        )


class StartedRateTrainer(Trainer):
    """A `Trainer` in which all weights but those that start at zero have a share of the learning rate.

    Args:
        started_rate (`float`, defaults to 1.0): the share.
    """

    def __init__(self, started_rate: float = 1.0, **given: Any):
        super().__init__(**given)
        self._started_rate = started_rate

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """`Trainer`'s, without gates: one that decays closes its block."""
        small = {name for name, weight in model.named_parameters() if weight.dim() < 2}
        return [name for name in super().get_decay_parameter_names(model) if name not in small]

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        if self.optimizer is not None:
            return self.optimizer
        optimizer = super().create_optimizer(model)
        if self._started_rate == 1.0:
            return optimizer
        trained: Any = self.model if model is None else model
        new = {id(weight) for weight in starts_at_zero(trained)}
        for group in list(optimizer.param_groups):
            started = [weight for weight in group["params"] if id(weight) not in new]
            group["params"] = [weight for weight in group["params"] if id(weight) in new]
            if started:
                rate = group["lr"] * self._started_rate
                optimizer.add_param_group({**group, "params": started, "lr": rate})
        optimizer.param_groups = [group for group in optimizer.param_groups if group["params"]]
        return optimizer
