"""Hooks of mkdocs: the build ends if a public name has no page. Writes the colours of the code, too."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from pygments.formatters import HtmlFormatter


sys.path.insert(0, str(Path(__file__).resolve().parent))
from page_names import missing_names


def on_pre_build(config: Any) -> None:
    if missing := missing_names():
        raise PluginError(
            f"Expected a page for each name of `hf_xattn.__all__`, got none for {', '.join(missing)}. Add a line "
            "`::: hf_xattn.NAME` to a page of examples/reference/docs."
        )


def on_post_build(config: Any) -> None:
    colours = HtmlFormatter(style="default").get_style_defs(".highlight")
    (Path(config["site_dir"]) / "pygments.css").write_text(colours, encoding="utf-8")
