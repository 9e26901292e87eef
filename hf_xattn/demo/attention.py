"""Where the demos' models look while they answer: figures and pictures. Attention, not an explanation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageDraw, ImageFont

from ..maps.attention_maps import AttentionMaps, Word, attention_maps, words_of
from ..processing_xattn import XAttnProcessor
from .canvases import HEIGHT, PATCH, PROMPT, WIDTH, WORDS, Canvas, picture_of
from .language_scores import ANSWER_TOKENS, is_right
from .questions import KINDS, Question


SCALE, MARGIN, GAP, LINE = 4, 16, 6, 20
PANEL = WIDTH * SCALE, HEIGHT * SCALE
PANELS = 4  # the canvas, and up to three words
CELL = 2 * PANEL[0] + GAP
LOOK = (255, 140, 0)


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


def draw_attention(path: Path, model, processor, canvases: list[Canvas], pictures: list) -> None:
    """Draws three canvases with three digits, once for each word: the brighter a patch, the more attention it gets."""
    chosen = [index for index, canvas in enumerate(canvases) if len(canvas.digits) == 3][:3] or [0]
    maps = _maps(model, processor, [pictures[index] for index in chosen])
    scale, line = 5, 16
    width, height = WIDTH * scale, HEIGHT * scale + line
    sheet = Image.new("RGB", (3 * (width + 10) + 10, len(chosen) * (height + 10) + 10), "white")
    pen = ImageDraw.Draw(sheet)
    for row, index in enumerate(chosen):
        grid = maps.grid(row=row, layer="mean", head="mean")
        picture = pictures[index].resize((width, HEIGHT * scale), Image.Resampling.NEAREST)
        for place, position in enumerate(_naming(maps, canvases[index])):
            x, y = 10 + place * (width + 10), 10 + row * (height + 10)
            heat = (grid[position] / grid.max().clamp(min=1e-6) * 200).to(torch.uint8)
            sheet.paste(_lit(picture, heat, "orange"), (x, y))
            word = processor.decode(maps.tokens[row, min(position + 1, maps.tokens.shape[1] - 1)])
            right = word == WORDS[canvases[index].digits[place]]
            pen.text((x + 2, y + HEIGHT * scale + 2), word, fill="black" if right else "red")
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
    pen = ImageDraw.Draw(sheet)
    for index, question in enumerate(chosen):
        column, row = (0, 0) if index == 0 else ((index - 1) % 2, (index + 1) // 2)
        corner = MARGIN + column * (CELL + MARGIN), MARGIN + row * height
        _draw(sheet, pen, corner, model, processor, question, num_words=1 if index else PANELS - 1)
    sheet.save(path, optimize=True)


def _draw(sheet, pen, corner: tuple[int, int], model, processor, question: Question, num_words: int) -> None:
    font = ImageFont.load_default(size=15)
    left, top = corner
    picture = picture_of(question.canvas)
    chat = [{"role": "user", "content": [{"type": "image", "image": picture}, {"type": "text", "text": question.text}]}]
    inputs = processor.apply_chat_template(chat, tokenize=True, return_dict=True, add_generation_prompt=True)
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
        sheet.paste(_lit(large, (heat * 190).byte(), LOOK), (x, top + LINE))
        pen.text((x, top + LINE + PANEL[1] + 2), word.text.strip(",."), fill="black", font=font)


def _lit(picture: Image.Image, heat: torch.Tensor, colour: Any) -> Image.Image:
    """Returns the picture with a colour over it, as strong as the heat: uint8, `(patch rows, patch columns)`."""
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
