"""`functools.cache` with types."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar


Function = TypeVar("Function", bound=Callable[..., Any])


def memoized(function: Function) -> Function:
    """`functools.cache` that keeps the function's signature for type checkers."""
    cached: Any = functools.cache(function)
    return cached
