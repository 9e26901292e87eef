"""Draws pictures of 224 to 336 pixels, with questions and answers: scenes, documents and charts.

python examples/scenes/make_scenes.py OUTPUT [--split train --rows 20000 --seed 0 --shards 40]

OUTPUT gets pictures and `metadata.jsonl`, one question a line, as `hf-xattn train` reads them. With --shards it gets
tar files in WebDataset's form: for each question KEY.jpg and KEY.json. Split, seed and number determine a picture and
its questions: other --rows or --shards give the same ones, more or fewer of them.

With --chats the questions about a picture are one row, a chat. With --captions OUTPUT gets the same pictures with one
caption each, `file_name` and `text`, in place of questions. With --statements the text says what can be asked of the
picture, in the words of answers. Both are for training, and for `hf-xattn train --align OUTPUT`.
"""

import argparse
import hashlib
import io
import json
import multiprocessing
import random
import sys
import tarfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from captions import caption_of
from charts import draw_chart
from documents import draw_form, draw_note
from drawing import SIDES, Asked, Drawn
from phrasings import KINDS, TEXT
from scenes import draw_scene
from splits import Split, open_split
from statements import answered, statements_of
from text_only import ask_without_picture


# Each picture has four questions, so eight pictures have four of each kind.
CYCLE = ("scene", "form", "scene", "chart", "scene", "note", "scene", "chart")
QUESTIONS = 4
TEXT_SHARE = 0.1  # of the rows
QUALITY = 90  # of JPEG
PART = 100  # pictures that a process draws at a time, for a folder
QUESTION_ROWS, CHAT_ROWS, CAPTION_ROWS, STATEMENT_ROWS = FORMS = ("questions", "chats", "captions", "statements")
DEFAULT_ROWS = {CHAT_ROWS: 5000, CAPTION_ROWS: 4000, STATEMENT_ROWS: 4000}


class Part(NamedTuple):
    """The work of one process: pictures `first` to `last`, of which `rows` rows are written."""

    split: Split
    first: int
    last: int
    rows: int
    target: Path  # a folder, or a tar file
    shard: bool
    form: str  # of `FORMS`


class Written(NamedTuple):
    """`lines` of `metadata.jsonl`, and the SHA-256 of all rows and pictures of the part."""

    lines: list[str]
    answers: Counter[tuple[str, str]]  # kind and answer, of questions
    pictures: int
    digest: str


def draw(split: Split, index: int) -> Drawn:
    """A picture of a split, and what is asked about it."""
    return _draw(split, index)[0]


def _draw(split: Split, index: int) -> tuple[Drawn, random.Random]:
    rng = random.Random(f"{split.name} {split.seed} {index}")
    side = rng.choice(SIDES)
    kind = CYCLE[index % len(CYCLE)]
    if kind == "scene":
        return draw_scene(rng, side), rng
    draw_any = {"form": draw_form, "note": draw_note, "chart": draw_chart}[kind]
    return draw_any(rng, side, split.fonts), rng


def texts_after(index: int, form: str = QUESTION_ROWS) -> int:
    """Number of rows without a picture that follow a picture."""
    if form in (CAPTION_ROWS, STATEMENT_ROWS):
        return 0
    each = TEXT_SHARE / (1 - TEXT_SHARE) * (QUESTIONS if form == QUESTION_ROWS else 1)
    return int((index + 1) * each) - int(index * each)


def rows_of(split: Split, index: int, form: str = QUESTION_ROWS) -> tuple[bytes, list[dict[str, Any]]]:
    """A picture as JPEG, and its rows, with the text rows that follow it, in one of `FORMS`.

    A row has `question`, `answer` and `kind`, and `file_name` if it is about the picture: then the answer first says
    what it is about, see [`found`]. A chat has `file_name` and `texts`, all questions with their answers; a caption has
    `file_name` and `text`, and so have statements.
    """
    drawn, rng = _draw(split, index)
    file = io.BytesIO()
    drawn.image.save(file, "JPEG", quality=QUALITY)
    name = {"file_name": f"{index:06}.jpg"}
    if form == CAPTION_ROWS:
        return file.getvalue(), [{**name, "text": caption_of(drawn)}]
    if form == STATEMENT_ROWS:
        return file.getvalue(), [{**name, "text": statements_of(drawn, rng)}]
    asked: list[dict[str, Any]] = [_in_words(split, each, rng) for each in drawn.asked]
    texts = [_in_words(split, ask_without_picture(rng), rng) for _ in range(texts_after(index, form))]
    if form == CHAT_ROWS:
        return file.getvalue(), [
            {**name, "texts": [{"user": each["question"], "assistant": each["answer"]} for each in asked]},
            *texts,
        ]
    return file.getvalue(), [{**name, **each} for each in asked] + texts


def _in_words(split: Split, asked: Asked, rng: random.Random) -> dict[str, str]:
    question = rng.choice(split.phrasings[asked.kind]).format(**asked.words)
    if asked.kind not in KINDS:
        return {"question": question, "answer": asked.answer, "kind": TEXT}
    return {"question": question, "answer": answered(asked), "kind": asked.kind}


def found(answer: str) -> str:
    """What an answer says, behind what it is about: `left` of `red square from blue heart: left`."""
    return answer.rpartition(": ")[2]


def write_part(part: Part) -> Written:
    """Draws and writes a part; the process of a worker begins here."""
    drawn = (rows_of(part.split, index, part.form) for index in range(part.first, part.last))
    rows = islice(((picture, row) for picture, rows in drawn for row in rows), part.rows)
    write = _write_shard if part.shard else _write_pictures
    digest, lines = hashlib.sha256(), []
    answers: Counter[tuple[str, str]] = Counter()
    names = set()
    for row, content in write(part, rows):
        line = json.dumps(row)
        digest.update(line.encode() + content)
        if "answer" in row:
            answers[row["kind"], found(row["answer"])] += 1
        names.add(row.get("file_name"))
        if not part.shard:
            lines.append(line)
    return Written(lines, answers, len(names - {None}), digest.hexdigest())


def _write_pictures(part: Part, rows: Iterator[tuple[bytes, dict[str, str]]]) -> Iterator[tuple[dict[str, str], bytes]]:
    last = None
    for picture, row in rows:
        name = row.get("file_name")
        new = name is not None and name != last
        if new:
            (part.target / str(name)).write_bytes(picture)
            last = name
        yield row, picture if new else b""


def _write_shard(part: Part, rows: Iterator[tuple[bytes, dict[str, str]]]) -> Iterator[tuple[dict[str, str], bytes]]:
    with tarfile.open(part.target, "w", format=tarfile.USTAR_FORMAT) as tar:
        for number, (picture, row) in enumerate(rows):
            key = f"{part.first:06}-{number:06}"
            fields = {name: value for name, value in row.items() if name != "file_name"}
            if "file_name" in row:
                _add(tar, f"{key}.jpg", picture)
            _add(tar, f"{key}.json", json.dumps(fields).encode())
            yield row, picture if "file_name" in row else b""


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    entry = tarfile.TarInfo(name)  # no time and no owner: equal bytes in every run
    entry.size = len(content)
    tar.addfile(entry, io.BytesIO(content))


def parts_of(split: Split, rows: int, output: Path, shards: int | None, form: str = QUESTION_ROWS) -> list[Part]:
    """The pictures for so many rows, in shards, or in pieces of a folder."""
    starts = [0]  # of the rows of each picture
    while starts[-1] < rows:
        starts.append(starts[-1] + (QUESTIONS if form == QUESTION_ROWS else 1) + texts_after(len(starts) - 1, form))
    pictures = len(starts) - 1
    count = shards or -(-pictures // PART)
    if count > pictures:
        raise ValueError(f"Expected --shards to be at most {pictures}, the pictures of {rows} rows, got {count}.")
    edges = [number * pictures // count for number in range(count + 1)]
    return [
        Part(
            split,
            first,
            last,
            min(rows, starts[last]) - starts[first],
            output / f"{split.name}-{number:05}.tar" if shards else output,
            bool(shards),
            form,
        )
        for number, (first, last) in enumerate(zip(edges, edges[1:]))
    ]


def table(answers: Counter[tuple[str, str]]) -> str:
    """What guessing is worth: the share of the most frequent answer of each kind."""
    lines = ["| kind | rows | different answers | most frequent answer |", "|---|---|---|---|"]
    for kind in (*KINDS, TEXT):
        own = Counter({answer: count for (each, answer), count in answers.items() if each == kind})
        if own:
            answer, most = own.most_common(1)[0]
            lines.append(f"| {kind} | {own.total()} | {len(own)} | {most / own.total():.1%} ({answer}) |")
    return "\n".join(lines)


def make(
    split: Split, output: Path, rows: int, shards: int | None = None, processes: int = 2, form: str = QUESTION_ROWS
) -> dict[str, Any]:
    """Writes a folder of pictures, or shards. Returns numbers of rows and pictures, answers, and a digest of all."""
    parts = parts_of(split, rows, output, shards, form)
    output.mkdir(parents=True)
    if processes == 1:
        written = list(map(write_part, parts))
    else:
        with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
            written = list(pool.map(write_part, parts))
    if not shards:
        lines = [f"{line}\n" for each in written for line in each.lines]
        (output / "metadata.jsonl").write_text("".join(lines))
    return {
        "rows": rows,
        "pictures": sum(each.pictures for each in written),
        "answers": sum((each.answers for each in written), Counter()),
        "digest": hashlib.sha256("".join(each.digest for each in written).encode()).hexdigest(),
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, help="a new folder")
    parser.add_argument("--split", choices=("train", "development", "sealed"), default="train")
    parser.add_argument(
        "--rows", type=int, help="default: 20000 to train, 2000 for development; not for the sealed test"
    )
    forms = parser.add_mutually_exclusive_group()
    for form, what in {
        CHAT_ROWS: "a chat for each picture",
        CAPTION_ROWS: "a caption for each picture",
        STATEMENT_ROWS: "what can be asked of each picture, as statements",
    }.items():
        about = f"{what} (default of --rows: {DEFAULT_ROWS[form]})"
        forms.add_argument(f"--{form}", dest="form", action="store_const", const=form, help=about)
    parser.set_defaults(form=QUESTION_ROWS)
    parser.add_argument("--seed", type=int, help="default: 0; not for the sealed test")
    parser.add_argument("--shards", type=int, help="write so many tar files")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--open-sealed", action="store_true", help="open the sealed test: once, at the end")
    options = parser.parse_args(arguments)
    for name in ("rows", "shards", "processes"):
        if (value := getattr(options, name)) is not None and value < 1:
            parser.error(f"expected --{name} to be at least 1, got {value}")
    if options.split == "sealed" and (options.rows, options.seed) != (None, None):
        parser.error("expected no --rows and no --seed with --split sealed: its list has them")
    form = options.form
    if form != QUESTION_ROWS and options.split != "train":
        parser.error(f"expected --{form} with --split train, whose pictures may be learned from, got {options.split}")
    if options.output.exists():
        parser.error(f"expected a new folder, got {options.output}, which exists: remove it, or name another one")
    start = time.perf_counter()
    try:
        split = open_split(options.split, options.seed or 0, options.open_sealed)
        rows = options.rows or DEFAULT_ROWS.get(form, split.rows)
        made = make(split, options.output, rows, options.shards, options.processes, form)
    except ValueError as error:
        parser.error(str(error))
    seconds = time.perf_counter() - start
    if form == QUESTION_ROWS:
        print(table(made["answers"]))
    print(f"{made['rows']} rows about {made['pictures']} pictures: {options.output}")
    print(f"SHA-256 of rows and pictures: {made['digest']}")
    print(f"{made['rows'] / seconds:.0f} rows a second", file=sys.stderr)


if __name__ == "__main__":
    main()
