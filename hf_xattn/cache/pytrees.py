"""Makes values of this package pytree nodes, for `torch.export` and transformers' exporters.

Values that `forward` takes as arguments are pytree nodes. Caches become nodes only during an export, because FSDP and
other wrappers rebuild every node, and a caller's cache must stay the same object.

transformers' exporters flatten a cache through the `__dict__` of each object in it. Tensors become inputs of the
program, and all other values must be equal in every call. Some values differ between calls although no graph reads
them, such as the length of the text and the identity of the weights. These values are in slots, next to an empty
`__dict__`, so the exporters do not see them. A cache that a program returns has lost them.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Generic, TypeVar

from torch.utils import _pytree as pytree


T = TypeVar("T")


class Unexported:
    """Base class of objects whose values are in slots, which exporters do not see."""

    __slots__ = ("__dict__",)


@dataclasses.dataclass(eq=False)
class UnexportedValue(Unexported, Generic[T]):
    """One value that exporters do not see. In a cache that an exported program has returned, `value` is missing."""

    __slots__ = ("value",)

    value: T


def dataclass_node(cls: type[T]) -> type[T]:
    """Class decorator: makes a dataclass a pytree node with its fields as children."""
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
