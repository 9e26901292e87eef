"""`--text-share` and `--distill-text`: an image must not change what does not concern it.

Blocks that are trained on images alone answer every question about the image, also those that no image concerns.
So a run mixes in prompts without an image, which the text model answers once before the run. If the answers were
written by someone else, the blocks would not learn how the text model continues its own answers.

With a frozen text model a row without an image gives no gradient: no block runs. So it is shown beside the image of
another row, and its answers are trained to be those of the model without the image, token by token:

    loss = (cross-entropy of rows with an image + WEIGHT * KL(without the image || beside it)) / labels

summed over the labels of each kind of row, and divided by the labels of both, over all batches and processes of a step.
Without an image the blocks change nothing, so the teacher is the same model in the same memory: exactly the base.

The image of a row is that of the next row of the run that has one. That is a function of the row's place, so a run
that is resumed shows the same one, whichever process or worker reads it.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list

from ..data.forms import CAPTION_PROMPT
from ..data.loading import Rows
from ..data.pictures import picture_of, picture_parts
from ..data.sources import Source
from ..data.tables import Table
from ..decoders.loss import IGNORED
from ..evaluation.evaluation import Asker
from ..evaluation.questions import Question
from ..modeling_xattn import XAttnForConditionalGeneration
from ..processing_xattn import XAttnProcessor
from ..utils.whole_folder import replace_file
from .bad_rows import BadRowError, Place, Problem, RowReader, find_problems, reason_of, resolved
from .collator import XAttnDataCollator
from .launch import is_first_process, on_device, say


KEPT_TEXT_FILE = "kept_text.jsonl"
PROMPTS = Path(__file__).with_name("text_prompts.txt")  # those that come with the package
BATCH, MAX_NEW_TOKENS = 16, 32
SEARCHED = 4096  # rows behind one without an image that are searched for one
KNOWN = 2**16  # places that a reader remembers
DISTILLED, TEACHER = "distilled", "teacher_"  # names in a batch
TURNED_OFF = "`--text-share 0` without `--distill-text` turns it off"
# A chat that any image fits.
NEUTRAL = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


TextRow = dict[str, Any]  # `messages`: a prompt, and the text model's answer


def beside(row: Mapping[str, Any], picture: Any) -> dict[str, Any]:
    """The row with an image where the images of rows stand: in front of the first user message."""
    return {**row, "images": [picture]}


class DistillingCollator:
    """Makes batches in which some rows stand beside an image that they do not have, and once more without it.

    Args:
        collate ([`XAttnDataCollator`]): makes the batches, one text a row.
    """

    def __init__(self, collate: XAttnDataCollator):
        self.collate = collate

    def __call__(self, rows: Sequence[Mapping[str, Any]], pictures: Sequence[Any]) -> dict[str, torch.Tensor]:
        """Makes a batch. `pictures` has an image for each row to distil, and None for each other one.

        Returns:
            `dict`: the batch of [`XAttnDataCollator`]. If a row has an image given, also `distilled` `(batch,)`, True
            for such rows, and `teacher_input_ids`, `teacher_attention_mask` and `teacher_labels` `(rows to distil,
            teacher_len)`, the same rows without it. The labels of both are the same tokens.

        Raises:
            ValueError, TypeError: as the collator, and for a text that has other answer tokens beside an image.
        """
        given = [picture is not None for picture in pictures]
        shown = [row if picture is None else beside(row, picture) for row, picture in zip(rows, pictures, strict=True)]
        try:
            batch = self.collate(shown)
        except (TypeError, ValueError) as error:
            if given != [True]:
                raise
            raise type(error)(f"{error} This is beside the picture of another row ({TURNED_OFF}).") from error
        if not any(given):
            return batch
        teacher = self.collate([row for row, chosen in zip(rows, given) if chosen])
        ends = []
        for row, own in zip([index for index, chosen in enumerate(given) if chosen], teacher["labels"]):
            student, length = batch["labels"][row], int(batch["attention_mask"][row].sum())
            said, places = student[student != IGNORED], (own != IGNORED).nonzero().flatten()
            places, left = places[: len(said)], places[len(said) :]
            # A marker makes a text longer, so that a cut takes more of it.
            whole = self.collate.max_length is None or length < self.collate.max_length
            if not torch.equal(own[places], said) or (whole and len(left)):
                raise ValueError(
                    f"Row {row} of the batch: Expected the same answer tokens with a picture in front of the text as "
                    "without one, got others: the chat template or the tokenizer writes the answer in another way "
                    f"beside a picture. Change the template, or train without this ({TURNED_OFF})."
                )
            own[left] = IGNORED
            ends.append(int(places[-1]) + 1)
        if self.collate.padding_side == "right":
            teacher = {name: tensor[:, : max(ends)] for name, tensor in teacher.items()}
        batch[DISTILLED] = torch.tensor(given)
        return {**batch, **{f"{TEACHER}{name}": tensor for name, tensor in teacher.items()}}

    def error_of(self, picture: Any) -> Exception | None:
        """Why no text can stand beside an image, or None."""
        try:
            self.collate([beside({"messages": NEUTRAL}, picture)])
        except (TypeError, ValueError) as error:
            return error
        return None


class DistillingReader(RowReader):
    """Reads the rows of a batch, and shows each row without an image beside that of the next row that has one.

    Rows to evaluate on stay as they are. Arguments as of [`RowReader`].
    """

    def __init__(self, collate: XAttnDataCollator, on_bad: Callable[[Rows, Problem], Any] | None):
        super().__init__(collate, on_bad)
        self.distilling = DistillingCollator(collate)
        self._has_picture: dict[int, bool] = {}  # of places of the run: what the data say, however often it is asked

    def batch_of(self, read: Sequence[tuple[Place, dict[str, Any]]]) -> Any:
        while True:
            chosen = [self._picture_for(place, row) for place, row in read]
            pictures = [None if each is None else picture_of(picture_parts(each[1])[0]) for each in chosen]
            try:
                return self.distilling([row for _, row in read], pictures)
            except (TypeError, ValueError):
                # An image that cannot be read is the fault of its own row.
                if not self._leave_out([each for each in chosen if each is not None]):
                    raise

    def _picture_for(self, place: Place, row: dict[str, Any]) -> tuple[Place, dict[str, Any]] | None:
        """The row whose image a row is shown beside. None for one with an image of its own, or to evaluate on."""
        rows, start = place
        if isinstance(rows, Rows) or picture_parts(row):
            return None
        if len(self._has_picture) > KNOWN:
            self._has_picture.clear()
        for number in range(start + 1, start + 1 + SEARCHED):
            if self._has_picture.get(number, True):
                found = _read(Place(rows, number))
                if self._has_picture.setdefault(number, found is not None and bool(picture_parts(found))):
                    assert found is not None
                    return Place(rows, number), found
        inside, index = resolved(place)
        raise BadRowError(
            f"Expected a row with a picture in the {SEARCHED} rows that follow {inside.where(index)} in the run, got "
            "none. Add rows with pictures, give those that there are more weight (`--data SOURCE:WEIGHT`), or show no "
            f"text beside pictures ({TURNED_OFF})."
        )

    def _leave_out(self, chosen: Sequence[tuple[Place, dict[str, Any]]]) -> bool:
        """Whether an image among the chosen ones cannot be used. It is not chosen again."""
        found = False
        for place, row in chosen:
            error = self.distilling.error_of(picture_of(picture_parts(row)[0]))
            if error is None:
                continue
            rows, index = resolved(place)
            if self.on_bad is None:  # else it is named when its own turn comes
                self.refuse(place, reason_of(row, error, rows.folder_of(index)))
            found, self._has_picture[place.place] = True, False
        return found


def _read(place: Place) -> dict[str, Any] | None:
    rows, index = resolved(place)
    try:
        return rows.read(index)
    except (TypeError, ValueError):  # named when its own turn comes
        return None


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
    file = Table(str(folder / KEPT_TEXT_FILE), rows, range(len(rows)), digest_of_rows(rows))
    return Source(KEPT_TEXT_FILE, [file], None, weight)


def digest_of_rows(rows: Sequence[TextRow]) -> str:
    return hashlib.sha256(_lines(rows).encode()).hexdigest()


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
    asked = [Question([{"role": "user", "content": prompt}], answer="") for prompt in prompts]
    asker = Asker(model, processor, BATCH, MAX_NEW_TOKENS)
    answers = on_device(model, device, lambda: asker("Answering", asked))
    rows = [
        {"messages": [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer.strip()}]}
        for prompt, answer in zip(prompts, answers)
        if answer.strip()
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


def _fitting(rows: Sequence[TextRow], collate: DistillingCollator, picture: Any) -> tuple[list[TextRow], str | None]:
    """The rows that can be trained on beside an image, and what is wrong with the first of the others."""
    if picture is None:
        return list(rows), None

    def shown(read: list[TextRow]) -> Any:
        return collate(read, [picture] * len(read))

    held = Rows([source_of(rows, Path(), 1.0)], CAPTION_PROMPT)
    problems, _ = find_problems(held, range(len(held)), shown)
    bad = {problem.row for problem in problems}
    kept = [row for index, row in enumerate(rows) if index not in bad]
    return kept, problems[0].reason if problems else None
