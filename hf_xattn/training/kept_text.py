"""Text prompts beside pictures: what keeps the text ability of a model whose blocks learn to see.

Blocks that are trained on pictures alone answer every question about the picture, also those that no picture concerns.
So a run mixes in prompts without a picture. The text model answers each of them once before the run, and the blocks are
trained to leave these answers as they are (see `distillation.py`). If the answers were written by someone else, the
blocks would not learn how the text model continues its own answers.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list

from ..data.forms import CAPTION_PROMPT
from ..data.loading import Rows
from ..data.sources import Source
from ..evaluation.evaluation import Asker
from ..evaluation.questions import Question
from ..modeling_xattn import XAttnForConditionalGeneration
from ..processing_xattn import XAttnProcessor
from ..utils.whole_folder import replace_file
from .bad_rows import find_problems
from .distillation import DistillingCollator
from .launch import is_first_process, say


KEPT_TEXT_FILE = "kept_text.jsonl"
PROMPTS = Path(__file__).with_name("text_prompts.txt")  # those that come with the package
BATCH, MAX_NEW_TOKENS = 16, 32

TextRow = dict[str, Any]  # `messages`: a prompt, and the text model's answer


def read_prompts(file: Path) -> list[str]:
    """The different lines of a text file that are not empty.

    Raises:
        ValueError: for a file that is missing, cannot be read, or has no prompt.
    """
    try:
        lines = file.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"Expected `--text-prompts` to be a text file in UTF-8, one prompt a line, got {file}: {error}"
        ) from error
    prompts = list(dict.fromkeys(line.strip() for line in lines if line.strip()))
    if not prompts:
        raise ValueError(f"Expected `--text-prompts` to have a prompt in each line, got {file} without one.")
    return prompts


def text_rows(
    model: XAttnForConditionalGeneration,
    processor: XAttnProcessor,
    prompts: Sequence[str],
    collate: DistillingCollator,
    picture: Any,
    folder: Path,
    device: torch.device,
) -> list[TextRow]:
    """The prompts with the text model's answers: those that the folder of the run holds, or new ones, kept there.

    The first process answers and sends the rows to the others, which call this, too, and may not see its folder.

    Args:
        collate ([`DistillingCollator`]), picture: what the rows are tried with; None tries none.
        device (`torch.device`): where the first process answers.
    """
    rows: list[list[TextRow]] = [[]]
    if is_first_process():
        file = folder / KEPT_TEXT_FILE
        if file.is_file():
            rows = [[json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]]
            say(f"{len(rows[0])} text prompts with answers of the text model: {file}")
        else:
            rows = [_answered_rows(model, processor, prompts, collate, picture, file, device)]
    return broadcast_object_list(rows)[0]


def source_of(rows: Sequence[TextRow], folder: Path, weight: float) -> Source:
    """A source of rows that are held in memory; errors name the file of the run."""
    return Source(KEPT_TEXT_FILE, [_Held(rows, str(folder / KEPT_TEXT_FILE))], None, weight)


def digest_of_rows(rows: Sequence[TextRow]) -> str:
    return hashlib.sha256(_lines(rows).encode()).hexdigest()


class _Held:
    """A file whose rows are in memory."""

    def __init__(self, rows: Sequence[TextRow], path: str):
        self._rows, self.path, self.digest = rows, path, digest_of_rows(rows)

    def __len__(self) -> int:
        return len(self._rows)

    def example(self, place: int) -> Mapping[str, Any]:
        return self._rows[place]

    def name(self, place: int) -> str:
        return f"line {place + 1}"


def _answered_rows(
    model: XAttnForConditionalGeneration,
    processor: XAttnProcessor,
    prompts: Sequence[str],
    collate: DistillingCollator,
    picture: Any,
    file: Path,
    device: torch.device,
) -> list[TextRow]:
    say(f"The text model answers {len(prompts)} text prompts, which keep its text ability (`--text-share 0`: none).")
    start = time.perf_counter()
    try:
        answers = _answers(model, processor, prompts, device)
    except torch.OutOfMemoryError:  # such as of a model that trains in shards
        say(f"The model does not fit into the memory of {device}: it answers on the CPU.")
        answers = _answers(model, processor, prompts, torch.device("cpu"))
    rows = [
        {"messages": [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]}
        for prompt, answer in zip(prompts, answers)
        if answer
    ]
    kept, reason = _fitting(rows, collate, picture)
    part = file.with_name(f".{file.name}.part")
    part.write_text(_lines(kept), encoding="utf-8")
    replace_file(part, file)
    told = f"{len(kept)} of {len(prompts)} text prompts have an answer to train on, after"
    say(f"{told} {time.perf_counter() - start:.1f} s: {file}")
    if reason is not None:
        say(f"{len(rows) - len(kept)} are left out: {reason}")
    return kept


def _lines(rows: Sequence[TextRow]) -> str:
    return "".join(f"{json.dumps(row)}\n" for row in rows)


def _answers(
    model: XAttnForConditionalGeneration, processor: XAttnProcessor, prompts: Sequence[str], device: torch.device
) -> list[str]:
    """The greedy answers without a picture. The model is then where it was."""
    home = model.device
    asked = [Question([{"role": "user", "content": prompt}], answer="") for prompt in prompts]
    try:
        if home.type == "cpu":  # quantized weights are on their device
            model.to(device)  # type: ignore[arg-type]
        return [answer.strip() for answer in Asker(model, processor, BATCH, MAX_NEW_TOKENS)("Answering", asked)]
    finally:
        if home.type == "cpu":
            model.to(home)  # type: ignore[arg-type]


def _fitting(rows: Sequence[TextRow], collate: DistillingCollator, picture: Any) -> tuple[list[TextRow], str | None]:
    """The rows that can be trained on beside a picture, and what is wrong with the first of the others."""
    if picture is None:
        return list(rows), None

    def beside(read: list[TextRow]) -> Any:
        return collate(read, [picture] * len(read))

    held = Rows([source_of(rows, Path(), 1.0)], CAPTION_PROMPT)
    problems, _ = find_problems(held, range(len(held)), beside)
    bad = {problem.row for problem in problems}
    kept = [row for index, row in enumerate(rows) if index not in bad]
    return kept, problems[0].reason if problems else None
