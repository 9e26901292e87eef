"""What both demos share: their folder, the examples in it, and what they print."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .canvases import Canvas, picture_of


MARK = "made-by-hf-xattn-demo"  # a file that marks a folder of the demo, which a later run may overwrite
SHARES = ("right", "attention", "accuracy")  # names of figures that are shares


def prepared(output: Path) -> Path:
    """Makes the demo's folder. Raises a `ValueError` for a file, or a folder with files of something else."""
    if output.exists() and not output.is_dir():
        raise ValueError(f"`output` ({output}) must be a folder, got a file.")
    if output.is_dir() and any(output.iterdir()) and not (output / MARK).exists():
        raise ValueError(
            f"`output` ({output}) must be a new folder, an empty one or one of the demo, got a folder with other files."
        )
    output.mkdir(parents=True, exist_ok=True)
    (output / MARK).touch()
    return output


def undo_prepared(output: Path, existed: bool) -> None:
    """Removes the folder that [`prepared`] made, or its mark where the folder was there before, if nothing followed."""
    if [path.name for path in output.iterdir()] == [MARK]:
        (output / MARK).unlink()
        if not existed:
            output.rmdir()


def save_examples(output: Path, canvases: list[Canvas]) -> None:
    """Saves canvases as files in place of those of an earlier run. Each file name holds the digits on the canvas."""
    folder = output / "examples"
    folder.mkdir(exist_ok=True)
    for old in folder.glob("*.png"):
        old.unlink()
    for index, canvas in enumerate(canvases):
        picture_of(canvas).save(folder / f"{index}-{'-'.join(str(digit) for digit in canvas.digits)}.png")


def example_images(output: str | Path) -> list[Path]:
    """Returns the held-out canvases that the demo saved. Each file name holds the digits on the canvas."""
    return sorted((Path(output) / "examples").glob("*.png"))


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
