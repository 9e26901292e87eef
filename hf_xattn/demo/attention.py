"""Where the demo's model looks while it names a digit: a figure and a picture. Attention, not an explanation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ..maps.attention_maps import AttentionMaps, attention_maps
from .canvases import HEIGHT, PATCH, PROMPT, WIDTH, WORDS, Canvas


SCALE, LINE = 5, 16


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


def draw_attention(path: Path, model, processor, canvases: list[Canvas], pictures: list, layer: Any) -> None:
    """Draws three canvases with three digits, once for each word: the brighter a patch, the more attention it gets."""
    from PIL import Image, ImageDraw

    chosen = [index for index, canvas in enumerate(canvases) if len(canvas.digits) == 3][:3] or [0]
    maps = _maps(model, processor, [pictures[index] for index in chosen])
    width, height = WIDTH * SCALE, HEIGHT * SCALE + LINE
    sheet = Image.new("RGB", (3 * (width + 10) + 10, len(chosen) * (height + 10) + 10), "white")
    pen = ImageDraw.Draw(sheet)
    for row, index in enumerate(chosen):
        grid = maps.grid(row=row, layer=layer, head="mean")
        picture = pictures[index].resize((width, HEIGHT * SCALE), Image.Resampling.NEAREST)
        for place, position in enumerate(_naming(maps, canvases[index])):
            x, y = 10 + place * (width + 10), 10 + row * (height + 10)
            heat = (grid[position] / grid.max().clamp(min=1e-6) * 200).to(torch.uint8)
            cover = Image.fromarray(heat.numpy()).resize(picture.size, Image.Resampling.NEAREST)
            sheet.paste(Image.composite(Image.new("RGB", picture.size, "orange"), picture, cover), (x, y))
            word = processor.decode(maps.tokens[row, min(position + 1, maps.tokens.shape[1] - 1)])
            right = word == WORDS[canvases[index].digits[place]]
            pen.text((x + 2, y + HEIGHT * SCALE + 2), word, fill="black" if right else "red")
    sheet.save(path)
