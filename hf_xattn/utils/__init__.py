"""Helpers without a model: checks of arguments, reading and writing of files, what is used of transformers' private
API, sizes of published configurations.

What may come in: a helper that several rooms need and that knows no module of this package's models.
Imports from: none.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar


Function = TypeVar("Function", bound=Callable[..., Any])


def memoized(function: Function) -> Function:
    """`functools.cache` that keeps the function's signature for type checkers."""
    cached: Any = functools.cache(function)
    return cached
