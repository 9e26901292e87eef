"""Writes what a saved folder needs to load without `import hf_xattn`: a stub, and on request the code of this package.

With `trust_remote_code=True`, transformers runs the code that the `auto_map` of a checkpoint names. Here this is a stub
that imports this package. If the package is not installed, the stub uses the code beside it, which
`save_pretrained(folder, with_code=True)` writes, or raises an error. transformers copies the files that a file imports,
but no folders. So all code is in one file: a loader, and below it the files of this package as comments.
"""

from __future__ import annotations

import ast
import importlib.util
import os
from pathlib import Path
from typing import Any

from ..version import HOW_TO_INSTALL, __version__


STUB, CODE = "xattn_stub", "xattn_code"
LOADER = "utils.folder_code"  # the module with the loader
PACKAGE = __name__.removesuffix(".utils.stub")  # `hf_xattn`, or another name if this file came with a checkpoint

MODEL = "XAttnForConditionalGeneration"
# The classes that the Auto classes find in the stub, by the `model_type` of a configuration.
CLASSES = {
    "xattn": {
        "AutoConfig": "XAttnConfig",
        "AutoModel": "XAttnModel",
        "AutoModelForCausalLM": MODEL,
        "AutoModelForImageTextToText": MODEL,
        "AutoModelForMultimodalLM": MODEL,
        "AutoProcessor": "XAttnProcessor",
    },
    "xattn_block": {"AutoConfig": "CrossAttentionConfig", "AutoModel": "GatedCrossAttentionBlock"},
}

# The beginning of each file that is written here, by which `is_own_file` knows it.
NOTICE = (
    "# Copyright 2026 The hf_xattn developers. Licensed under the Apache License, Version 2.0 "
    "(http://www.apache.org/licenses/LICENSE-2.0),\n# without warranties or conditions of any kind."
)

TEMPLATE = '''\
{notice}
"""Loads the model in this folder with the package hf_xattn. Runs where `trust_remote_code=True` allows it.

After `import hf_xattn`, transformers loads the model without this file.
"""

import transformers
from packaging.version import Version
from transformers.utils import logging


SAVED_BY = "{version}"
HOW_TO_INSTALL = "{how_to_install}"

try:
    from hf_xattn import (
        CrossAttentionConfig,
        GatedCrossAttentionBlock,
        XAttnConfig,
        XAttnForConditionalGeneration,
        XAttnModel,
        XAttnProcessor,
    )
    from hf_xattn import __version__ as installed
except ImportError as error:
    if error.name not in (None, "hf_xattn"):
        raise
{otherwise}

if Version(installed) < Version(SAVED_BY):
    logging.get_logger(__name__).warning(
        f"This model was saved with hf_xattn {{SAVED_BY}}, but {{installed}} is installed, which may read it wrongly. "
        f"{{HOW_TO_INSTALL}}"
    )
'''

WITHOUT_CODE = """\
    raise ImportError(
        f"This model needs the Python package hf_xattn ({SAVED_BY} or newer). {HOW_TO_INSTALL} ({error})"
    ) from error"""

# The modules with the classes of a checkpoint. The code in a folder consists of these modules, of the modules that they
# import at the top, and so on.
ENTRIES = {
    "layers.block": ("GatedCrossAttentionBlock",),
    "configuration_xattn": ("CrossAttentionConfig", "XAttnConfig"),
    "modeling_xattn": ("XAttnForConditionalGeneration", "XAttnModel"),
    "processing_xattn": ("XAttnProcessor",),
    "registration": ("register_names",),
}

WITH_CODE = f"    from .{CODE} import find\n\n" + "".join(
    f'    {name} = find("{module}", "{name}")\n' for module, names in ENTRIES.items() for name in names
)
WITH_CODE += "    installed = SAVED_BY\n    register_names(transformers)"


class NamesItsStub:
    """Mixin for the configurations, models and processors of this package, which all save a stub."""

    @classmethod
    def register_for_auto_class(cls, auto_class: str | type | None = None) -> None:
        """As in transformers, which then saves the code of a class. It does nothing for classes of this package, which
        save the stub.
        """
        if cls.__module__.startswith(f"{PACKAGE}."):
            return
        registered: Any = super()
        registered.register_for_auto_class(*(() if auto_class is None else (auto_class,)))

    def _get_files_timestamps(self, working_dir: str | os.PathLike[str]) -> dict[str, float]:
        """Returns the times of files before a save, which uploads all files that change, or that are not listed here.

        Code is written before these times are read, so it would seem unchanged. It is left out of the list, so it is
        uploaded, too.
        """
        asked: Any = super()
        stamps: dict[str, float] = asked._get_files_timestamps(working_dir)
        return {name: stamp for name, stamp in stamps.items() if not name.endswith(".py")}


def references(model_type: str) -> dict[str, str]:
    """Returns the `auto_map` of a configuration. It is empty for a type that no Auto class loads."""
    return {auto_class: f"{STUB}.{name}" for auto_class, name in CLASSES.get(model_type, {}).items()}


def write_stub(folder: str | os.PathLike[str], with_code: bool = False, target: Path | None = None) -> None:
    """Writes the stub into a folder, and the code if it is wanted.

    Args:
        folder (`str`): the folder of a model, a configuration or a processor.
        with_code (`bool`): write the code too. It is always written if the folder holds code of an earlier save, which
            would be out of date, and if the running code itself came with a checkpoint.
        target (`Path`, *optional*): the folder that the files will be moved to; by default `folder`.

    Raises:
        ValueError: if `target` holds another package's file under the name of the stub or the code.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    target = folder if target is None else target
    with_code = with_code or holds_code(target) or PACKAGE != "hf_xattn"
    otherwise = WITH_CODE if with_code else WITHOUT_CODE
    texts = {"notice": NOTICE, "version": __version__, "how_to_install": HOW_TO_INSTALL, "otherwise": otherwise}
    files = {f"{STUB}.py": TEMPLATE.format(**texts)}
    if with_code:
        files[f"{CODE}.py"] = "\n".join([NOTICE, _source(LOADER), *map(_as_comments, code_modules())])
    for name in files:
        if any((where / name).is_file() and not is_own_file(where / name) for where in (folder, target)):
            raise ValueError(
                f"{target} holds a file {name} of another package. Save without `with_code`, or rename that file in "
                "the checkpoint that brought it."
            )
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")


def holds_code(folder: Path) -> bool:
    """Whether a folder holds a stub with the code beside it."""
    stub = folder / f"{STUB}.py"
    return stub.is_file() and WITH_CODE in stub.read_text(encoding="utf-8")


def own_code(folder: Path) -> list[Path]:
    """Returns the files in a folder that [`write_stub`] has written."""
    return [path for path in folder.glob("*.py") if is_own_file(path)]


def is_own_file(path: Path) -> bool:
    """Whether [`write_stub`] has written a file."""
    return path.suffix == ".py" and path.read_text(encoding="utf-8", errors="replace").startswith(NOTICE)


def code_modules() -> list[str]:
    """Returns the modules of the code, with the packages that they are in. Imports in functions are left out."""
    found: set[str] = set()
    asked = {*ENTRIES, LOADER}
    while asked:
        found |= asked
        asked = {name for module in asked for name in _imports(module)} - found
    return sorted(found)


def _imports(module: str) -> set[str]:
    """Returns the modules of this package that a module imports at its top, with the packages that it is in."""
    *folders, _ = module.split(".")
    found = {".".join(folders[:depth]) for depth in range(1, len(folders) + 1)}
    for node in ast.parse(_source(module)).body:
        if isinstance(node, ast.ImportFrom) and node.level:
            start = folders[: len(folders) + 1 - node.level]
            if node.module:
                found.add(".".join([*start, node.module]))
            else:
                found |= {".".join([*start, each.name]) for each in node.names}
    return found


def _spec(module: str) -> Any:
    return importlib.util.find_spec(f"{PACKAGE}.{module}")


def _source(module: str) -> str:
    """Returns the text of a module, from its file or from the code in a folder."""
    spec = _spec(module)
    return spec.loader.get_source(spec.name)


def _as_comments(module: str) -> str:
    is_folder = _spec(module).submodule_search_locations is not None
    file = module.replace(".", "/") + ("/__init__.py" if is_folder else ".py")
    return "\n".join([f"\n# ==== {file}", *(f"# {line}".rstrip() for line in _source(module).splitlines())])
