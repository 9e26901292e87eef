"""What newcomers read and what GitHub and package indexes show: the guide, the forms, the workflow, the metadata."""

import os
import re
from importlib import metadata
from pathlib import Path

import pytest
import yaml

import hf_xattn
from helpers.checkout import ROOT
from hf_xattn.commands.main import _parser
from hf_xattn.version import HOW_TO_INSTALL


GITHUB = ROOT / ".github"
GUIDE = (GITHUB / "CONTRIBUTING.md").read_text()
FORMS = sorted(path for path in (GITHUB / "ISSUE_TEMPLATE").glob("*.yml") if path.name != "config.yml")


def test_the_guide_names_what_is_there():
    """A file that moved, a name that is gone, a command that nobody can run."""
    files = re.findall(r"`((?:hf_xattn|tests|\.ci|\.github)/[\w./]+|README\.md)`", GUIDE)
    assert len(files) > 15
    examples = {"tests/FOLDER/test_X.py", "hf_xattn/FOLDER/X.py"}
    assert [file for file in files if not (ROOT / file).exists() and file not in examples] == []
    code = "\n".join(path.read_text() for folder in ("hf_xattn", "tests") for path in (ROOT / folder).rglob("*.py"))
    for name in ("DIFFERENT", "EXPERTS", "RECIPES", "Recipe", "BLOCK_FIELDS", "CrossAttentionConfig", "_init_weights"):
        assert f"`{name}`" in GUIDE or f".{name}`" in GUIDE
        assert re.search(rf"(?:^|def |class ){name}\b", code, re.MULTILINE), name
    (commands,) = [action.choices for action in _parser()._actions if isinstance(action.choices, dict)]
    assert set(re.findall(r"`hf-xattn (\w+)", GUIDE)) <= set(commands)


def test_the_guide_has_the_commands_of_the_readme():
    """Two ways to run the tests, of which one is old."""
    readme = (ROOT / "README.md").read_text()
    command = re.search(r"<!-- test command -->\n```bash\n(.*) && (\.venv/bin/pytest.*)\n", readme)
    assert command is not None and all(f"`{part}`" in GUIDE for part in command.groups())
    run = (ROOT / ".ci" / "run").read_text()
    for command in ("ruff check .", "ruff format", "mypy"):
        assert command in GUIDE and command in run
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


@pytest.mark.parametrize("path", FORMS, ids=[path.stem for path in FORMS])
def test_issue_forms_have_the_keys_of_github(path):
    """A form that GitHub does not show, because a key is wrong; or that does not ask for the output of `hf-xattn
    check`.
    """
    form = yaml.safe_load(path.read_text())
    assert form.keys() == {"name", "description", "labels", "body"}
    identities = [entry["id"] for entry in form["body"]]
    assert len(set(identities)) == len(identities) and "check" in identities
    for entry in form["body"]:
        assert entry.keys() <= {"type", "id", "attributes", "validations"}
        assert entry["type"] in ("textarea", "input")
        allowed = {"label", "description", "placeholder"} | ({"render"} if entry["type"] == "textarea" else set())
        assert "label" in entry["attributes"] and entry["attributes"].keys() <= allowed
        assert entry.get("validations", {"required": True}) == {"required": True}
    options = re.findall(r"`hf-xattn (\w+)(?: [A-Z]+)?((?: --[\w-]+)?)", path.read_text())
    (commands,) = [action.choices for action in _parser()._actions if isinstance(action.choices, dict)]
    for command, option in options:
        assert not option or option.strip() in commands[command]._option_string_actions


def test_two_forms_and_a_private_way():
    """A weakness that is told to all, because nothing else was offered."""
    assert [path.stem for path in FORMS] == ["bug", "decoder"]
    chooser = yaml.safe_load((GITHUB / "ISSUE_TEMPLATE" / "config.yml").read_text())
    assert chooser == {"blank_issues_enabled": False}
    way = "report a weakness in a private message to those who gave you this package, and not in public."
    assert way in (GITHUB / "SECURITY.md").read_text()


def test_nothing_is_promised_that_is_not_there():
    """A name on a package index or a repository that nobody has claimed, where anybody may put code for those who
    follow the docs.
    """
    patterns = ("*.md", "*.toml", ".github/**/*", "model_cards/*.md", "hf_xattn/**/*.py", "examples/**/*", ".ci/run")
    promise = re.compile(
        r"pip install[^\n&;`]*?hf[_-]xattn(?!-\*\.whl)|https?://[^\s)>\"']*hf[_-]xattn|^hf[_-]xattn(?:\[|[=<>~]=)",
        re.MULTILINE,
    )
    files = [path for pattern in patterns for path in ROOT.glob(pattern) if path.suffix not in (".pyc", ".png", ".jpg")]
    found = [(str(path.relative_to(ROOT)), promise.findall(path.read_text())) for path in files if path.is_file()]
    assert len(found) > 200 and [each for each in found if each[1]] == []
    assert HOW_TO_INSTALL in (ROOT / "README.md").read_text()


def test_errors_name_what_an_extra_installs():
    """A package in an error message that the extra of the same purpose does not have."""
    code = "\n".join(path.read_text() for path in (ROOT / "hf_xattn").rglob("*.py"))
    project = (ROOT / "pyproject.toml").read_text()
    for extra in ("web", "plot", "serve", "demo", "data"):
        first = re.search(rf'^{extra} = \["(.+?)"', project, re.MULTILINE)[1]
        assert re.search(rf"pip install ['\"]{re.escape(first)}['\"]", code), first


def commands_of(job):
    """The commands of a workflow's job, all of whose actions are GitHub's own."""
    assert all(re.fullmatch(r"actions/[\w-]+@v\d+", step["uses"]) for step in job["steps"] if "uses" in step)
    return [step["run"] for step in job["steps"] if "run" in step]


def test_the_workflow_calls_the_script():
    """A workflow that runs other commands than contributors do, or may write to the repository."""
    workflow = yaml.safe_load((GITHUB / "workflows" / "ci.yml").read_text())
    assert workflow["permissions"] == {"contents": "read"}
    assert set(workflow[True]) == {"push", "pull_request"}  # YAML reads the key `on` so
    lint, run = (commands_of(workflow["jobs"][name]) for name in ("lint", "run"))
    assert run == [".ci/run"] and len(workflow["jobs"]) == 2
    script = (ROOT / ".ci" / "run").read_text()
    assert all(command in script for command in lint[-1].split(" && "))


def test_the_weekly_workflow():
    """A break by a new release that nobody hears of, or a workflow that may write to the repository."""
    workflow = yaml.safe_load((GITHUB / "workflows" / "versions.yml").read_text())
    assert workflow["permissions"] == {"contents": "read"}
    assert workflow[True]["schedule"] == [{"cron": "0 5 * * 1"}] and "workflow_dispatch" in workflow[True]
    matrix = workflow["jobs"]["core"]["strategy"]["matrix"]["include"]
    assert matrix[0] == {"name": "newest", "install": "transformers torch torchvision", "upgrade": "--upgrade"}
    oldest = re.search(r'requires-python = ">=([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    assert oldest is not None and oldest[1] in [entry.get("python") for entry in matrix]
    core, slow = (commands_of(workflow["jobs"][name]) for name in ("core", "slow"))
    assert core[-1] == ".venv/bin/pytest -n 2 --dist loadfile $(cat .ci/core)"
    assert slow[-1] == ".venv/bin/pytest -n 2 --dist loadfile -m slow"
    readme = (ROOT / "README.md").read_text()
    assert core[0] == slow[0] and core[0] in readme  # the installation of the tests


def test_no_test_file_imports_another():
    """A test file that cannot be moved or removed: another takes parts of it, or it looks for files beside itself."""
    files = sorted((ROOT / "tests").rglob("*.py"))
    tests = {file.stem for file in files if file.stem.startswith("test_")}
    found = []
    for file in files:
        imported = re.findall(r"\b(?:from|import) (\w+)", file.read_text())
        found += [f"{file.name} imports {name}" for name in imported if name in tests | {"conftest"}]
        if file.stem in tests and "Path(" + "__file__)" in file.read_text():
            found.append(f"{file.name} looks beside itself, and not in `checkout.ROOT`")
    assert len(tests) > 100 and found == []


def test_no_two_test_files_have_one_name():
    """pytest imports test files by their name alone, and stops at the second one."""
    names = [file.name for file in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))


def test_the_version_has_one_place_and_a_list_of_changes():
    """A package without types for its users; a version that is written in two places; one that has no changes."""
    assert (Path(hf_xattn.__file__).parent / "py.typed").is_file()
    text = (ROOT / "pyproject.toml").read_text()
    assert '"hf_xattn" = ["py.typed"]' in text and "Typing :: Typed" in text
    found = [
        str(path.relative_to(ROOT))
        for pattern in ("*.md", "*.toml", ".github/**/*", "hf_xattn/**/*.py", "tests/**/*.py", "examples/**/*.py")
        for path in ROOT.glob(pattern)
        if path.is_file() and hf_xattn.__version__ in path.read_text()
    ]
    assert found == ["CHANGELOG.md", "hf_xattn/version.py"]
    headings = re.findall(r"^## (\d+\.\d+\.\d+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == hf_xattn.__version__


def test_extras_name_each_other():
    """An extra that asks for an extra which does not exist."""
    try:
        extras = set(metadata.metadata("hf_xattn").get_all("Provides-Extra") or [])
    except metadata.PackageNotFoundError:
        pytest.skip("the package is not installed")
    for requirement in metadata.requires("hf_xattn") or []:
        inner = re.match(r"hf[_-]xattn\[([\w,]+)\]", requirement)
        assert inner is None or set(inner[1].split(",")) <= extras
