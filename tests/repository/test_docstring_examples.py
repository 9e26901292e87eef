"""The examples in the docstrings of public names run as they stand, and their output is what they say.

Hub ids, and the names `seeing`, `pictures` and `photo.png`, stand for small local files: see
`helpers/inputs/reader_files.py` and `examples/reference/docs/index.md`.
"""

import contextlib
import doctest
import inspect
import io
import re

import pytest

import hf_xattn
from helpers.inputs.reader_files import fill_for_docstrings
from helpers.models.tiny_models import needs_part
from hf_xattn.utils.parts import CONNECTORS, GATES, POSITIONS


BLOCK = re.compile(r"^Example:\n\n```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
NEEDS = {"lora_targets": "peft", "attention_maps": "matplotlib"}
# Public names without an example, and why.
WITHOUT = {
    "__version__": "a text",
    "sharding_units": "sharding needs several processes; the docstring shows the lines, and `tests/parallel` runs them",
}


def documented():
    """The public names with their docstrings: functions, classes, and methods that this package defines."""
    found = {}
    for name in hf_xattn.__all__:
        thing = getattr(hf_xattn, name)
        is_object = not inspect.isclass(thing) and not inspect.isfunction(thing)
        found[name] = inspect.getdoc(type(thing) if is_object else thing) or ""
        for method in dir(thing) if inspect.isclass(thing) else []:
            value = inspect.getattr_static(thing, method)
            function = getattr(value, "__func__", value)
            if not method.startswith("_") and getattr(function, "__module__", "").startswith("hf_xattn"):
                found[f"{name}.{method}"] = inspect.getdoc(function) or ""
    return found


EXAMPLES, seen = {}, set()
for each, docstring in documented().items():
    blocks = BLOCK.findall(docstring)
    if blocks and docstring not in seen:  # a method that two classes have runs once
        seen.add(docstring)
        EXAMPLES[each] = blocks


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("docstrings")
    fill_for_docstrings(folder)
    return folder


@pytest.fixture
def own_parts():
    """Takes out again what an example registers."""
    kept = [(parts, dict(parts._makers)) for parts in (CONNECTORS, GATES, POSITIONS)]
    yield
    for parts, makers in kept:
        parts._makers = makers


def test_every_name_has_an_example():
    """A function that a user has to guess how to call."""
    missing = [name for name, text in documented().items() if "." not in name and not BLOCK.search(text)]
    assert sorted(missing) == sorted(WITHOUT)


@needs_part("AutoImageProcessor without torchvision")
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_runs_and_prints_what_it_says(name, files, own_parts, tmp_path, monkeypatch):
    """Lines that a reader copies from the reference and that do not work, or do not print what is written there."""
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    for file in files.iterdir():
        (tmp_path / file.name).symlink_to(file)
    monkeypatch.chdir(tmp_path)
    for block in EXAMPLES[name]:
        test = doctest.DocTestParser().get_doctest(block, {}, name, None, 0)
        assert test.examples, "no line starts with >>>"
        said = io.StringIO()
        with contextlib.redirect_stdout(io.StringIO()):
            result = doctest.DocTestRunner(verbose=False, optionflags=FLAGS).run(test, out=said.write)
        assert not result.failed, said.getvalue()
