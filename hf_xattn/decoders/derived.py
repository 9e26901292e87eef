"""Makes subclasses at run time, for modules of a text model that exist already.

A layer, embedding or head of the text model gets one more submodule, and a class that derives from its original class.
So all parameters keep their names, and `isinstance` checks against the original class still hold. A derived class is in
no Python module, so pickle and deepcopy store a function call that makes the class again.
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
        base (`type`): The original class.
        prefix (`str`): What the name of the subclass begins with.
        members (`dict[str, Any]`): Methods and properties of the subclass, including `forward`.
        recipe (`tuple`): An importable function, followed by its arguments. In any process, this call must return the
            subclass.
        behind (`tuple`): Classes that come after `base` in the order of inheritance, and before the bases of `base`.
            `super()` in the methods of `base` finds them.
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
    """Returns the class from which [`derive`] made the class of a module.

    Returns None if [`derive`] did not make it, or if another class was derived from it since, as FSDP does.
    """
    own = type(module)
    return own.__bases__[0] if own.__module__ == __name__ else None


def is_derived(module: nn.Module, prefix: str) -> bool:
    """Whether [`derive`] made the class of a module, or a class that FSDP has derived since, with this prefix."""
    return any(each.__module__ == __name__ and each.__name__.startswith(prefix) for each in type(module).__mro__)
