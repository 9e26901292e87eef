"""What a demo leaves behind: a folder with examples, tables, and pictures of the answers and of where the model looked.

Where it looked is attention, not an explanation.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageDraw, ImageFont

from ..maps.attention_maps import AttentionMaps, attention_maps
from ..maps.words import Word, words_of
from ..processing_xattn import XAttnProcessor
from .canvases import HEIGHT, PATCH, PROMPT, WIDTH, WORDS, Canvas, picture_of
from .language_scores import ANSWER_TOKENS, is_right
from .questions import KINDS, Question, chat


MARK = "made-by-hf-xattn-demo"  # a file that marks a folder of the demo, which a later run may overwrite
SHARES = ("right", "attention", "accuracy")  # names of figures that are shares
# Of the sheet of questions, in pixels.
MARGIN, GAP, LINE = 16, 6, 20
PANEL = 4 * WIDTH, 4 * HEIGHT
CELL = 2 * PANEL[0] + GAP
# Of the sheets of canvases.
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


def undo_prepared(output: Path, existed: bool) -> None:
    """Removes the folder that [`prepared`] made, or its mark where the folder was there before, if nothing followed."""
    if [path.name for path in output.iterdir()] == [MARK]:
        (output / MARK).unlink()
        if not existed:
            output.rmdir()


def save_examples(output: Path, canvases: list[Canvas]) -> None:
    """Saves canvases in place of those of an earlier run."""
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
            heat = (grid[position] / grid.max().clamp(min=1e-6) * 200).to(torch.uint8)
            sheet.paste(_lit(picture, heat, "orange"), (x, y))
            word = processor.decode(maps.tokens[row, min(position + 1, maps.tokens.shape[1] - 1)])
            right = word == WORDS[canvases[index].digits[place]]
            pen.text((x + 2, y + SCALED[1] + 2), word, fill="black" if right else "red")
    sheet.save(path)


def draw_questions(path: Path, model, processor: XAttnProcessor, questions: list[Question]) -> None:
    """Draws one question of each kind: the canvas, and again for a word that the image decides (for "read", for three).

    The brighter a patch, the more attention it gets at the position that chooses the word: mean over heads and blocks.
    The questions are the first ones about as many digits as a canvas can hold.
    """
    chosen = [
        max((each for each in questions if each.kind == kind), key=lambda each: len(each.canvas.digits))
        for kind in KINDS
    ]
    columns, height = 2 * CELL + 3 * MARGIN, PANEL[1] + 2 * LINE + MARGIN
    rows = 1 + len(chosen) // 2  # the first question takes a row of its own
    sheet = Image.new("RGB", (columns, MARGIN + rows * height), "white")
    for index, question in enumerate(chosen):
        column, row = (0, 0) if index == 0 else ((index - 1) % 2, (index + 1) // 2)
        corner = MARGIN + column * (CELL + MARGIN), MARGIN + row * height
        _draw(sheet, corner, model, processor, question, num_words=1 if index else 3)
    sheet.save(path, optimize=True)


def _draw(sheet, corner: tuple[int, int], model, processor, question: Question, num_words: int) -> None:
    pen, font = ImageDraw.Draw(sheet), ImageFont.load_default(size=15)
    left, top = corner
    picture = picture_of(question.canvas)
    asked = chat([question.text], picture)
    inputs = processor.apply_chat_template(asked, tokenize=True, return_dict=True, add_generation_prompt=True)
    maps = attention_maps(model, inputs.to(model.device), max_new_tokens=ANSWER_TOKENS, do_sample=False)
    said = maps.tokens[0, maps.num_given :].tolist()
    text = processor.decode(said, skip_special_tokens=True)
    colour = "darkgreen" if is_right(question, text) else "red"
    large = picture.resize(PANEL, Image.Resampling.NEAREST)
    sheet.paste(large, (left, top + LINE))
    pen.text((left, top), question.text, fill="black", font=font)
    pen.text((left, top + LINE + PANEL[1] + 2), text, fill=colour, font=font)
    grid = maps.grid(layer="mean", head="mean")
    for place, word in enumerate(decided_words(question, said, processor.tokenizer)[:num_words], start=1):
        position = maps.num_given + word.tokens.start
        x = left + place * (PANEL[0] + GAP)
        heat = grid[position - 1] / grid[position - 1].max().clamp(min=1e-6)
        sheet.paste(_lit(large, (heat * 190).byte(), "darkorange"), (x, top + LINE))
        pen.text((x, top + LINE + PANEL[1] + 2), word.text.strip(",."), fill="black", font=font)


def _lit(picture: Image.Image, heat: torch.Tensor, colour: str) -> Image.Image:
    """The picture with a colour over it, as strong as the heat: uint8, `(patch rows, patch columns)`."""
    cover = Image.fromarray(heat.numpy()).resize(picture.size, Image.Resampling.NEAREST)
    return Image.composite(Image.new("RGB", picture.size, colour), picture, cover)


def decided_words(question: Question, said: list[int], tokenizer) -> list[Word]:
    """The words of an answer (`said`, its tokens) that the image decides; its first word, if it names no digit.

    These are digit words; in the answer to "where", the word after the digit that was asked for.
    """
    words = words_of(said, tokenizer)
    digits = [index for index, word in enumerate(words) if word.text.strip(",.").lower() in WORDS]
    if question.kind == "where":
        digits = [index + 1 for index in digits[-1:] if index + 1 < len(words)]
    return [words[index] for index in digits] or words[:1]
