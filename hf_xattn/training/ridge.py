"""Ridge regression from sums, which take the same memory for any number of examples."""

from __future__ import annotations

from typing import Any

import torch


PENALTY = 1.0


class RidgeSums:
    """The sums of a regression `min |features @ weight.T + bias - targets|² + PENALTY (|weight|² + |bias|²)`.

    Args:
        bias (`bool`): whether there is one.
        before (`RidgeSums`, *optional*): of the same features with other targets: what is of features alone is theirs.
    """

    def __init__(self, bias: bool = True, before: RidgeSums | None = None):
        self.bias = bias
        self.products: Any = 0.0  # (inputs, outputs), float64
        self._adds_features = before is None
        self.count: int = 0 if before is None else before.count
        self.squares: Any = 0.0 if before is None else before.squares  # (inputs, inputs)

    def add(self, features: torch.Tensor, targets: torch.Tensor) -> None:
        """`(count, inputs)` and `(count, outputs)`; or `(tokens, inputs)` and the one target of all, `(outputs,)`."""
        inputs, targets = self._inputs(features), with_float64(targets).double()
        alike = targets.dim() == 1
        self.products = self.products + (inputs.sum(0)[:, None] * targets if alike else inputs.T @ targets)

    def add_some(self, features: torch.Tensor, targets: torch.Tensor, outputs: torch.Tensor, count: int) -> None:
        """`(tokens, inputs)` and `(tokens, len(outputs))`; of the other ones of `count` outputs the target is zero."""
        inputs = self._inputs(features)
        if not isinstance(self.products, torch.Tensor):
            self.products = inputs.new_zeros(inputs.shape[1], count)
        self.products[:, outputs] += inputs.T @ targets.double()

    def _inputs(self, features: torch.Tensor) -> torch.Tensor:
        features = with_float64(features)
        inputs = with_one(features).double() if self.bias else features.double()
        if self._adds_features:
            self.count += len(inputs)
            self.squares = self.squares + inputs.T @ inputs
        return inputs

    def plus(self, other: RidgeSums) -> RidgeSums:
        """The sums of the examples of both."""
        both = RidgeSums(self.bias)
        both.count = self.count + other.count
        both.squares, both.products = self.squares + other.squares, self.products + other.products
        return both

    def solve(self) -> torch.Tensor:
        """`(inputs, outputs)`, in float64; the last row is the bias."""
        penalty = PENALTY * torch.eye(len(self.squares), dtype=torch.float64, device=self.squares.device)
        return torch.linalg.solve(self.squares + penalty, self.products)


def with_float64(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor where sums can be in float64: Apple's GPUs have none."""
    return tensor.cpu() if tensor.device.type == "mps" else tensor


def with_one(features: torch.Tensor) -> torch.Tensor:
    """The features and a constant, for the bias: `(count, inputs + 1)`."""
    return torch.cat([features, torch.ones_like(features[:, :1])], dim=1)
