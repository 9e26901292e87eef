"""Derived classes, made at run time, for the existing modules of a decoder.

A layer, embedding or head of the decoder gets one more submodule and a class that derives from its original class. No
parameter changes its name, and `isinstance` checks against the original class still hold. No Python module holds a
derived class, so pickle and deepcopy store a function call that makes the class again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn


Base = TypeVar("Base", bound=nn.Module)


def derive(
    base: type[Base], prefix: str, members: dict[str, Any], recipe: tuple[Any, ...], behind: tuple[type, ...] = ()
) -> type[Base]:
    """Makes a subclass named `<prefix><name of base>`.

    Args:
        members (`dict[str, Any]`): methods and properties of the subclass, including `forward`.
        recipe (`tuple`): an importable function, then its arguments. The call returns this subclass in any process.
        behind (`tuple`): classes that `super()` in the methods of `base` finds, in front of the bases of `base`.
    """

    def __reduce_ex__(self, protocol):
        state = self.__getstate__() if hasattr(self, "__getstate__") else self.__dict__
        return _rebuild, recipe, state

    name = f"{prefix}{base.__name__}"
    namespace: dict[str, Any] = {
        **members,
        "forward": functools.wraps(base.forward)(members["forward"]),
        "__reduce_ex__": __reduce_ex__,
        "__module__": __name__,
        "__qualname__": name,
        "__doc__": base.__doc__,
    }
    return type(name, (base, *behind), namespace)


def _rebuild(make: Callable[..., type[nn.Module]], *arguments: Any) -> nn.Module:
    new_class = make(*arguments)
    return new_class.__new__(new_class)


def original_class(module: nn.Module) -> type[nn.Module] | None:
    """The class from which [`derive`] made the class of a module. None if another class was derived from it (FSDP)."""
    own = type(module)
    return own.__bases__[0] if own.__module__ == __name__ else None


def is_derived(module: nn.Module, prefix: str) -> bool:
    """Whether [`derive`] made the class of a module, with this prefix. FSDP derives a class of its own from it."""
    return any(each.__module__ == __name__ and each.__name__.startswith(prefix) for each in type(module).__mro__)
