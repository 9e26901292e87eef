"""What a demo leaves behind: a folder with examples, tables, and pictures of the answers and of where the model looked.

Where it looked is attention, not an explanation.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

from ..maps.answer_maps import lit
from ..maps.attention_maps import AttentionMaps, attention_maps
from .canvases import HEIGHT, PATCH, PROMPT, WIDTH, WORDS, Canvas


MARK = "made-by-hf-xattn-demo"  # a file that marks a folder of the demo, which a later run may overwrite
SHARES = ("right", "attention", "accuracy")  # names of figures that are shares
# Of the sheets of canvases, in pixels.
SCALED = 5 * WIDTH, 5 * HEIGHT
SPACE = 10


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


def save_examples(output: Path, pictures: Mapping[str, Image.Image]) -> None:
    """Saves pictures under their names, in place of those of an earlier run."""
    folder = output / "examples"
    folder.mkdir(exist_ok=True)
    for old in folder.glob("*.png"):
        old.unlink()
    for name, picture in pictures.items():
        picture.save(folder / f"{name}.png")


def example_images(output: str | Path) -> list[Path]:
    """Returns the held-out pictures that a demo saved. The name of a canvas holds its digits."""
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


def attention_on_digits(model, processor, canvases: list[Canvas], pictures: list) -> dict[str, float]:
    """Measures how much of the attention lies on the patch of the digit that is being named.

    A digit is named at the position in front of its word. Digits that the model gets wrong count too.

    Returns the share for each block, mean over digits and heads, and the share of a patch if the attention were even.
    """
    shares: dict[int, list[float]] = {}
    tokens = 0
    for start in range(0, len(canvases), 100):
        maps = _maps(model, processor, pictures[start : start + 100])
        tokens = maps.weights[0].shape[-1]
        for row, canvas in enumerate(canvases[start : start + 100]):
            for layer in maps.layers:
                grid = maps.grid(row=row, layer=layer, head="mean")
                shares.setdefault(layer, []).extend(
                    grid[position, y // PATCH, x // PATCH].item()
                    for position, (y, x) in zip(_naming(maps, canvas), canvas.corners)
                )
    found = {f"attention on the digit, layer {layer}": sum(each) / len(each) for layer, each in shares.items()}
    return {**found, "attention on the digit, if it were even": 1 / tokens}


def _maps(model, processor, pictures: list) -> AttentionMaps:
    inputs = processor(text=[PROMPT] * len(pictures), images=pictures).to(model.device)
    return attention_maps(model, inputs, max_new_tokens=8, do_sample=False)


def _naming(maps: AttentionMaps, canvas: Canvas) -> list[int]:
    """Positions that choose the words of the digits: `digits : first [seven] second [two]`."""
    last = maps.tokens.shape[1] - 1
    return [min(maps.num_given + 2 * place, last) for place in range(len(canvas.digits))]


def _sheet(columns: int, rows: int, line: int) -> tuple[Image.Image, ImageDraw.ImageDraw]:
    """A white sheet for scaled canvases, each with a line of text below it."""
    size = columns * (SCALED[0] + SPACE) + SPACE, rows * (SCALED[1] + line + SPACE) + SPACE
    sheet = Image.new("RGB", size, "white")
    return sheet, ImageDraw.Draw(sheet)


def draw_answers(path: Path, canvases: list[Canvas], pictures: list, readings: list[list[str]]) -> None:
    """Draws eight canvases with the words that the model read."""
    line = 22
    sheet, pen = _sheet(2, 4, line)
    for index, (canvas, picture, words) in enumerate(zip(canvases[:8], pictures, readings)):
        x, y = SPACE + index % 2 * (SCALED[0] + SPACE), SPACE + index // 2 * (SCALED[1] + line + SPACE)
        sheet.paste(picture.resize(SCALED, Image.Resampling.NEAREST), (x, y))
        right = words[1::2] == [WORDS[digit] for digit in canvas.digits]
        pen.text((x + 2, y + SCALED[1] + 4), " ".join(words[1::2]), fill="black" if right else "red")
    sheet.save(path)


def draw_attention(path: Path, model, processor, canvases: list[Canvas], pictures: list) -> None:
    """Draws three canvases with three digits, once for each word: the brighter a patch, the more attention it gets."""
    chosen = [index for index, canvas in enumerate(canvases) if len(canvas.digits) == 3][:3] or [0]
    maps = _maps(model, processor, [pictures[index] for index in chosen])
    line = 16
    sheet, pen = _sheet(3, len(chosen), line)
    for row, index in enumerate(chosen):
        grid = maps.grid(row=row, layer="mean", head="mean")
        picture = pictures[index].resize(SCALED, Image.Resampling.NEAREST)
        for place, position in enumerate(_naming(maps, canvases[index])):
            x, y = SPACE + place * (SCALED[0] + SPACE), SPACE + row * (SCALED[1] + line + SPACE)
            sheet.paste(lit(picture, grid[position] / grid.max().clamp(min=1e-6)), (x, y))
            word = processor.decode(maps.tokens[row, min(position + 1, maps.tokens.shape[1] - 1)])
            right = word == WORDS[canvases[index].digits[place]]
            pen.text((x + 2, y + SCALED[1] + 2), word, fill="black" if right else "red")
    sheet.save(path)
