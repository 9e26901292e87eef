"""What the package uses of vLLM: where it is imported, and the table of private methods, which is true."""

import importlib
from pathlib import Path

import pytest

import hf_xattn
from hf_xattn.vllm_plugin.plugin import PRIVATE


PACKAGE = Path(hf_xattn.__file__).parent
PLUGIN = PACKAGE / "vllm_plugin"


def test_only_the_plugin_imports_vllm():
    """The package must work without vLLM."""
    others = [file for file in PACKAGE.rglob("*.py") if PLUGIN not in file.parents]
    assert not [file for file in others if "import vllm" in file.read_text() or "from vllm" in file.read_text()]


def test_the_table_is_true():
    """A vLLM in which the plug-in fails when it is used, and not before."""
    pytest.importorskip("vllm.config", reason="vLLM is not installed")
    for name, where in PRIVATE.items():
        module, owner = where.rsplit(".", 1)
        assert hasattr(getattr(importlib.import_module(module), owner), name), (where, name)
