"""Draws canvases with a question, the answer, and where the model looked for its words. Attention, no explanation."""

from __future__ import annotations

from pathlib import Path

from ..maps.answer_words import Word, words_of
from ..maps.attention_maps import attention_maps
from ..processing_xattn import XAttnProcessor
from .canvases import HEIGHT, WIDTH, WORDS, picture_of
from .language_scores import ANSWER_TOKENS, is_right
from .questions import KINDS, Question


SCALE, MARGIN, GAP, LINE = 4, 16, 6, 20
PANEL = WIDTH * SCALE, HEIGHT * SCALE
PANELS = 4  # the canvas, and up to three words
CELL = 2 * PANEL[0] + GAP
LOOK = (255, 140, 0)


def draw_questions(
    path: Path, model, processor: XAttnProcessor, questions: list[Question], layer: int | None = None
) -> None:
    """Draws one question of each kind: the canvas, and again for a word that the image decides (for "read", for three).

    The brighter a patch, the more attention it gets at the position that chooses the word: mean over heads and, without
    `layer`, over blocks. The questions are the first ones about as many digits as a canvas can hold.
    """
    from PIL import Image, ImageDraw

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
        num_words = 1 if index else PANELS - 1
        _draw(sheet, pen, corner, model, processor, question, "mean" if layer is None else layer, num_words)
    sheet.save(path, optimize=True)


def _draw(sheet, pen, corner: tuple[int, int], model, processor, question: Question, layer, num_words: int) -> None:
    from PIL import Image, ImageFont

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
    grid = maps.grid(layer=layer, head="mean")
    for place, word in enumerate(decided_words(question, said, processor.tokenizer)[:num_words], start=1):
        position = maps.num_given + word.tokens.start
        x = left + place * (PANEL[0] + GAP)
        heat = grid[position - 1] / grid[position - 1].max().clamp(min=1e-6)
        cover = Image.fromarray((heat * 190).byte().numpy()).resize(PANEL, Image.Resampling.NEAREST)
        sheet.paste(Image.composite(Image.new("RGB", PANEL, LOOK), large, cover), (x, top + LINE))
        pen.text((x, top + LINE + PANEL[1] + 2), word.text.strip(",."), fill="black", font=font)


def decided_words(question: Question, said: list[int], tokenizer) -> list[Word]:
    """The words of an answer (`said`, its tokens) that the image decides; its first word, if it names no digit.

    These are digit words; in the answer to "where", the word after the digit that was asked for.
    """
    words = words_of(said, tokenizer)
    digits = [index for index, word in enumerate(words) if word.text.strip(",.").lower() in WORDS]
    if question.kind == "where":
        digits = [index + 1 for index in digits[-1:] if index + 1 < len(words)]
    return [words[index] for index in digits] or words[:1]
