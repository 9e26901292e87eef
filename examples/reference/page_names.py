"""The names that the pages of the reference have, and those that they ought to have: read, not imported."""

from __future__ import annotations

import ast
import re
from pathlib import Path


HERE = Path(__file__).resolve().parent
PACKAGE = HERE.parents[1] / "hf_xattn"


def public_names() -> list[str]:
    """`hf_xattn.__all__`."""
    for node in ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", None) == "__all__":
            return list(ast.literal_eval(node.value))
    raise ValueError(f"Expected {PACKAGE / '__init__.py'} to assign `__all__`, got no such line.")


def page_names() -> dict[str, list[str]]:
    """For each object of a page, such as `hf_xattn.XAttnModel`, the members that its page shows."""
    found: dict[str, list[str]] = {}
    for page in sorted((HERE / "docs").glob("*.md")):
        for block in re.findall(r"^::: .*(?:\n .*)*", page.read_text(encoding="utf-8"), re.MULTILINE):
            members = re.search(r"members: \[(.*?)\]", block, re.DOTALL)
            names = re.findall(r"\w+", members[1]) if members else []
            found[block.splitlines()[0].removeprefix("::: ").strip()] = names
    return found


def missing_names() -> list[str]:
    """Public names without a page."""
    paged = {path.rpartition(".")[2] for path in page_names()}
    return [name for name in public_names() if name not in paged]


def link_targets() -> dict[str, str]:
    """Where a name in a docstring leads. A member is found with its class, `XAttnModel.encode_images`, and without it.

    Several classes may have a member of one name, such as `from_pretrained`. Without a class, the first one is meant.
    """
    targets: dict[str, str] = {}
    for path, members in page_names().items():
        name = path.rpartition(".")[2]
        targets[name] = path
        for member in members:
            targets[f"{name}.{member}"] = f"{path}.{member}"
            targets.setdefault(member, f"{path}.{member}")
    return targets
