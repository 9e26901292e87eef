"""The rows of a run of `hf-xattn train`: opens, checks and splits them, and puts them into their order."""

from __future__ import annotations

import hashlib
import math
import os
import random
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from ..data.forms import CAPTION_PROMPT
from ..data.loading import Rows, Shuffled, load_rows, load_rows_once
from ..data.pictures import digest_of, picture_of, picture_parts
from .bad_rows import BadRowsFile, Collate, Places, Problem, RowReader, find_problems, list_problems
from .collator import XAttnDataCollator
from .kept_text import (
    PROMPTS,
    TURNED_OFF,
    DistillingCollator,
    DistillingReader,
    TextRow,
    read_prompts,
    source_of,
)
from .launch import gpus_of_a_process, num_processes, say
from .training_options import NONE, SKIP, TrainingOptions


CHECKED = 100  # rows of each kind that are checked before a run. Every row is also checked when it is read
STREAM_ROWS = 20_000  # of more rows, only this many are searched for what a run needs, and images are not compared
MOST_TRIED = 1000  # most images that are tried until one can be used for text rows
ALIGN_ROWS = 2000  # most rows for the start: more rows take longer and mostly repeat the same words


class RunData:
    """The rows to train on and to evaluate on.

    Raises:
        ValueError: for a source that cannot be opened, and for `--prompt` if no row is a caption.
    """

    def __init__(self, options: TrainingOptions):
        self.options = options
        prompt = options.prompt or CAPTION_PROMPT
        self.rows = load_rows(options.data, options.pictures, prompt)
        self.others = None
        if options.eval_data is not None:
            self.others = load_rows_once("--eval-data", options.eval_data, options.pictures, prompt)
        self.aligned: Rows | None = None
        if options.align not in (None, NONE):
            self.aligned = load_rows_once("--align", options.align, options.pictures, prompt)
        self.total = sum(map(len, self._sources()))  # number of all rows, including those that are left out later
        self.prompts = read_prompts(options.text_prompts or PROMPTS) if options.share_of_text else []
        self.mixed = self.rows  # the rows to train on, and the text prompts that are mixed into them
        self.streams = options.stream or len(self.rows) > STREAM_ROWS
        self.longest: int | None = None
        self._found: list[tuple[Rows, list[Problem]]] = []
        if options.prompt is not None and not any(
            rows.is_caption(index) for rows in self._sources() for index in _some(rows, STREAM_ROWS)
        ):
            raise ValueError(
                f"Expected a row with the field `text` for `--prompt`, the question of captions, got none in "
                f"{self._first_file()}. Remove `--prompt`, or write captions as `file_name` and `text`."
            )

    def fingerprints(self) -> list[str]:
        """Returns what must be equal when the run is resumed. Reads all images, except with many rows or `--stream`."""
        return [
            f"{rows.fingerprint} {'' if self.streams else digest_of_pictures(rows)}".strip() for rows in self._sources()
        ]

    def check(self, collate: Collate) -> None:
        """Checks some rows to train on and to evaluate on, and whether the rows to train on have what the run needs.

        With `--bad-rows skip`, all rows to evaluate on are checked, and bad ones are removed. If they were replaced by
        other rows during the run, those would count twice in the loss.

        Raises:
            ValueError: for rows that cannot be trained on, which the message lists, and for data without an image or
                without the text rows that the options need.
        """
        options = self.options
        if options.eval_share is not None:
            self.rows, self.others = hold_out(self.rows, options.eval_share, options.seed)
            self.mixed = self.rows
        self._check_rows(collate)
        searched = _some(self.rows, STREAM_ROWS)
        place = f"{'' if len(searched) == len(self.rows) else f'{STREAM_ROWS} rows of '}{self._first_file()}"
        if not options.train_text and not any(_pictures_of(self.rows, index) for index in searched):
            raise ValueError(
                f"Expected an image in {place}, got none: blocks learn only from rows with an image, and the text "
                "model is frozen. Add images, or train the text model with `--train-text`."
            )
        asked = options.distill_text is not None and not self.prompts
        if asked and not any(map(self._is_text, searched)):
            raise ValueError(
                f"Expected a row without an image in {place} for `--distill-text`, got none. Add such rows, for "
                "example as a second source (`--data`), or leave `--distill-text` out."
            )

    @property
    def epoch_rows(self) -> int:
        """Number of rows that an epoch reads: those of the sources, by their weights, and the text prompts."""
        return Shuffled(self.mixed, 0).epoch_rows

    def steps(self) -> int:
        """Number of optimizer steps of the run."""
        return self.options.steps or math.ceil(self.steps_of_an_epoch() * self.options.epochs)

    def steps_of_an_epoch(self) -> int:
        return math.ceil(self.epoch_rows / self.rows_of_a_step)

    @property
    def rows_of_a_step(self) -> int:
        # Each process reads its own batches. A step averages the gradients over the labels of all processes.
        batch_size = self.options.batch_size * gpus_of_a_process(self.options.device)
        return batch_size * self.options.gradient_accumulation * num_processes()

    def in_order(self) -> Places:
        """Returns all rows of the run in their order, as places."""
        return Places(Shuffled(self.mixed, self.steps() * self.rows_of_a_step, self.options.seed))

    def held_out(self) -> Places | None:
        return None if self.others is None else Places(self.others)

    def to_align(self, collate: Collate) -> Rows | None:
        """Returns the rows whose words give a fresh model its start, evenly spaced. None with `--align none`."""
        if self.options.align == NONE:
            return None
        rows = self.rows if self.aligned is None else self.aligned
        count = min(len(rows), ALIGN_ROWS)
        if count < len(rows):
            rows = rows.split([number * len(rows) // count for number in range(count)])[1]
        if self.options.bad_rows == SKIP:
            problems, _ = find_problems(rows, range(count), collate)
            rows = rows.split([problem.row for problem in problems])[0]
        return rows

    def reader(self, collate: XAttnDataCollator) -> RowReader:
        skips = self.options.bad_rows == SKIP
        kind = RowReader if self.options.weight_of_text is None else DistillingReader
        return kind(collate, self.bad_rows().add if skips else None)

    def bad_rows(self) -> BadRowsFile:
        return BadRowsFile(self.options.output, self.options.bad_rows_limit)

    def named(self) -> str:
        """Names the sources for the model card. Others read the card, so paths are left out."""
        told = []
        for source in self.rows.sources:
            path = Path(source.name).resolve()
            told.append(f"the folder {path.name}" if path.is_dir() else path.name if path.is_file() else source.name)
        return ", ".join(name.rpartition("/")[2] if name.startswith(("/", ".")) else name for name in told)

    def say(self) -> None:
        """Prints how many rows the run reads, and of which kinds."""
        held_out = 0 if self.others is None else len(self.others)
        told = "read as they come" if self.longest is None else f"at most {self.longest} tokens each"
        say(f"{len(self.rows)} examples to train on, {held_out} to evaluate on, {told}")
        if not self.streams and (known := self._with_known_pictures()):
            say(f"{known} of the examples to evaluate on show images that are trained on, too")
        distilled = not self.streams and self.options.weight_of_text is not None
        if distilled and (own := sum(map(self._is_text, range(len(self.rows))))):
            say(f"{own} of the examples have no image: they are shown with images of others ({TURNED_OFF})")
        if self.epoch_rows != len(self.rows):
            weights = ", ".join(f"{source.name} {source.weight:g}" for source in self.rows.sources)
            say(f"{self.epoch_rows} examples in an epoch, by weights: {weights}")

    def mix(self, texts: list[TextRow]) -> None:
        """Mixes text prompts into the rows to train on, as many as `--text-share` says, and prints their number."""
        if not texts:
            say("No text prompt is left, so the model may lose its text ability beside an image.")
            return
        others, share = self.epoch_rows, self.options.share_of_text
        count = max(1, round(others * share / (1 - share)))
        self.mixed = self.rows.with_source(source_of(texts, self.options.output, count / len(texts)))
        told = f"{self.epoch_rows - others} text prompts are added to the {others} examples of an epoch"
        say(f"{told} (`--text-share {share:g}`)")

    def _sources(self) -> list[Rows]:
        return [self.rows] if self.others is None else [self.rows, self.others]

    def _first_file(self) -> str:
        return self.rows.sources[0].files[0].path

    def _is_text(self, index: int) -> bool:
        return _pictures_of(self.rows, index) == []

    def _with_known_pictures(self) -> int:
        """Counts the rows to evaluate on that show an image of a row to train on. Paths or bytes are compared."""
        if self.others is None:
            return 0
        trained, others = (
            [{_name_of(part) for part in _pictures_of(rows, index) or []} for index in range(len(rows))]
            for rows in (self.rows, self.others)
        )
        known = set[str]().union(*trained)
        return sum(not known.isdisjoint(pictures) for pictures in others)

    def _as_trained(self, collate: Any) -> Collate:
        """Returns a collator for the check that treats text rows as the training does: it shows them with an image."""
        if self.options.weight_of_text is None:
            return collate
        distilling = DistillingCollator(collate)
        some = self.some_picture(distilling)
        if some is None:  # `check` raises an error for data without an image
            return collate
        return lambda rows: distilling(rows, [None if picture_parts(row) else some for row in rows])

    def some_picture(self, distilling: DistillingCollator) -> Path | bytes | None:
        """Returns an image of the data that can be used for text rows, or None if none of those tried can be used."""
        parts = (part for index in _some(self.rows, STREAM_ROWS) for part in _pictures_of(self.rows, index) or [])
        tried = islice(map(picture_of, parts), MOST_TRIED)
        return next((each for each in tried if distilling.error_of(each) is None), None)

    def _check_rows(self, collate: Collate) -> None:
        skips, told, checked, longest = self.options.bad_rows == SKIP, list[str](), 0, 0
        for rows in self._sources():
            trained = rows is self.rows
            chosen = range(len(rows)) if skips and not trained else _some(rows, CHECKED)
            chosen = [] if trained and self.options.stream else chosen
            problems, tokens = find_problems(rows, chosen, self._as_trained(collate) if trained else collate)
            self._found.append((rows, problems))
            checked, longest = checked + len(chosen), max(longest, tokens)
            if problems:
                told.append(list_problems(rows, problems))
                told += [f"Of {len(rows)} rows, {len(chosen)} were checked."] * (len(chosen) < len(rows))
        self.longest = longest if checked == self.total else None
        bad = sum(len({problem.row for problem in problems}) for _, problems in self._found)
        if skips and bad > self.options.bad_rows_limit * self.total:
            limit = f"Expected at most {self.options.bad_rows_limit:.2%} of {self.total} rows to be bad"
            raise ValueError("\n".join([f"{limit} (`--bad-rows-limit`), got {bad}.", *told]))
        if told and not skips:
            raise ValueError("\n".join(told))
        if skips and self.others is not None:
            self.others, _ = self.others.split([problem.row for problem in self._found[-1][1]])

    def write_bad_rows(self) -> None:
        """Writes the bad rows that [`check`] has found to the file in the folder of the run."""
        file = self.bad_rows()
        for rows, problems in self._found:
            for problem in problems:
                file.add(rows, problem)


def _some(rows: Rows, count: int) -> Sequence[int]:
    """Returns indices of rows: all, or `count` random ones. Evenly spaced rows could miss what repeats in the data."""
    return range(len(rows)) if len(rows) <= count else sorted(random.Random(0).sample(range(len(rows)), count))


def _pictures_of(rows: Rows, index: int) -> list[dict[str, Any]] | None:
    """Returns the parts of a row that are images, or None for a broken row."""
    try:
        return picture_parts(rows.read(index))
    except (TypeError, ValueError):
        return None


def digest_of_pictures(rows: Rows) -> str:
    """Returns a hash that changes if an image of the rows changes. Reads all images."""
    digest = hashlib.sha256()
    for index in range(len(rows)):
        for picture in map(picture_of, _pictures_of(rows, index) or []):
            if isinstance(picture, bytes) or os.path.isfile(picture):
                digest.update(digest_of(picture).encode())
    return digest.hexdigest()


def _name_of(part: dict[str, Any]) -> str:
    picture = picture_of(part)
    return digest_of(picture) if isinstance(picture, bytes) else str(picture)


def hold_out(rows: Rows, share: float, seed: int) -> tuple[Rows, Rows]:
    """Splits rows at random into rows to train on and a `share` to evaluate on. Each has at least one row."""
    total = len(rows)
    if total < 2:
        raise ValueError(f"`--eval-share` needs two examples or more, got {total}.")
    count = min(max(1, round(total * share)), total - 1)
    return rows.split(random.Random(seed).sample(range(total), count))
