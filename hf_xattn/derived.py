"""Classes made at run time for modules that stay the objects they were.

A decoder's layer, embedding or head gets one more submodule and a class that derives from its own. No parameter changes its
name, `isinstance` and device maps see what they saw, and pickle and deepcopy get the recipe of the class instead of a name
that no module holds.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn


Base = TypeVar("Base", bound=nn.Module)


def derive(base: type[Base], prefix: str, members: dict[str, Any], recipe: tuple[Any, ...]) -> type[Base]:
    """A subclass `<prefix><name of base>`.

    Args:
        base (`type`): class of the module.
        prefix (`str`): in front of its name.
        members (`dict[str, Any]`): methods and properties of the subclass, `forward` among them.
        recipe (`tuple`): a function of a module and its arguments, which give this class again in another process.
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
    return type(name, (base,), namespace)


def _rebuild(make: Callable[..., type[nn.Module]], *arguments: Any) -> nn.Module:
    new_class = make(*arguments)
    return new_class.__new__(new_class)


def is_derived(module: nn.Module, prefix: str) -> bool:
    """Whether the class of a module was made here, with this prefix."""
    return type(module).__module__ == __name__ and type(module).__name__.startswith(prefix)
