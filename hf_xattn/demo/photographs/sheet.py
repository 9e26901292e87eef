"""Draws six questions: each picture with its answer, and where the blocks look while the model chooses a word.

Where the blocks look is their attention, and no explanation of an answer.
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from PIL import Image, ImageDraw, ImageFont

from ...data.pictures import picture_of
from ...data.rows import text_of
from ...evaluation.answers import ARTICLES, normalised
from ...evaluation.evaluation import inputs_of
from ...evaluation.questions import Question
from ...maps.answer_maps import Word, lit, words_of
from ...maps.attention_maps import AttentionMaps, attention_maps
from ...modeling_xattn import XAttnForConditionalGeneration
from ...processing.chat_templates import Processor
from ...processing.image_reading import read_image


COLUMNS, ROWS = 2, 3
# Sizes in pixels.
SIDE, MARGIN, LINE, NOTE = 448, 24, 34, 28
TEXT_LINES = 2  # number of lines for a question or an answer
PANEL = TEXT_LINES * LINE * 2 + SIDE + NOTE + MARGIN
SIZE = COLUMNS * (SIDE + MARGIN) + MARGIN, ROWS * PANEL + MARGIN
# The kinds of questions about the demo's photographs that are drawn first, as far as the data have them.
SHOWN = (
    "another photograph: name",
    "trained photographs: at side",
    "trained photographs: side",
    "trained photographs: how many",
    "trained photographs: is there",
    "never seen: kind",
)


class Said(NamedTuple):
    """An answer, with the word that is marked, and the attention with which this word was chosen.

    Attributes:
        heat (`torch.Tensor`, *optional*): `(patch rows, patch columns)`, from 0 to 1. None if the places of the image
            tokens in the picture are not known.
        pixels (`torch.Tensor`): the picture that the vision tower has read, `(height, width, channels)`.
    """

    text: str
    word: str
    heat: torch.Tensor | None
    pixels: torch.Tensor


def chosen(questions: Sequence[Question]) -> list[Question]:
    """Returns the questions to draw: the first one of each kind about a picture, the kinds of `SHOWN` in front."""
    groups: dict[str | None, list[Question]] = {}
    for question in questions:
        if len(question.pictures) == 1:
            groups.setdefault(question.group, []).append(question)
    names = sorted(groups, key=lambda name: SHOWN.index(name) if name in SHOWN else len(SHOWN))
    turns = [groups[name][turn] for turn in range(COLUMNS * ROWS) for name in names if turn < len(groups[name])]
    return turns[: COLUMNS * ROWS]


def draw_questions(
    path: Path,
    model: XAttnForConditionalGeneration,
    processor: Processor,
    questions: Sequence[Question],
    max_new_tokens: int,
) -> None:
    """Draws the [`chosen`] questions. Right answers are green, and wrong answers are red."""
    sheet = Image.new("RGB", SIZE, "white")
    for index, question in enumerate(chosen(questions)):
        corner = MARGIN + index % COLUMNS * (SIDE + MARGIN), MARGIN + index // COLUMNS * PANEL
        _draw(sheet, corner, question, answer(model, processor, question, max_new_tokens), processor)
    sheet.save(path, quality=85)


def answer(model: XAttnForConditionalGeneration, processor: Processor, question: Question, max_new_tokens: int) -> Said:
    """Asks a question, and measures the attention with which a word of the answer was chosen."""
    inputs = inputs_of(processor, [question.messages]).to(model.device)
    maps = attention_maps(model, inputs, max_new_tokens=max_new_tokens, do_sample=False)
    said = maps.tokens[0, maps.num_given :].tolist()
    word = decided_word(text_of(question.messages[-1]), words_of(said, processor.tokenizer))
    heat = None if word is None else _heat(maps, maps.num_given + word.tokens.start - 1)
    text: Any = processor.decode(said, skip_special_tokens=True)
    return Said(text.strip(), "" if word is None else word.text.strip(string.punctuation), heat, maps.pixels())


def decided_word(question: str, words: Sequence[Word]) -> Word | None:
    """Returns the word of an answer that the picture decides: the first one that is no article and not in the question.

    If the question holds all words ("the cow is on the left"), it returns the last word. None for an empty answer.
    """
    known = {*ARTICLES, *normalised(question).split()}
    new = (word for word in words if normalised(word.text) not in known)
    return next(new, words[-1] if words else None)


def _heat(maps: AttentionMaps, position: int) -> torch.Tensor | None:
    try:
        grid = maps.grid(layer="mean", head="mean", token=position)
    except ValueError:  # the order of the patches is not known, or the connector does not keep it
        return None
    return grid / grid.max().clamp(min=1e-6)


def _draw(sheet: Image.Image, corner: tuple[int, int], question: Question, said: Said, processor: Any) -> None:
    pen, font, small = ImageDraw.Draw(sheet), ImageFont.load_default(size=26), ImageFont.load_default(size=20)
    left, top = corner
    asked = _wrapped(pen, text_of(question.messages[-1]), font)
    pen.text((left, top + (TEXT_LINES - len(asked)) * LINE), "\n".join(asked), fill="black", font=font)
    top += TEXT_LINES * LINE
    picture = _picture(question, said, processor)
    if said.heat is not None:
        picture = lit(picture, said.heat)
        note = f'orange: where it looks while it says "{said.word}"'
        pen.text((left, top + SIDE + 4), _wrapped(pen, note, small)[0], fill="gray", font=small)
    sheet.paste(picture, (left, top))
    colour = "darkgreen" if normalised(said.text) == normalised(question.answer) else "red"
    lines = "\n".join(_wrapped(pen, said.text, font))
    pen.text((left, top + SIDE + NOTE), lines, fill=colour, font=font)


def _picture(question: Question, said: Said, processor: Any) -> Image.Image:
    """Returns the picture to lay patches on: what the tower has read, or the sharper file if nothing is cut off."""
    if getattr(processor.image_processor, "do_center_crop", None):
        picture = Image.fromarray((said.pixels * 255).byte().numpy())
    else:
        picture = read_image(picture_of(question.pictures[0]))
    return picture.resize((SIDE, SIDE))


def _wrapped(pen: ImageDraw.ImageDraw, text: str, font: Any) -> list[str]:
    """Returns the first lines of a text, as wide as a panel: at least one line."""
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if pen.textlength(longer, font=font) <= SIDE:
            lines[-1] = longer
        else:
            lines.append(word)
    return [line for line in lines if line][:TEXT_LINES] or [""]
