"""The front matter and the tables of model cards."""

import re
from pathlib import Path

import yaml


def card_of(folder):
    text = (Path(folder) / "README.md").read_text()
    return yaml.safe_load(text.split("---\n")[1]), text


def rows_of(text):
    return dict(re.findall(r"^\| (.+?) \| (.+?) \|$", text, re.MULTILINE))
