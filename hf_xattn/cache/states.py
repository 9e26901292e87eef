"""The form in which a cache stores keys and values: tensors, or rounded steps with scales, which take fewer bytes.

A rounded form is an optional part of the package. Its class is registered in `FORMS` under the `cache_dtype` that
selects it (`storage/int8_states.py` is one). It only works for inference, because rounding has no gradient.

The letters in shapes are those of `layers/attention.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import torch

from ..utils.tensor_checks import type_name


if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True, eq=False)
class StoredStates:
    """Keys or values as `steps * scales`.

    It can be indexed like the tensor that it stands for, as long as the index selects whole tokens.
    """

    steps: torch.Tensor  # (R, K, N, D)
    scales: torch.Tensor  # (R, K, N, 1)
    dtype: torch.dtype  # dtype of the states before rounding

    form: ClassVar[str]  # name of this class in `FORMS`
    requires_grad = False

    @classmethod
    def quantize(cls, states: torch.Tensor) -> StoredStates:
        """Rounds keys or values `(R, K, N, D)`."""
        raise NotImplementedError

    def dequantized(self) -> torch.Tensor:
        """Returns the states `(R, K, N, D)` in `dtype`."""
        raise NotImplementedError

    @staticmethod
    def multiplies_few(query: torch.Tensor) -> bool:
        """Whether [`attend`] with queries `(R, K, Q, D)` needs less time and memory than attention over floats.

        In that case the states need not be converted by [`dequantized`].
        """
        return False

    def attend(self, query: torch.Tensor, value: Self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Computes attention over these keys, and over `value` in the same form.

        The other arguments are a mask, the scaling and a position bias. Returns the output and the weights.
        """
        raise NotImplementedError

    @property
    def shape(self) -> torch.Size:
        return self.steps.shape

    @property
    def device(self) -> torch.device:
        return self.steps.device

    @property
    def nbytes(self) -> int:
        return self.steps.nbytes + self.scales.nbytes

    def mapped(self, change: Callable[[torch.Tensor], torch.Tensor]) -> StoredStates:
        """Applies `change` to the steps and to the scales. `change` must not touch the last axis."""
        return type(self)(change(self.steps), change(self.scales), self.dtype)

    def __getitem__(self, index: Any) -> StoredStates:
        return self.mapped(lambda part: part[index])

    def __setitem__(self, index: Any, states: StoredStates) -> None:
        self.steps[index], self.scales[index] = states.steps, states.scales

    def new_zeros(self, *shape: int) -> StoredStates:
        return type(self)(self.steps.new_zeros(shape), self.scales.new_zeros(*shape[:-1], 1), self.dtype)


States: TypeAlias = torch.Tensor | StoredStates
FORMS: dict[str, type[StoredStates]] = {}


def check_cache_dtype(name: str, value: object) -> str | None:
    """Checks an argument that is a name in `FORMS`, or None for the dtype that the model computes in. Returns it.

    Raises:
        TypeError, ValueError: for any other value.
    """
    if value is None or (isinstance(value, str) and value in FORMS):
        return value
    known = " or ".join([*(f'"{form}"' for form in FORMS), "None (the dtype that the model computes in)"])
    expected = f"Expected `{name}` to be {known}, got"
    if not isinstance(value, str):
        raise TypeError(f"{expected} {value!r} ({type_name(value)}).")
    raise ValueError(f"{expected} {value!r}.")


def check_no_gradient(cache_dtype: str | None) -> None:
    """Raises a `ValueError` if rounded images are to be made while gradients are recorded."""
    if cache_dtype is not None and torch.is_grad_enabled():
        raise ValueError(
            f'Expected no gradients to be recorded, because the images are kept with `cache_dtype="{cache_dtype}"`, '
            "which is for inference only: rounding has no gradient. Call the model under `torch.no_grad()`."
        )


def check_not_training(cache_dtype: str | None) -> None:
    """Raises a `ValueError` for training on rounded images."""
    if cache_dtype is not None:
        raise ValueError(
            f'The images in `cache` are kept with `cache_dtype="{cache_dtype}"`, which is for inference only. To train '
            "on encoded images, call `encode_images` without `cache_dtype`; otherwise call `model.eval()` or use "
            "`torch.no_grad()`."
        )


def as_stored(states: States, cache_dtype: str | None) -> States:
    """Returns keys or values in the form of `cache_dtype`."""
    if isinstance(states, StoredStates):
        if states.form == cache_dtype:
            return states
        states = states.dequantized()
    return states if cache_dtype is None else FORMS[cache_dtype].quantize(states)


def dense(states: States) -> torch.Tensor:
    """Returns keys or values as a tensor of floats."""
    return states.dequantized() if isinstance(states, StoredStates) else states


def map_states(states: States, change: Callable[[torch.Tensor], torch.Tensor]) -> States:
    """Applies `change` to the tensor of the states, or to both tensors. `change` must not touch the last axis."""
    return states.mapped(change) if isinstance(states, StoredStates) else change(states)


def concatenate(parts: Sequence[States], dim: int) -> States:
    """`torch.cat` for states, which must be all tensors of floats or all in the same rounded form."""
    floats = [part for part in parts if isinstance(part, torch.Tensor)]
    if len(floats) == len(parts):
        return torch.cat(floats, dim=dim)
    rounded = [part for part in parts if isinstance(part, StoredStates)]
    dtype = rounded[0].dtype
    for part in rounded[1:]:
        dtype = torch.promote_types(dtype, part.dtype)
    steps, scales = (torch.cat([getattr(part, name) for part in rounded], dim=dim) for name in ("steps", "scales"))
    return type(rounded[0])(steps, scales, dtype)
