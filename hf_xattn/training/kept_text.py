"""Keeps text answers when a chat holds an image (`--text-share` and `--distill-text`).

Blocks that are trained on image questions only treat every question as one about the image. So a run mixes in text
prompts, which the text model answers once before the run. If somebody else wrote the answers, the blocks would not
learn how the text model continues its own answers.

Usual training cannot use such rows. Without an image no block runs, so with a frozen text model these rows give no
gradient. They are therefore shown with the image of another row, and each token of the answer is trained to be as
likely as without the image:

    loss = (cross-entropy of rows with an image + WEIGHT * KL(without the image || beside it)) / labels

Both sums are over the labels of their rows in all batches and processes of a step. Both are divided by the number of
all these labels. The teacher needs no memory of its own: without an image the blocks change nothing, so the model
itself, called without the image, is exactly the text model.

A text row gets the image of the next row of the run that has one. This depends only on the row's place in the run, so
a resumed run shows the same image, whichever process or worker reads the row.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list

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
from .bad_rows import BadRowError, Place, Problem, RowReader, reason_of, resolved
from .collator import XAttnDataCollator
from .launch import is_first_process, on_device, say


KEPT_TEXT_FILE = "kept_text.jsonl"
PROMPTS = Path(__file__).with_name("text_prompts.txt")  # the prompts that come with the package
BATCH, MAX_NEW_TOKENS = 16, 32
SEARCHED = 4096  # most rows behind a text row that are searched for an image
KNOWN = 2**16  # most places of which a reader remembers whether they have an image
DISTILLED, TEACHER = "distilled", "teacher_"  # a name, and the beginning of names, in a batch
TURNED_OFF = "`--text-share 0` without `--distill-text` turns it off"
# A chat that works with any image, to test whether an image can be used.
NEUTRAL = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


TextRow = dict[str, Any]  # `messages`: a prompt, and the text model's answer


def beside(row: Mapping[str, Any], picture: Path | bytes) -> dict[str, Any]:
    """Returns the row with an image, which the collator puts in front of the first user message."""
    return {**row, "images": [picture]}


class DistillingCollator:
    """Makes batches in which text rows are shown with an image of another row, and a second time without it.

    Args:
        collate ([`XAttnDataCollator`]): makes the batches. It must keep one text a row (no `padding_free`).
    """

    def __init__(self, collate: XAttnDataCollator):
        self.collate = collate

    def __call__(self, rows: Sequence[Mapping[str, Any]], pictures: Sequence[Any]) -> dict[str, torch.Tensor]:
        """Makes a batch.

        Args:
            rows (`Sequence`): rows as for [`XAttnDataCollator`].
            pictures (`Sequence`): for each text row that is distilled, the image to show it with; None for all others.

        Returns:
            `dict`: the batch of [`XAttnDataCollator`]. If rows are distilled, it also has `distilled` `(batch,)`, which
            is True for these rows, and `teacher_input_ids`, `teacher_attention_mask` and `teacher_labels`, each
            `(distilled rows, teacher_len)`: these rows without the image. Their labels are the same tokens as those
            with the image.

        Raises:
            ValueError, TypeError: as the collator, and for a text whose answer has other tokens with an image.
        """
        given = [picture is not None for picture in pictures]
        shown = [row if picture is None else beside(row, picture) for row, picture in zip(rows, pictures, strict=True)]
        try:
            batch = self.collate(shown)
        except (TypeError, ValueError) as error:
            if given != [True]:
                raise
            raise type(error)(f"{error} The row was shown with the image of another row ({TURNED_OFF}).") from error
        if not any(given):
            return batch
        teacher = self.collate([row for row, chosen in zip(rows, given) if chosen])
        ends = []
        for row, own in zip([index for index, chosen in enumerate(given) if chosen], teacher["labels"]):
            student, length = batch["labels"][row], int(batch["attention_mask"][row].sum())
            said, places = student[student != IGNORED], (own != IGNORED).nonzero().flatten()
            places, left = places[: len(said)], places[len(said) :]
            # The marker makes the text longer, so `max_length` may cut off more of the answer than without the image.
            whole = self.collate.max_length is None or length < self.collate.max_length
            if not torch.equal(own[places], said) or (whole and len(left)):
                raise ValueError(
                    f"Row {row} of the batch: Expected the same answer tokens with an image in front of the text as "
                    "without one, got others: the chat template or the tokenizer writes the answer in another way "
                    f"beside an image. Change the template, or train without this ({TURNED_OFF})."
                )
            own[left] = IGNORED
            ends.append(int(places[-1]) + 1)
        if self.collate.padding_side == "right":
            teacher = {name: tensor[:, : max(ends)] for name, tensor in teacher.items()}
        batch[DISTILLED] = torch.tensor(given)
        return {**batch, **{f"{TEACHER}{name}": tensor for name, tensor in teacher.items()}}

    def error_of(self, picture: Path | bytes) -> Exception | None:
        """Returns the error of an image that cannot be used for text rows, or None."""
        try:
            self.collate([beside({"messages": NEUTRAL}, picture)])
        except (TypeError, ValueError) as error:
            return error
        return None


class DistillingReader(RowReader):
    """Reads the rows of a batch, and shows each text row with the image of the next row that has one.

    Rows to evaluate on are not changed. The arguments are those of [`RowReader`].
    """

    def __init__(self, collate: XAttnDataCollator, on_bad: Callable[[Rows, Problem], Any] | None):
        super().__init__(collate, on_bad)
        self.distilling = DistillingCollator(collate)
        self._has_picture: dict[int, bool] = {}  # by the place in the run

    def batch_of(self, read: Sequence[tuple[Place, dict[str, Any]]]) -> dict[str, torch.Tensor]:
        while True:
            chosen = [self._picture_for(place, row) for place, row in read]
            pictures = [None if each is None else picture_of(picture_parts(each[1])[0]) for each in chosen]
            try:
                return self.distilling([row for _, row in read], pictures)
            except (TypeError, ValueError):
                # If an image cannot be read, the row that it comes from is bad, not the text row.
                if not self._leave_out([each for each in chosen if each is not None]):
                    raise

    def _picture_for(self, place: Place, row: dict[str, Any]) -> tuple[Place, dict[str, Any]] | None:
        """Returns the row whose image a text row is shown with. None for a row with an image, or to evaluate on."""
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
            f"Expected a row with an image in the {SEARCHED} rows that follow {inside.where(index)} in the run, got "
            "none. Add rows with images, give them more weight (`--data SOURCE:WEIGHT`), or do not show text rows with "
            f"images ({TURNED_OFF})."
        )

    def _leave_out(self, chosen: Sequence[tuple[Place, dict[str, Any]]]) -> bool:
        """Returns whether one of the chosen images cannot be used. Such an image is not chosen again."""
        found = False
        for place, row in chosen:
            error = self.distilling.error_of(picture_of(picture_parts(row)[0]))
            if error is None:
                continue
            rows, index = resolved(place)
            if self.on_bad is None:  # otherwise its row is named when the run reads it
                self.refuse(place, reason_of(row, error, rows.folder_of(index)))
            found, self._has_picture[place.place] = True, False
        return found


def _read(place: Place) -> dict[str, Any] | None:
    rows, index = resolved(place)
    try:
        return rows.read(index)
    except (TypeError, ValueError):  # the row is named when the run reads it
        return None


def read_prompts(file: Path) -> list[str]:
    """Returns the lines of a text file, without empty and repeated ones.

    Raises:
        OSError: for a file that is missing or cannot be read.
        ValueError: for a file that has no prompt, or is not in UTF-8.
    """
    lines = file.read_text(encoding="utf-8-sig").split("\n")
    prompts = list(dict.fromkeys(line.strip() for line in lines if line.strip()))
    if not prompts:
        raise ValueError(f"Expected `--text-prompts` to have a prompt in each line, got {file} without one.")
    return prompts


def text_rows(
    model: XAttnForConditionalGeneration,
    processor: XAttnProcessor,
    prompts: Sequence[str],
    collate: DistillingCollator,
    picture: Path | bytes | None,
    folder: Path,
    device: torch.device,
) -> list[TextRow]:
    """Returns the prompts with answers of the text model, from the folder of the run or newly made and saved there.

    All processes call this. The first one answers and sends the rows to the others, which may not see its folder.

    Args:
        collate ([`DistillingCollator`]): checks whether the rows can be trained on.
        picture (`Any`): the image that the check shows the rows with. None leaves out the check.
        folder (`Path`): the folder of the run.
        device (`torch.device`): where the first process runs the text model.
    """
    rows: list[list[TextRow]] = [[]]
    if is_first_process():
        file = folder / KEPT_TEXT_FILE
        if not file.is_file():
            say(f"The text model answers {len(prompts)} text prompts, which keep its text ability ({TURNED_OFF})")
            asked = [Question([{"role": "user", "content": prompt}], answer="") for prompt in prompts]
            asker = Asker(model, processor, BATCH, MAX_NEW_TOKENS)
            answers = on_device(model, device, lambda: asker("Answering", asked))
            answered = [
                {"messages": [*question.messages, {"role": "assistant", "content": answer.strip()}]}
                for question, answer in zip(asked, answers)
                if answer.strip()
            ]
            part = file.with_name(f".{file.name}.part")
            part.write_text(_lines(_fitting(answered, collate, picture)), encoding="utf-8")
            replace_file(part, file)
        rows = [[json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]]
        say(f"{len(rows[0])} of {len(prompts)} text prompts have an answer to train on: {file}")
    return broadcast_object_list(rows)[0]


def source_of(rows: Sequence[TextRow], folder: Path, weight: float) -> Source:
    """Makes a source of rows that are held in memory. Errors name the file of these rows in the run's folder."""
    file = Table(str(folder / KEPT_TEXT_FILE), rows, range(len(rows)), digest_of_rows(rows))
    return Source(KEPT_TEXT_FILE, [file], None, weight)


def digest_of_rows(rows: Sequence[TextRow]) -> str:
    return hashlib.sha256(_lines(rows).encode()).hexdigest()


def _lines(rows: Sequence[TextRow]) -> str:
    return "".join(f"{json.dumps(row)}\n" for row in rows)


def _fitting(rows: list[TextRow], collate: DistillingCollator, picture: Any) -> list[TextRow]:
    """Returns the rows that can be trained on with an image, and prints why the first of the others cannot."""
    if picture is None:
        return rows
    kept, errors = list[TextRow](), list[Exception]()
    for row in rows:
        try:
            collate([row], [picture])
            kept.append(row)
        except (TypeError, ValueError) as error:
            errors.append(error)
    if errors:
        say(f"{len(errors)} are left out: {str(errors[0]).partition(': ')[2]}")  # without "Row 0 of the batch"
    return kept
