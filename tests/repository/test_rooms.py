"""The order of the folders of the package: who may import whom."""

import ast
import functools

import pytest

from helpers.checkout import ROOT


PACKAGE = ROOT / "hf_xattn"
# Each imports from those before it. A file of the top level stands where its imports allow.
ORDER = (
    "version utils configuration_xattn outputs_xattn cache layers images decoders parts learning "
    "checkpoints storage extras_xattn call images_xattn generation_xattn modeling_xattn retrofit processing "
    "processing_xattn registration data evaluation training importers maps serving vllm_plugin checks demo commands "
    "__init__ __main__"
).split()
# What a reader needs to follow an image through `generate`. Everything else is an extra, and hooks in at PLACES.
CORE = (
    "configuration_xattn outputs_xattn cache layers images decoders call images_xattn generation_xattn modeling_xattn"
).split()
BELOW = ["version", "utils"]
PLACES = ["checkpoints.pretrained", "extras_xattn"]


@functools.cache
def imports():
    """For each import inside the package: file and line, room of the file, module and name that it takes."""
    found = []
    for file in sorted(PACKAGE.rglob("*.py")):
        *folders, stem = file.relative_to(PACKAGE).with_suffix("").parts
        room = folders[0] if folders else stem
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.ImportFrom) or not node.level:
                continue
            module = [*folders[: len(folders) + 1 - node.level], *(node.module or "").split(".")]
            names = [each.name for each in node.names]
            module = [part for part in module if part]
            for name in names:
                path = [*module, name]
                is_module = (PACKAGE.joinpath(*path)).is_dir() or PACKAGE.joinpath(*path).with_suffix(".py").is_file()
                source = path if is_module else module or ["__init__"]
                found.append((f"{file.relative_to(PACKAGE)}:{node.lineno}", room, source, name))
    return found


@pytest.mark.parametrize("room", ORDER)
def test_imports_go_one_way(room):
    """A circle between rooms: neither can be read, or changed, without the other."""
    later = ORDER[ORDER.index(room) + 1 :]
    found = [f"{where} imports {source}" for where, own, source, _ in imports() if own == room and source[0] in later]
    assert not found


def test_the_core_knows_no_extras():
    """A feature that serves few in the files that every reader has to understand."""
    found = [
        f"{where} imports {'.'.join(source)}"
        for where, room, source, _ in imports()
        if room in CORE and source[0] not in (*CORE, *BELOW) and ".".join(source) not in PLACES
    ]
    assert not found


def test_every_room_has_a_place_and_a_description():
    """A folder that nobody knows the reason of."""
    rooms = {file.name for file in PACKAGE.iterdir() if (file / "__init__.py").is_file()}
    assert rooms | {file.stem for file in PACKAGE.glob("*.py")} == set(ORDER)
    for room in rooms:
        assert len(ast.get_docstring(ast.parse((PACKAGE / room / "__init__.py").read_text()))) > 80, room


def test_rooms_keep_their_private_names():
    """A helper of one room that another depends on, so that its author cannot change it."""
    found = [
        f"{where}: {name}"
        for where, room, source, name in imports()
        if room != source[0] and name.startswith("_") and not name.startswith("__")
    ]
    assert not found
