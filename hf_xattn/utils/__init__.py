"""Helpers that know no model of this package: checks of arguments, reading and writing of files, the private names of
transformers that are used, and tables of architectures.

What belongs here: a helper that several subpackages need and that knows no module of this package's models.
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
