"""Reads the cells of a notebook, which is a JSON file, without a package for notebooks."""

import json


def code_cells(path):
    """The source of each code cell."""
    return ["".join(cell["source"]) for cell in _cells(path) if cell["cell_type"] == "code"]


def page_of(path):
    """The text cells as one page of Markdown."""
    return "\n\n".join("".join(cell["source"]) for cell in _cells(path) if cell["cell_type"] == "markdown")


def printed(path):
    """What the code cells have printed when the notebook was saved."""
    outputs = [each for cell in _cells(path) for each in cell.get("outputs", [])]
    return "".join("".join(each["text"]) for each in outputs if each.get("name") == "stdout")


def _cells(path):
    return json.loads(path.read_text())["cells"]
