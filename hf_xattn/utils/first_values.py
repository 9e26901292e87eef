"""First values of weights: not drawn where they are written again, and refused where a checkpoint lacks the weight.

torch's layers draw random numbers in their constructors, and `_init_weights` writes every weight of a block or
connector again. On a CPU the lost numbers took more time than those that stay.

transformers gives first values to weights that a checkpoint lacks, and opens a checkpoint with the class that is
registered for its model type. It warns at most. So the models of this package are loaded whole, by the class that they
were saved with, or not at all.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from torch.overrides import TorchFunctionMode
from transformers.utils import logging

from .checkpoint_files import short


logger = logging.get_logger(__name__)

NAMED = 3  # weights in a message
# What the constructors of `nn.Linear` and `nn.Embedding` call, in `torch.nn.init` and on tensors. Norms and gates do
# not use them.
FILLS = frozenset({"kaiming_uniform_", "uniform_", "normal_", "zero_"})


class ValuesComeLater(TorchFunctionMode):
    """Leaves new layers without values. For constructors of a model that then calls `post_init`, or on the meta device.

    A mode of torch holds for one thread: models that other threads make are not changed.
    """

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(function, "__name__", None) in FILLS:
            return args[0] if args else kwargs["tensor"]
        return function(*args, **kwargs)


class NotesWhatIsMissing:
    """Part of models that are loaded whole or not at all."""

    # Names of weights of the model that a checkpoint lacked, and of weights of the checkpoint that have no place.
    _lacking: tuple[set[str], set[str]] | None = None

    def _adjust_missing_and_unexpected_keys(self, loading_info: Any) -> None:
        """Called at the end of loading. Notes all missing weights, also those that a class lets be missing."""
        missing = set(loading_info.missing_keys)
        noted: Any = super()
        noted._adjust_missing_and_unexpected_keys(loading_info)
        self._lacking = missing, set(loading_info.unexpected_keys)


def check_class(model_class: type, architectures: Any, source: Any, ours: Iterable[str]) -> None:
    """Raises a `ValueError` for a checkpoint of a class of the caller's own that another class would open.

    Args:
        architectures (`list[str]`, *optional*): the classes that the configuration names.
        ours (`Iterable[str]`): the classes of the package whose checkpoints any class may open.
    """
    if not isinstance(architectures, (list, tuple)) or not architectures:
        return
    names = [str(name).removeprefix("FSDP") for name in architectures]
    if {each.__name__ for each in model_class.__mro__}.isdisjoint(names) and set(ours).isdisjoint(names):
        raise ValueError(
            f"{source} was saved by a class {names[0]}, so {model_class.__name__} may answer otherwise. Load it with "
            f"`{names[0]}.from_pretrained`, or register that class with the Auto class that you use."
        )


def check_complete(model: Any, source: Any, allowed: bool = False) -> None:
    """Raises a `ValueError` if a loaded model ([`NotesWhatIsMissing`]) did not get all of its weights.

    With `allowed`, the caller's `allow_missing_weights`, it warns in place of the error.
    """
    missing, unexpected = vars(model).pop("_lacking", (set(), set()))
    if not missing:
        return
    what = incomplete(source, missing, unexpected)
    if not allowed:
        raise ValueError(
            f"{what} Copy it again. With `allow_missing_weights=True`, `from_pretrained` gives these weights first "
            "values, most of them random."
        )
    logger.warning(f"{what} These weights have first values, most of them random.")


def incomplete(source: Any, missing: Collection[str], unexpected: Collection[str]) -> str:
    """The words for a checkpoint that lacks weights."""
    what = f"{source} is not complete: {len(missing)} weights are missing, {_first(missing)}."
    if unexpected:
        others = f"It holds {len(unexpected)} for which the model has no place, {_first(unexpected)}"
        return f"{what} {others}: were weights renamed?"
    return f"{what} It is damaged, or belongs to another configuration."


def _first(names: Collection[str]) -> str:
    first = ", ".join(map(short, sorted(names)[:NAMED]))
    return first + (f" and {len(names) - NAMED} more" if len(names) > NAMED else "")
