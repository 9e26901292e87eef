"""With which versions of transformers this package was tested, and which versions of its packages are installed."""

from __future__ import annotations

import contextlib
import platform
import re
from collections.abc import Iterator
from importlib import metadata
from types import ModuleType

from ..version import __version__


# The oldest and the newest version of transformers that all tests ran with.
OLDEST, NEWEST = "5.17.0", "5.24.0"

# What a report of a bug should name, in this order.
PACKAGES = ("transformers", "torch", "accelerate", "peft", "trl", "datasets", "vllm")


def installed() -> dict[str, str]:
    """The versions of this package, of the packages that it works with as far as they are installed, and of Python."""
    found = {"hf_xattn": __version__}
    for name in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return {**found, "python": platform.python_version()}


@contextlib.contextmanager
def naming_what_transformers_lacks() -> Iterator[None]:
    """Turns the error of an import into one that says which name the installed transformers lacks.

    Raises:
        ImportError: in place of an error about a module of transformers, or a name in one.
    """
    try:
        yield
    except (ImportError, AttributeError) as error:
        where, name = _missing(error)
        if where.split(".")[0] != "transformers":
            raise
        what = f"`{name}` of `{where}`" if name else f"the module `{where}`"
        raise ImportError(
            f"hf_xattn {__version__} needs {what}, which transformers {installed().get('transformers')} does not have. "
            f"hf_xattn was tested with transformers {OLDEST} to {NEWEST}: install one of these, or a newer hf_xattn.",
            name=where,
        ) from error


def _missing(error: ImportError | AttributeError) -> tuple[str, str]:
    """The module that an error is about, and the name that it lacks: empty if the module itself is missing."""
    if isinstance(error, ModuleNotFoundError):
        return error.name or "", ""
    if isinstance(error, ImportError):
        named = re.match(r"cannot import name '(\w+)'", str(error))  # `name_from` is new in Python 3.12
        return (error.name or "", named[1]) if named else ("", "")
    return (error.obj.__name__, error.name or "") if isinstance(error.obj, ModuleType) else ("", "")
