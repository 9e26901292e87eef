"""The code of hf_xattn in a saved folder, as one file, for machines without the package.

The files of the package stand below as comments, each behind a line with its name. The code here loads them as modules
inside this module.
"""

import importlib
import importlib.abc
import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any


class Sources(importlib.abc.MetaPathFinder, importlib.abc.ExecutionLoader):
    """Finds and loads the modules whose text stands in the comments of this file."""

    def __init__(self) -> None:
        _, *parts = Path(__file__).read_text(encoding="utf-8").split("\n# ==== ")
        files = (part.splitlines() for part in parts)
        self.texts = {name: "\n".join(line[2:] for line in lines) + "\n" for name, *lines in files}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith(f"{__name__}."):
            return None
        if not self._name(fullname):
            raise ModuleNotFoundError(f"This needs the package hf_xattn, not only its code in a folder: no {fullname}.")
        return importlib.util.spec_from_loader(fullname, self)

    def is_package(self, fullname: str) -> bool:
        return self._name(fullname).endswith("__init__.py")

    def get_filename(self, fullname: str) -> str:
        return f"{__file__}/{self._name(fullname)}"

    def get_source(self, fullname: str) -> str:
        return self.texts[self._name(fullname)]

    def _name(self, module: str) -> str:
        path = module.removeprefix(f"{__name__}.").replace(".", "/")
        return next((name for name in (f"{path}.py", f"{path}/__init__.py") if name in self.texts), "")


__path__: list[str] = []  # makes this module a package, so that imports inside it use the finder


def find(module: str, name: str) -> Any:
    """Returns a class or a function from a module of the package."""
    if not any(isinstance(finder, Sources) for finder in sys.meta_path):
        sys.meta_path.append(Sources())
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)
