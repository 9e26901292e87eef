"""With which versions of transformers this package was tested, and which versions of its packages are installed."""

from __future__ import annotations

import contextlib
import platform
from importlib import metadata

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
