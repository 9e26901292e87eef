"""What both demos share: their folder, what they print, and numbers as words."""

from __future__ import annotations

from pathlib import Path
from typing import Any


MARK = "made-by-hf-xattn-demo"  # a file that marks a folder of the demo, which a later run may overwrite
SHARES = ("right", "attention", "accuracy")  # names of figures that are shares


def prepared(output: Path) -> Path:
    """Makes the demo's folder.

    Raises:
        ValueError: if `output` is a file, or a folder with files of something else.
    """
    if output.exists() and not output.is_dir():
        raise ValueError(f"`output` ({output}) must be a folder, got a file.")
    if output.is_dir() and any(output.iterdir()) and not (output / MARK).exists():
        raise ValueError(
            f"`output` ({output}) must be a new folder, an empty one or one of the demo, got a folder with other files."
        )
    output.mkdir(parents=True, exist_ok=True)
    (output / MARK).touch()
    return output


def say(text: str) -> None:
    print(f"\n{text}", flush=True)


def shown(name: str, value: Any) -> str:
    """A figure as the table shows it."""
    if isinstance(value, float):
        return f"{value:.1%}" if any(word in name for word in SHARES) else f"{value:.1f}"
    return {True: "yes", False: "NO"}[value] if isinstance(value, bool) else str(value)


def print_table(results: dict[str, Any]) -> None:
    print()
    for name, value in results.items():
        print(f"{name:<50} {shown(name, value):>10}")
