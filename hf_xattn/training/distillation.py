"""`--text-share` and `--distill-text`: a picture must not change what does not concern it.

With a frozen text model a row without a picture gives no gradient: no block runs. Here such a row is shown beside the
picture of another row, and its answers are trained to be those of the model without the picture, token by token:

    loss = (cross-entropy of rows with a picture + WEIGHT * KL(without the picture || beside it)) / labels

summed over the labels of each kind of row, and divided by the labels of both, over all batches and processes of a step.
Without a picture the blocks change nothing, so the teacher is the same model in the same memory: exactly the base.

The picture of a row is that of the next row of the run that has one. That is a function of the row's place, so a run
that is resumed shows the same one, whichever process or worker reads it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..data.loading import Rows
from ..data.pictures import picture_of, picture_parts
from ..decoders.loss import IGNORED
from .bad_rows import BadRowError, BadRowsFile, Place, RowReader, reason_of, resolved
from .collator import XAttnDataCollator


SEARCHED = 4096  # rows behind one without a picture that are searched for one
KNOWN = 2**16  # places that a reader remembers
DISTILLED, TEACHER = "distilled", "teacher_"  # names in a batch
TURNED_OFF = "`--text-share 0` without `--distill-text` turns it off"
NEUTRAL = ("a", "b")  # a question and an answer that any picture fits


def picture_source(part: Mapping[str, Any]) -> str | bytes:
    """The picture of a part, as the column `images` takes it."""
    picture = picture_of(part)
    return picture if isinstance(picture, bytes) else str(picture)


def beside(row: Mapping[str, Any], picture: Any) -> dict[str, Any]:
    """The row with a picture where the pictures of rows stand: in front of the first user message."""
    return {**row, "images": [picture]}


class DistillingCollator:
    """Makes batches in which some rows stand beside a picture that they do not have, and once more without it.

    Args:
        collate ([`XAttnDataCollator`]): makes the batches, one text a row.
    """

    def __init__(self, collate: XAttnDataCollator):
        self.collate = collate

    def __call__(self, rows: Sequence[Mapping[str, Any]], pictures: Sequence[Any]) -> dict[str, torch.Tensor]:
        """Makes a batch. `pictures` has a picture for each row to distil, and None for each other one.

        Returns:
            `dict`: the batch of [`XAttnDataCollator`]. If a row has a picture given, also `distilled` `(batch,)`, True
            for such rows, and `teacher_input_ids`, `teacher_attention_mask` and `teacher_labels` `(rows to distil,
            teacher_len)`, the same rows without it. The labels of both are the same tokens.

        Raises:
            ValueError, TypeError: as the collator, and for a text that has other answer tokens beside a picture.
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
        """Why no text can stand beside a picture, or None."""
        question, answer = NEUTRAL
        chat = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        try:
            self.collate([beside({"messages": chat}, picture)])
        except (TypeError, ValueError) as error:
            return error
        return None


class DistillingReader(RowReader):
    """Reads the rows of a batch, and shows each row without a picture beside that of the next row that has one.

    Rows to evaluate on stay as they are. Arguments as of [`RowReader`].
    """

    def __init__(self, collate: XAttnDataCollator, file: BadRowsFile | None):
        super().__init__(collate, file)
        self.distilling = DistillingCollator(collate)
        self._has_picture: dict[int, bool] = {}  # of places of the run: what the data say, however often it is asked

    def batch_of(self, read: Sequence[tuple[Place, dict[str, Any]]]) -> Any:
        while True:
            chosen = [self._picture_for(place, row) for place, row in read]
            pictures = [None if each is None else _first_picture(each[1]) for each in chosen]
            try:
                return self.distilling([row for _, row in read], pictures)
            except (TypeError, ValueError):
                # A picture that cannot be read is the fault of its own row.
                if not self._leave_out([each for each in chosen if each is not None]):
                    raise

    def _picture_for(self, place: Place, row: dict[str, Any]) -> tuple[Place, dict[str, Any]] | None:
        """The row whose picture a row is shown beside. None for one with a picture of its own, or to evaluate on."""
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
        """Whether a picture among the chosen ones cannot be used. It is not chosen again."""
        found = False
        for place, row in chosen:
            error = self.distilling.error_of(_first_picture(row))
            if error is None:
                continue
            rows, index = resolved(place)
            if self.file is None:  # else it is named when its own turn comes
                self.refuse(place, reason_of(row, error, rows.folder_of(index)))
            found, self._has_picture[place.place] = True, False
        return found


def _read(place: Place) -> dict[str, Any] | None:
    rows, index = resolved(place)
    try:
        return rows.read(index)
    except (TypeError, ValueError):  # named when its own turn comes
        return None


def _first_picture(row: dict[str, Any]) -> str | bytes:
    return picture_source(picture_parts(row)[0])
