"""Turns docstrings in transformers' style into Markdown. This is an extension of griffe, which reads the source.

A parser of Google's style takes the type in `` name (`int`, *optional*): `` as code, and knows no item with two names.
Here sections become lists, as on the pages of transformers, and a name in brackets, [`retrofit`], becomes a link.
"""

from __future__ import annotations

import re
import sys
import textwrap
from pathlib import Path
from typing import Any

import griffe


sys.path.insert(0, str(Path(__file__).resolve().parent))
from page_names import link_targets


TITLES = {"Args": "Arguments", "Attributes": "Attributes", "Returns": "Returns", "Raises": "Raises"}
NAMES = re.compile(r"(\*{0,2}\w+(?:, \*{0,2}\w+)*)((?: \(.*?\)(?=:|,|\.$))?)(.*)", re.DOTALL)
LINK = re.compile(r"\[`~?([\w.]+)`\](?!\[|\()")
TARGETS = link_targets()


def items_of(lines: list[str]) -> list[str]:
    """The items of a section, each as one line. Lines that are further inside belong to the item above them."""
    found: list[str] = []
    for line in textwrap.dedent("\n".join(lines)).strip("\n").split("\n"):
        if line.startswith(" ") and found:
            found[-1] += " " + line.strip()
        elif line.strip():
            found.append(line.strip())
    return found


def joined(items: list[str]) -> list[str]:
    """Items whose names go over two lines, `a, b,` and `c: ...`, in one."""
    found: list[str] = []
    for item in items:
        if found and re.fullmatch(r"[\w, ]+,", found[-1]):
            found[-1] += " " + item
        else:
            found.append(item)
    return found


def bold(item: str, title: str) -> str:
    """An item with its names in bold, or its errors as code."""
    match = NAMES.fullmatch(item)
    if match is None:
        return item
    names, kind, rest = match.groups()
    names = ", ".join(f"`{name}`" if title == "Raises" else f"**{name}**" for name in names.split(", "))
    return f"{names}{kind}{rest}"


def section(title: str, lines: list[str]) -> list[str]:
    if title == "Returns":
        return [f"**{TITLES[title]}**", "", *textwrap.dedent("\n".join(lines)).strip("\n").split("\n"), ""]
    return [f"**{TITLES[title]}**", "", *(f"- {bold(item, title)}" for item in joined(items_of(lines))), ""]


def markdown(text: str) -> str:
    """The text of a docstring, with its sections as lists."""
    lines, made, place = text.split("\n"), [], 0
    while place < len(lines):
        title = lines[place].removesuffix(":")
        if lines[place].endswith(":") and title in TITLES:
            end = place + 1
            while end < len(lines) and (not lines[end].strip() or lines[end].startswith(" ")):
                end += 1
            made += section(title, lines[place + 1 : end])
            place = end
        elif lines[place] == "Example:":
            made.append("**Example**")
            place += 1
        else:
            made.append(lines[place])
            place += 1
    return re.sub(r"```python\n(?=>>>)", "```pycon\n", "\n".join(made))


def linked(text: str, own: str) -> str:
    """Turns [`name`] into a link to its page, or into code if no page has it. `own`: the class around the docstring."""

    def link(match: re.Match[str]) -> str:
        name = match[1].removeprefix("hf_xattn.")
        target = TARGETS.get(f"{own}.{name}") or TARGETS.get(name)
        return f"[`{match[1]}`][{target}]" if target else f"`{match[1]}`"

    return LINK.sub(link, text)


class DocstringStyle(griffe.Extension):
    """Rewrites each docstring of the package when it has been read."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            own = obj.parent.name if obj.parent is not None and obj.parent.is_class else obj.name
            obj.docstring.value = linked(markdown(obj.docstring.value), own)
