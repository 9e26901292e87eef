"""The API reference has every public name, and its one command builds it."""

import importlib
import importlib.util
import inspect
import re
import subprocess
import sys

import pytest
import yaml

import hf_xattn
from helpers.checkout import EXAMPLES, ROOT


REFERENCE = EXAMPLES / "reference"
COMMAND = "mkdocs build --config-file examples/reference/mkdocs.yml"


def module_of(name):
    """A script of the reference."""
    spec = importlib.util.spec_from_file_location(name, REFERENCE / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def pages():
    return module_of("page_names")


def test_every_public_name_has_a_page(pages):
    """A function that its user finds in the source alone."""
    assert pages.public_names() == hf_xattn.__all__
    assert pages.missing_names() == []


def test_a_missing_page_is_found(pages, monkeypatch):
    """A check that is content with whatever is there."""
    kept = {path: members for path, members in pages.page_names().items() if path != "hf_xattn.load_rows"}
    monkeypatch.setattr(pages, "page_names", lambda: kept)
    assert pages.missing_names() == ["load_rows"]


def test_pages_name_what_is_there(pages):
    """A page of another object than the public one of this name, or with a member that has gone."""
    for path, members in pages.page_names().items():
        module, _, name = path.rpartition(".")
        if path == "hf_xattn.serving.web.build_page":  # its module needs Gradio
            assert f"def {name}(" in (ROOT / "hf_xattn" / "serving" / "web.py").read_text()
            continue
        thing = getattr(importlib.import_module(module), name)
        assert name not in hf_xattn.__all__ or thing is getattr(hf_xattn, name), path
        fields = getattr(thing, "__annotations__", {})
        assert all(hasattr(thing, member) or member in fields for member in members), path


# Names in brackets without a page, which the reference shows as code: those of transformers, and what the layers of a
# model pass to one another.
EXTERNAL = re.compile(r"transformers\..*|Generate(?:Beam)?DecoderOnlyOutput")
INTERNAL = {"CrossAttentionContext", "CrossAttentionKeyNorm", "ImageTokens", "RealTokens", "read_row"}


def shown(pages):
    """The docstrings that the pages show: pairs of a name and a text."""
    for path, members in pages.page_names().items():
        module, _, name = path.rpartition(".")
        if module == "hf_xattn.serving.web":
            continue
        thing = getattr(importlib.import_module(module), name)
        yield path, inspect.getdoc(thing) or ""
        for member in members:
            value = getattr(thing, member, None)  # a field without a default is no attribute of its class
            yield f"{path}.{member}", (value and inspect.getdoc(getattr(value, "__func__", value))) or ""


def test_links_in_docstrings_lead_to_pages(pages):
    """A name in brackets that readers of the reference cannot follow: write an internal name without brackets."""
    targets = pages.link_targets()
    lost = [
        (where, name)
        for where, text in shown(pages)
        for name in re.findall(r"\[`~?([\w.]+)`\](?!\[|\()", text)
        if name.removeprefix("hf_xattn.") not in {*targets, *INTERNAL} and not EXTERNAL.fullmatch(name)
    ]
    assert lost == []


def test_pages_stand_in_reading_order():
    """A page that no menu has, or a start page that lists other pages than the menu."""
    text = (REFERENCE / "mkdocs.yml").read_text()
    menu = [page for entry in yaml.safe_load(text)["nav"] for page in entry.values()]
    assert sorted(menu) == sorted(page.name for page in (REFERENCE / "docs").glob("*.md"))
    start = (REFERENCE / "docs" / "index.md").read_text()
    assert ["index.md", *re.findall(r"^\| \[[^\]]+\]\((\w+\.md)\)", start, re.MULTILINE)] == menu


def test_the_command_stands_where_people_look():
    """A reference that nobody knows how to build."""
    for page in ("README.md", ".github/CONTRIBUTING.md", "examples/reference/README.md"):
        assert COMMAND in (ROOT / page).read_text(), page
    assert 'docs = ["mkdocs' in (ROOT / "pyproject.toml").read_text()


def test_the_reference_builds(pages, tmp_path):
    """A link to a name that no page has; a docstring whose sections or links are shown as they are written."""
    for package in ("mkdocs", "mkdocstrings_handlers"):
        pytest.importorskip(package)
    words = [sys.executable, "-m", *COMMAND.split(), "--site-dir", str(tmp_path / "site")]
    made = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    whole = "".join(page.read_text() for page in (tmp_path / "site").glob("*.html"))
    for path, members in pages.page_names().items():
        assert all(f'id="{each}"' in whole for each in (path, *(f"{path}.{member}" for member in members))), path
    assert not re.findall(r"\[<code>\w+</code>\]", whole)
    assert not re.findall(r"<p>(?:Args|Returns|Raises|Example|Attributes):", whole)


def test_a_missing_page_ends_the_build(monkeypatch):
    """A reference that is built without a name."""
    PluginError = pytest.importorskip("mkdocs.exceptions").PluginError
    hooks = module_of("hooks")
    monkeypatch.setattr(hooks, "missing_names", lambda: ["load_rows"])
    with pytest.raises(PluginError, match="got none for load_rows"):
        hooks.on_pre_build(None)
