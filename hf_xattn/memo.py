"""`functools.cache` as type checkers should see it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar


Function = TypeVar("Function", bound=Callable[..., Any])


def memoized(function: Function) -> Function:
    """`functools.cache`, with the function's own signature: that of `functools` takes anything, and refuses classes of modules."""
    cached: Any = functools.cache(function)
    return cached
