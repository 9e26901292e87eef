"""Draws canvases with a question, the answer, and where the model looked at each word of the answer. Attention, not an explanation."""

from __future__ import annotations

from pathlib import Path

from ..attention_maps import attention_maps
from ..processing_xattn import XAttnProcessor
from .canvases import HEIGHT, WIDTH, WORDS, picture_of
from .language_scores import normal
from .questions import KINDS, Question


SCALE, MARGIN, LINE = 4, 14, 20
PANEL = WIDTH * SCALE, HEIGHT * SCALE
PANELS = 4  # the canvas, and up to three words
LOOK = (255, 140, 0)


def draw_questions(
    path: Path, model, processor: XAttnProcessor, questions: list[Question], layer: int | None = None
) -> None:
    """Draws one question of each kind in a row: the canvas, then the canvas again for each digit word of the answer.

    The brighter a patch, the more attention it gets at the position that chooses the word: mean over heads and, without `layer`, over
    blocks.
    """
    from PIL import Image, ImageDraw, ImageFont

    chosen = [next(each for each in questions if each.kind == kind) for kind in KINDS]
    width, height = MARGIN + PANELS * (PANEL[0] + MARGIN), PANEL[1] + LINE * 2 + MARGIN
    sheet = Image.new("RGB", (width, MARGIN + len(chosen) * height), "white")
    pen, font = ImageDraw.Draw(sheet), ImageFont.load_default(size=15)
    for index, question in enumerate(chosen):
        top = MARGIN + index * height
        picture = picture_of(question.canvas)
        maps, text = _asked(model, processor, picture, question.text)
        right = normal(text) == question.answer
        pen.text((MARGIN, top), question.text, fill="black", font=font)
        large = picture.resize(PANEL, Image.Resampling.NEAREST)
        sheet.paste(large, (MARGIN, top + LINE))
        pen.text((MARGIN, top + LINE + PANEL[1] + 2), text, fill="darkgreen" if right else "red", font=font)
        grid = maps.grid(layer="mean" if layer is None else layer, head="mean")
        for place, position in enumerate(_words(maps, processor)[: PANELS - 1], start=1):
            left = MARGIN + place * (PANEL[0] + MARGIN)
            heat = grid[position - 1] / grid[position - 1].max().clamp(min=1e-6)
            cover = Image.fromarray((heat * 190).byte().numpy()).resize(PANEL, Image.Resampling.NEAREST)
            sheet.paste(Image.composite(Image.new("RGB", PANEL, LOOK), large, cover), (left, top + LINE))
            word = processor.decode(maps.tokens[0, position]).strip()
            pen.text((left, top + LINE + PANEL[1] + 2), word, fill="black", font=font)
    sheet.save(path, optimize=True)


def _asked(model, processor: XAttnProcessor, picture, text: str):
    chat = [{"role": "user", "content": [{"type": "image", "image": picture}, {"type": "text", "text": text}]}]
    inputs = processor.apply_chat_template(chat, tokenize=True, return_dict=True, add_generation_prompt=True)
    maps = attention_maps(model, inputs.to(model.device), max_new_tokens=8, do_sample=False)
    return maps, processor.decode(maps.tokens[0, maps.num_given :], skip_special_tokens=True)


def _words(maps, processor: XAttnProcessor) -> list[int]:
    """Positions of the digit words of the answer; of its first word, if it names no digit."""
    positions = range(maps.num_given, maps.tokens.shape[1])
    named = [position for position in positions if processor.decode(maps.tokens[0, position]).strip() in WORDS]
    return named or [maps.num_given]
