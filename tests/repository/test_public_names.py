"""What is public: the names of `hf_xattn.__all__`. Guides and examples import these, and no deeper modules."""

import ast
import re
import subprocess
import sys

import pytest

import hf_xattn
from helpers.checkout import ROOT
from helpers.inputs.notebooks import code_cells


# Deeper modules that a guide or an example imports from, and why. Benchmarks take what they measure.
DEEPER = {
    "hf_xattn.serving.web": "the page needs Gradio, and every name of `__all__` can be imported without an extra",
    "hf_xattn.demo": "examples make the pictures and the rows of the demos: data, and no API",
    "hf_xattn.importers": "an importer is written inside the package, as CONTRIBUTING.md says",
    "hf_xattn.training.trainer": "a measurement runs the trainer of the command `train`",
    "hf_xattn.training.picture_use": "a measurement takes the images of other rows",
}
ALLOWED = {
    "space": {"hf_xattn.serving.web"},
    "digits": {"hf_xattn.demo"},
    "photos": {"hf_xattn.demo"},
    "own_parts": {"hf_xattn.importers"},
    "scenes": {"hf_xattn.training.trainer", "hf_xattn.training.picture_use"},
}


def code_of(path):
    """The Python of a script, of a notebook, or of the code blocks of a page."""
    if path.suffix == ".ipynb":
        return code_cells(path)
    text = path.read_text()
    return [text] if path.suffix == ".py" else re.findall(r"```python\n(.*?)```", text, re.DOTALL)


def taken(path):
    """What a script or a page takes of the package: pairs of a module and a name in it."""
    found = []
    for code in code_of(path):
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "hf_xattn":
                found += [(node.module, each.name) for each in node.names]
            elif isinstance(node, ast.Import):
                found += [(each.name, "") for each in node.names if each.name.startswith("hf_xattn.")]
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "hf_xattn":
                found.append(("hf_xattn", node.attr))
    return found


PAGES = [
    path
    for pattern in ("README.md", "model_cards/*.md", "examples/**/*.md", "examples/**/*.py", "examples/*.ipynb")
    for path in sorted(ROOT.glob(pattern))
    if "benchmarks" not in path.parts and "hf_xattn" in path.read_text()
]


@pytest.mark.parametrize("path", PAGES, ids=[str(path.relative_to(ROOT)) for path in PAGES])
def test_guides_and_examples_take_public_names(path):
    """A guide whose reader depends on a module that the next version moves."""
    allowed = ALLOWED.get(path.parent.name, set())
    for module, name in taken(path):
        if module == "hf_xattn":
            assert name in hf_xattn.__all__ or name == "importers" and "hf_xattn.importers" in allowed
        else:
            assert any(f"{module}.".startswith(f"{each}.") for each in allowed), f"{module} is not public"


def test_exceptions_are_used():
    """A deeper module that counts as public for a guide which has gone."""
    used = {(path.parent.name, module) for path in PAGES for module, _ in taken(path)}
    for folder, modules in ALLOWED.items():
        for each in modules:
            assert each in DEEPER
            assert any(name == folder and f"{module}.".startswith(f"{each}.") for name, module in used), each


def test_names_in_prose_are_public():
    """`hf_xattn.some.module` in a sentence, as if readers could rely on it."""
    public = {f"hf_xattn.{name}" for name in hf_xattn.__all__}
    for path in (path for path in [*PAGES, ROOT / ".github" / "SECURITY.md"] if path.suffix == ".md"):
        for name in re.findall(r"`(hf_xattn\.(?!__all__|NAME)[\w.]+)", path.read_text()):
            deeper = any(f"{name}.".startswith(f"{each}.") for each in DEEPER)
            assert deeper or any(f"{name}.".startswith(f"{each}.") for each in public), (path.name, name)


def test_every_name_is_there():
    """A name in `__all__` that cannot be imported, a name that is written out of order, or one that `dir` hides."""
    assert hf_xattn.__all__ == sorted(set(hf_xattn.__all__))
    assert set(hf_xattn.__all__) <= set(dir(hf_xattn))
    namespace = {}
    exec("from hf_xattn import *", namespace)
    assert set(hf_xattn.__all__) <= namespace.keys()
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        hf_xattn.nothing  # noqa: B018


def test_later_names_are_imported_later():
    """An import of the package that waits for importers, evaluation or commands."""
    modules = [f"hf_xattn.{module}" for module in set(hf_xattn._LATER.values())]
    script = f"import sys, hf_xattn; print([name for name in {modules} if name in sys.modules])"
    made = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert made.stdout.strip() == "[]"
