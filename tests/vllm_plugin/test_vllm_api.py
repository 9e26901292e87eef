"""What the package uses of vLLM: all of it is in one table, and the table is true."""

import ast
import importlib
from pathlib import Path

import pytest

import hf_xattn
from hf_xattn.vllm_plugin.plugin import NAMES, PRIVATE


PACKAGE = Path(hf_xattn.__file__).parent
PLUGIN = PACKAGE / "vllm_plugin"


def used():
    """Module and name of each import of vLLM."""
    for file in PLUGIN.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").split(".")[0] == "vllm":
                yield from ((node.module, each.name) for each in node.names)


def test_imports_are_listed():
    """A name that a new release of vLLM may move unnoticed; or a table with names that nobody uses."""
    assert set(used()) == {(module, name) for module, names in NAMES.items() for name in names.split()}


def test_only_the_plugin_imports_vllm():
    """The package must work without vLLM."""
    others = [file for file in PACKAGE.rglob("*.py") if PLUGIN not in file.parents]
    assert not [file for file in others if "import vllm" in file.read_text() or "from vllm" in file.read_text()]


def test_the_table_is_true():
    """A vLLM in which the plug-in fails when it is used, and not before."""
    pytest.importorskip("vllm.config", reason="vLLM is not installed")
    for module, names in NAMES.items():
        for name in names.split():
            assert hasattr(importlib.import_module(module), name), (module, name)
    for name, where in PRIVATE.items():
        module, owner = where.rsplit(".", 1)
        assert hasattr(getattr(importlib.import_module(module), owner), name), (where, name)
