"""How values of this package are taken apart, for `torch.export` and transformers' exporters.

A value that `forward` takes as an argument is a pytree node. A cache is none until somebody exports: FSDP and others rebuild whatever
is one, and a caller's cache must stay the object it is. transformers' exporters make nodes of caches. They take a cache apart by the
`__dict__` of every object in it: tensors become inputs of the program, everything else must be equal at every call. What differs from
call to call and no graph reads (how long the text was, which weights made the images) therefore lies in slots, beside an empty
`__dict__`. A cache that comes out of a program has lost these values.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Generic, TypeVar

from torch.utils import _pytree as pytree


T = TypeVar("T")


class Unexported:
    """Base of classes whose values lie in slots."""

    __slots__ = ("__dict__",)


class Note(Unexported, Generic[T]):
    """One such value."""

    __slots__ = ("value",)

    def __init__(self, value: T):
        self.value = value

    @property
    def is_lost(self) -> bool:
        """Whether the cache came out of an exported program."""
        return not hasattr(self, "value")


def dataclass_node(cls: type[T]) -> type[T]:
    """Makes a dataclass a pytree node, with its fields as children. A class decorator."""
    fields: Any = cls
    names = [field.name for field in dataclasses.fields(fields)]

    def flatten(value: T) -> tuple[list[Any], None]:
        return [getattr(value, name) for name in names], None

    def flatten_with_keys(value: T) -> tuple[list[Any], None]:
        return [(pytree.GetAttrKey(name), getattr(value, name)) for name in names], None

    pytree.register_pytree_node(
        cls,
        flatten,
        lambda children, context: cls(*children),
        serialized_type_name=f"{cls.__module__}.{cls.__qualname__}",
        flatten_with_keys_fn=flatten_with_keys,
    )
    return cls
