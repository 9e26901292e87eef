"""The rows, splits and files of `examples/scenes`."""

import hashlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import tarfile
from collections import Counter

import fonts
import make_scenes
import numpy as np
import phrasings
import pytest
import splits
from documents import LINES
from drawing import write
from make_scenes import QUESTIONS, draw, found, rows_of
from patch_labels import CHARACTERS, HEADS, PATCHES, VOCABULARY, label_patches
from PIL import Image, ImageDraw
from scenes import COLOURS, NUMBERS, OUTLINES
from sealed_list import placeholders, plain

from helpers.checkout import EXAMPLES
from helpers.models.word_models import make_text_checkpoint
from helpers.references.own_sealed_list import put_list


FOLDER = EXAMPLES / "scenes"
SEALED = {
    "seed": "a test of the sealed test",
    "rows": 60,
    "fonts": [fonts.PILLOW, "cmtt10"],
    "phrasings": {kind: [f"Sealed: {each[0]}"] for kind, each in phrasings.TRAIN.items()},
}
# Where answers are equally frequent, so many can be told apart.
ANSWERS = {"count": 6, "compare": 48, "relate": 4, "locate": 9, "find": 6, "rank": 24, "value": 18}
PICTURES = 1000


@pytest.fixture
def seal(tmp_path, monkeypatch):
    """Puts another list in the place of the sealed one, with its SHA-256. No test opens the real one."""

    def put(**changes):
        file = put_list(tmp_path, {**SEALED, **changes})
        monkeypatch.setattr(splits, "SEALED", file)
        return file

    return put


def stopped(capsys, *arguments):
    """What a run that stops says."""
    with pytest.raises(SystemExit) as stop:
        make_scenes.main(list(map(str, arguments)))
    assert stop.value.code == 2
    return capsys.readouterr().err


@pytest.fixture(scope="module")
def rows():
    """Rows of many pictures, by kind."""
    split = splits.open_split("train", 5)
    by_kind = {}
    for index in range(PICTURES):
        for row in rows_of(split, index)[1]:
            by_kind.setdefault(row["kind"], []).append(row)
    return by_kind


def test_kinds_and_answers_are_equally_frequent(rows):
    """A model that always says the same, and is right more often than one of so many answers."""
    each = {kind: len(rows[kind]) for kind in phrasings.KINDS}
    assert max(each.values()) - min(each.values()) == 0
    assert len(rows[phrasings.TEXT]) == pytest.approx(0.1 * sum(map(len, rows.values())), abs=1)
    for kind, number in ANSWERS.items():
        counts = Counter(found(row["answer"]) for row in rows[kind])
        expected = each[kind] / number
        assert len(counts) == number
        # Four and a half standard deviations of a count, for the largest of many.
        assert max(counts.values()) <= expected + 4.5 * expected**0.5, (kind, counts.most_common(3))
    assert Counter(found(row["answer"]) for row in rows["read"]).most_common(1)[0][1] < 0.04 * each["read"]


def test_questions_alone_give_nothing_away(rows):
    """Answers that can be learnt from the words of the question: a bag of words, tried on questions it has not seen."""
    pytest.importorskip("sklearn")
    from sklearn.feature_extraction.text import CountVectorizer
    from sklearn.model_selection import cross_val_predict
    from sklearn.naive_bayes import MultinomialNB

    for kind, number in {**ANSWERS, "read": 36}.items():  # of the field with the fewest values
        asked = [row["question"] for row in rows[kind]]
        wanted = np.array([found(row["answer"]) for row in rows[kind]])
        words = CountVectorizer(ngram_range=(1, 2), token_pattern=r"\w+").fit_transform(asked)
        guessed = cross_val_predict(MultinomialNB(), words, wanted, cv=3)
        share, guess = (guessed == wanted).mean(), 1 / number
        assert share <= guess + 4.5 * (guess * (1 - guess) / len(wanted)) ** 0.5, (kind, share)


def test_a_question_names_what_it_is_about(rows):
    """A question with braces that nothing has filled, or without the words that make it one."""
    for kind in phrasings.KINDS:
        templates = [re.escape(each) for each in phrasings.TRAIN[kind]]
        patterns = [re.sub(r"\\{(\w+)\\}", r"(?P<\1>[\\w ]+)", each) for each in templates]
        used = Counter()
        for row in rows[kind]:
            fitting = [pattern for pattern in patterns if re.fullmatch(pattern, row["question"])]
            assert fitting, row
            (words,) = [re.fullmatch(pattern, row["question"]).groupdict() for pattern in fitting]
            about = " from ".join(words[name] for name in ("one", "other") if name in words) or "".join(words.values())
            assert row["answer"] == f"{about}: {found(row['answer'])}"
            used.update(fitting)
        assert min(used[pattern] for pattern in patterns) > 0.5 * len(rows[kind]) / len(patterns)


def test_text_rows_are_right(rows):
    """Text rows that teach a language model what is not so."""
    facts = {"France": "Paris", "Norway": "Oslo", "Monday": "Tuesday", "Sunday": "Monday", "hot": "cold", "up": "down"}
    seen = set()
    for row in rows[phrasings.TEXT]:
        assert "file_name" not in row
        if numbers := re.findall(r"\d+", row["question"]):
            assert int(row["answer"]) == sum(map(int, numbers))
        for word in set(re.findall(r"\w+", row["question"])) & set(facts):
            assert row["answer"] in (facts[word], word.upper())
            seen.add(word)
    assert seen == set(facts)


def test_no_phrasing_is_in_two_splits():
    """A new phrasing that differs from one of training by a comma. Several each, with the same braces."""
    for kind, train in phrasings.TRAIN.items():
        development = phrasings.DEVELOPMENT[kind]
        assert len({plain(each) for each in (*train, *development)}) == len(train) + len(development)
        if kind in phrasings.KINDS:
            assert len(train) >= 6 and len(development) >= 3
        assert len({frozenset(placeholders(each)) for each in (*train, *development)}) == 1
    assert set(phrasings.TRAIN) == set(phrasings.DEVELOPMENT)
    assert not set(fonts.TRAIN) & set(fonts.DEVELOPMENT)


def test_no_picture_is_in_two_splits(seal):
    """Splits that draw the same pictures from the same seed, or fonts of another split."""
    seal(seed="0")
    each = [splits.open_split(name, 0, open_sealed=True) for name in ("train", "development", "sealed")]
    seen, used = [], []
    for split in [*each, splits.open_split("train", 1)]:
        drawn = [draw(split, index) for index in range(160)]
        seen.append({hashlib.sha256(one.image.tobytes()).digest() for one in drawn})
        used.append({word.font for one in drawn for word in one.words})
        assert used[-1] == set(split.fonts) and len(seen[-1]) == 160
    assert len(set().union(*seen)) == 4 * 160
    assert not used[0] & used[1] and not used[0] & used[2] and not used[1] & used[2]


def contents(folder):
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


def test_the_same_seed_gives_the_same_bytes(tmp_path):
    """Pictures or rows that depend on the process, on the number of processes, or on the order of a set."""
    said = []
    for name, seed, processes in (("a", "1", "1"), ("b", "2", "2")):
        command = [sys.executable, str(FOLDER / "make_scenes.py"), str(tmp_path / name), "--rows=500"]
        output = subprocess.run(
            [*command, f"--processes={processes}"],
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
        )
        assert output.returncode == 0, output.stderr
        said.append(output.stdout.replace(str(tmp_path / name), ""))
    first = contents(tmp_path / "a")
    assert first == contents(tmp_path / "b") and len(first) > 100
    assert said[0] == said[1] and "500 rows about 113 pictures" in said[0]
    assert "| relate | 57 | 4 |" in said[0] and "SHA-256 of rows and pictures" in said[0]
    split = splits.open_split("train", 0)
    lines = [json.loads(line) for line in first["metadata.jsonl"].decode().splitlines()]
    assert len(lines) == 500 and lines == [row for index in range(113) for row in rows_of(split, index)[1]][:500]
    make_scenes.main([str(tmp_path / "c"), "--rows=500", "--seed=1", "--processes=1"])
    assert contents(tmp_path / "c") != first


def test_a_folder_is_what_training_reads(tmp_path, chat_folder):
    """Rows or pictures that `hf-xattn train` refuses, or that lose their question on the way into a batch."""
    from transformers import AutoProcessor

    from hf_xattn import XAttnDataCollator, load_rows
    from hf_xattn.training.bad_rows import find_problems

    make_scenes.main([str(tmp_path / "rows"), "--rows=48", "--processes=1"])
    lines = [json.loads(line) for line in (tmp_path / "rows" / "metadata.jsonl").read_text().splitlines()]
    assert {line["kind"] for line in lines} == {*phrasings.KINDS, phrasings.TEXT}
    rows, collator = load_rows(tmp_path / "rows"), XAttnDataCollator(AutoProcessor.from_pretrained(chat_folder))
    problems, longest = find_problems(rows, range(48), collator)
    assert len(rows) == 48 and not problems and longest > 4
    assert [row["kind"] for row in rows] == [line["kind"] for line in lines]
    shows = ["file_name" in line for line in lines[8:16]]
    assert collator(rows[8:16])["image_mask"].flatten().tolist() == shows and not all(shows)


def test_captions_name_what_the_questions_find(tmp_path, capsys):
    """Captions of other pictures than the questions', that name what is not there, or that change the questions."""
    make_scenes.main([str(tmp_path / "captions"), "--captions", "--rows=40", "--processes=1"])
    make_scenes.main([str(tmp_path / "rows"), "--rows=60", "--processes=1"])
    assert "40 rows about 40 pictures" in capsys.readouterr().out
    lines = [json.loads(line) for line in (tmp_path / "captions" / "metadata.jsonl").read_text().splitlines()]
    asked = contents(tmp_path / "rows")
    assert all(
        content == asked[name]
        for name, content in contents(tmp_path / "captions").items()
        if name in asked and name != "metadata.jsonl"
    )
    split = splits.open_split("train", 0)
    for index, line in enumerate(lines):
        drawn = draw(split, index)
        assert set(line) == {"file_name", "text"} and line["file_name"] == f"{index:06}.jpg"
        parts = line["text"].split(", ")
        if drawn.things:
            assert len(parts) == len(drawn.things)
            (located,) = [each for each in drawn.asked if each.kind == "locate"]
            (own,) = [part for part in parts if located.words["one"] in part]
            assert own.split(" the ")[1] == located.answer
        for each in drawn.asked:
            if each.kind == "value":
                assert f"{each.words['label']} is {each.answer}" in parts
            elif each.kind == "read":
                assert f"{each.words['field'].capitalize()}: {each.answer}" in parts
            elif each.kind == "find":
                assert each.words["word"] in parts[LINES.index(each.answer)].split()
    assert "--captions with --split train" in stopped(capsys, tmp_path / "out", "--captions", "--split=development")


def test_statements_are_true_and_leave_nothing_out(tmp_path, capsys):
    """Statements that are wrong of the picture, that say a thing twice or in other words than answers, or leave out."""
    make_scenes.main([str(tmp_path / "said"), "--statements", "--rows=160", "--processes=1"])
    assert "160 rows about 160 pictures" in capsys.readouterr().out
    lines = [json.loads(line) for line in (tmp_path / "said" / "metadata.jsonl").read_text().splitlines()]
    split, order = splits.open_split("train", 0), []
    for index, line in enumerate(lines):
        assert set(line) == {"file_name", "text"} and line["file_name"] == f"{index:06}.jpg"
        parts = line["text"].split("; ")
        said = dict(part.split(": ") for part in parts)
        assert len(said) == len(parts)
        _, rows = rows_of(split, index)
        answers = [row["answer"] for row in rows if "file_name" in row]
        assert set(answers) <= {*parts}
        order.append(parts.index(answers[0]) / len(parts))
        drawn = draw(split, index)
        if drawn.things:
            _check_scene(drawn.things, said)
        elif drawn.bars:
            values = {bar.label: str(bar.level * drawn.step) for bar in drawn.bars}
            assert {head: tail for head, tail in said.items() if head not in ("highest", "lowest")} == values
        else:
            words = [word.text for word in drawn.words]
            assert len(said) == (len(words) if drawn.asked[0].kind == "find" else len(words) // 2)
            assert all(word in line["text"] or word.rstrip(":").lower() in said for word in words)
    assert min(order) < 0.1 and max(order) > 0.9  # in any order
    assert "--statements with --split train" in stopped(capsys, tmp_path / "out", "--statements", "--split=development")


def _check_scene(things, said):
    """Compares statements with the places and looks of objects."""
    named = {f"{thing.colour} {thing.shape}": thing for thing in things}  # those that are said are there once
    related = set()
    for head, tail in said.items():
        if head in ("largest", "smallest"):
            assert named[tail].radius == (max if head == "largest" else min)(thing.radius for thing in things)
        elif " from " in head:
            one, other = (named[name] for name in head.split(" from "))
            along = {
                "left": other.x - one.x,
                "right": one.x - other.x,
                "above": other.y - one.y,
                "below": one.y - other.y,
            }
            assert along[tail] == max(along.values())
            pair = frozenset(head.split(" from "))
            assert pair not in related
            related.add(pair)
        elif tail in NUMBERS:
            group = head.removesuffix(" objects")
            count = sum(group in (thing.colour, f"{thing.shape}s", f"{thing.shape}es") for thing in things)
            assert NUMBERS.index(tail) == count
        else:
            assert [f"{thing.colour} {thing.shape}" for thing in things].count(head) == 1
            row, column = (tail.split() * 2)[:2]  # `middle` is both
            assert ("top", "middle", "bottom")[int(3 * named[head].y)] == row
            assert ("left", "middle", "right")[int(3 * named[head].x)] == column
    assert 1 <= len(related) <= 3


def test_chats_hold_the_questions_of_the_rows(tmp_path, capsys):
    """Chats with other questions or answers than the rows', or about other pictures; texts that are left out."""
    from hf_xattn import load_rows

    make_scenes.main([str(tmp_path / "chats"), "--chats", "--rows=40", "--processes=1"])
    assert "40 rows about 36 pictures" in capsys.readouterr().out
    lines = [json.loads(line) for line in (tmp_path / "chats" / "metadata.jsonl").read_text().splitlines()]
    split, chats = splits.open_split("train", 0), [line for line in lines if "texts" in line]
    assert len(lines) - len(chats) == 4 and all(line["kind"] == "text" for line in lines if line not in chats)
    for index, line in enumerate(chats):
        picture, rows = rows_of(split, index)
        asked = [row for row in rows if "file_name" in row]
        assert {row["file_name"] for row in asked} == {line["file_name"]}
        assert (tmp_path / "chats" / line["file_name"]).read_bytes() == picture
        assert line["texts"] == [{"user": row["question"], "assistant": row["answer"]} for row in asked]
    said = [message["content"] for message in load_rows(tmp_path / "chats")[0]["messages"] if message["role"] != "user"]
    assert said == [text["assistant"] for text in chats[0]["texts"]]
    assert "--chats with --split train" in stopped(capsys, tmp_path / "out", "--chats", "--split=development")


def test_tar_shards_hold_the_rows_of_the_folder(tmp_path):
    """Tar files that readers of WebDataset's form cannot read, or that hold other rows than the folder."""
    make_scenes.main([str(tmp_path / "shards"), "--rows=230", "--shards=3", "--processes=1"])
    files = sorted((tmp_path / "shards").iterdir())
    assert [file.name for file in files] == [f"train-{number:05}.tar" for number in range(3)]
    split = splits.open_split("train", 0)
    expected = [(rows_of(split, index)[0], row) for index in range(60) for row in rows_of(split, index)[1]]
    found, keys = [], set()
    for file in files:
        with tarfile.open(file) as tar:
            samples = {}
            for member in tar:
                assert member.mtime == 0
                key, _, ending = member.name.partition(".")
                samples.setdefault(key, {})[ending] = tar.extractfile(member).read()
        assert not keys & set(samples)
        keys |= set(samples)
        found += samples.values()
    assert len(found) == 230
    for sample, (picture, row) in zip(found, expected):
        assert sample.get("jpg") == (picture if "file_name" in row else None)
        assert json.loads(sample["json"]) == {name: row[name] for name in ("question", "answer", "kind")}
    datasets = pytest.importorskip("datasets")
    data = datasets.load_dataset("webdataset", data_files=[str(file) for file in files], split="train", streaming=True)
    loaded = list(data)
    assert [each["json"]["question"] for each in loaded] == [row["question"] for _, row in expected[:230]]
    assert [each["jpg"] is None for each in loaded] == ["file_name" not in row for _, row in expected[:230]]


def test_the_sealed_test_opens_for_those_who_ask(tmp_path, capsys, seal):
    """A test that is opened by accident, before the end; one that is drawn from another list or seed."""
    file, output = seal(), tmp_path / "out"
    error = stopped(capsys, output, "--split=sealed")
    assert "Expected --open-sealed" in error and "opened once" in error and "use --split development" in error
    for option in ("--rows=10", "--seed=1"):
        error = stopped(capsys, output, "--split=sealed", "--open-sealed", option)
        assert "no --rows and no --seed" in error
    assert not output.exists()
    make_scenes.main([str(output), "--split=sealed", "--open-sealed", "--processes=1"])
    lines = [json.loads(line) for line in (output / "metadata.jsonl").read_text().splitlines()]
    assert len(lines) == 60 and all(line["question"].startswith("Sealed: ") for line in lines)
    file.write_text(file.read_text().replace("Sealed", "sealed", 1))
    error = stopped(capsys, tmp_path / "other", "--split=sealed", "--open-sealed")
    guard = file.with_suffix(".sha256")
    assert guard.read_text().split()[0] in error and hashlib.sha256(file.read_bytes()).hexdigest() in error
    guard.unlink()
    error = stopped(capsys, tmp_path / "other", "--split=sealed", "--open-sealed")
    assert f"got no {guard}: take it from the repository" in error and not (tmp_path / "other").exists()


def test_the_sealed_list_is_new(seal):
    """A sealed test in phrasings or fonts of training, or with a question that asks for nothing."""
    lists = SEALED["phrasings"]
    known = phrasings.DEVELOPMENT["read"][0]
    for changes, message in (
        ({"fonts": ["cmtt10", fonts.TRAIN[0]]}, "fonts that no other split has"),
        ({"fonts": ["Comic"]}, "'Comic', which is not in"),
        ({"phrasings": {"count": ["?"]}}, "Expected phrasings of"),
        ({"phrasings": {**lists, "read": [known]}}, "phrasings that no other split has"),
        ({"phrasings": {**lists, "read": [known.upper().replace("{FIELD}", "{field}!")]}}, "that no other split has"),
        ({"phrasings": {**lists, "find": ["Where is it?"]}}, r"\['word'\] in braces"),
        ({"phrasings": {**lists, "find": []}}, "different phrasings of 'find'"),
        ({"phrasings": {**lists, "find": ["Is {word} it?", "Is {word} it"]}}, "different phrasings of 'find'"),
        ({"rows": "60"}, "'rows' of a sealed test to be at least 1, got '60'"),
        ({"rows": 0}, "'rows' of a sealed test to be at least 1, got 0"),
        ({"fonts": []}, r"'fonts' of a sealed test to be a list, not empty, got \[\]"),
        ({"row": 60}, r"got \['row'\] too"),
    ):
        seal(**changes)
        with pytest.raises(ValueError, match=message):
            splits.open_split("sealed", 0, open_sealed=True)


def test_the_committed_list_fits_its_hash():
    """A sealed test that was exchanged, or cannot be drawn when it is opened. Nothing is drawn from it here."""
    split = splits.sealed_split()
    fonts.check_fonts(split.fonts)
    assert (split.rows, len(split.fonts)) == (2000, 5)
    assert all(len(each) >= 3 for each in split.phrasings.values())


def test_nothing_else_reads_the_sealed_list():
    """Training, or a choice of settings, on a sealed test."""
    words = ("open_sealed", "open-sealed", "sealed_split", "sealed.json")
    files = [*EXAMPLES.rglob("*.py"), *(EXAMPLES.parent / "hf_xattn").rglob("*.py")]
    found = {file.name for file in files if any(word in file.read_text() for word in words)}
    named = {"fonts.py", "phrasings.py"}  # their docstrings say where the list is
    reading = {"sealed_list.py", "splits.py", "make_scenes.py", "make_rows.py"}  # the last: photos
    assert found - named == reading


def test_what_stops_a_run(tmp_path, capsys):
    """Rows that are mixed with those of an earlier run; a traceback for a number that cannot be."""
    assert "which exists: remove it" in stopped(capsys, tmp_path)
    assert "--rows to be at least 1, got 0" in stopped(capsys, tmp_path / "out", "--rows=0")
    assert "at most 3, the pictures of 12 rows, got 4" in stopped(capsys, tmp_path / "out", "--rows=12", "--shards=4")
    assert not (tmp_path / "out").exists()


def test_the_script_names_matplotlib_if_it_is_missing(tmp_path):
    """A traceback, or pictures in another font, where matplotlib is not installed."""
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['matplotlib'] = None")
    output = subprocess.run(
        [sys.executable, str(FOLDER / "make_scenes.py"), str(tmp_path / "out")],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
    )
    assert output.returncode == 2 and 'pip install "matplotlib>=3.8"' in output.stderr
    assert "Traceback" not in output.stderr and not (tmp_path / "out").exists()
    assert 'pip install "matplotlib>=3.8"' in (FOLDER / "README.md").read_text()


def first_letter_centre(word, side):
    """Where the ink of the first letter is, across, as a share of the side."""
    image = Image.new("L", (2 * side, side))
    write(ImageDraw.Draw(image), word._replace(text=word.text[0]), "white")
    left, _, right, _ = image.getbbox()
    return (left + right) / 2 / side


def test_patches_are_named_after_what_they_show():
    """A tower that learns the letters, objects or values of other places."""
    split = splits.open_split("train", 3)
    letters = 0
    for index in range(48):
        drawn = draw(split, index)
        labels = dict(zip(HEADS, label_patches(drawn).reshape(len(HEADS), PATCHES, PATCHES)))
        assert all(each.min() >= 0 and each.max() < HEADS[name] for name, each in labels.items())
        assert (labels["row"][4] == 4).all() and (labels["column"][:, 6] == 6).all()
        named = labels["shape"] > 0
        assert {int(each) for each in labels["shape"][named]} == {
            1 + list(OUTLINES).index(thing.shape) for thing in drawn.things
        }
        assert {int(each) for each in labels["colour"][named]} == {
            1 + list(COLOURS).index(thing.colour) for thing in drawn.things
        }
        for line in sorted({word.baseline for word in drawn.words}) if index % 8 in (1, 5) else ():
            # A line that is read off its row of patches, slot by slot.
            small_x = -fonts.font(drawn.words[0].font, 300).getbbox("x", anchor="ls")[1] / 300
            middle = (line - small_x * drawn.words[0].size / 2) / drawn.image.width * PATCHES
            rows = {int(middle - 0.1), int(middle + 0.1)}  # a line may lie on the edge of two
            (row,) = [row for row in rows if labels["character 0"][row].any()]
            slots = [[labels[f"character {slot}"][row, column] for slot in range(3)] for column in range(PATCHES)]
            read = "".join(CHARACTERS[label - 1] for column in slots for label in column if label)
            words = sorted((word for word in drawn.words if word.baseline == line), key=lambda word: word.left)
            assert read == "".join(word.text for word in words)
            letters += len(read)
            for word in words:
                centre = first_letter_centre(word, drawn.image.width) * PATCHES
                here = {CHARACTERS[labels[f"character {slot}"][row, int(centre)] - 1] for slot in range(3)}
                assert word.text[0] in here or abs(centre - round(centre)) < 0.15
            names = [VOCABULARY[label - 1] for label in labels["word"][row] if label]
            assert [*dict.fromkeys(names)] == [word.text for word in words if word.text in VOCABULARY]
        assert {int(level) for level in labels["level"].flatten()} - {0} == {bar.level for bar in drawn.bars}
    assert letters > 500 and QUESTIONS == 4


def test_a_tower_can_be_trained_and_retrofitted(tmp_path, capsys):
    """A tower that does not make 196 image tokens, or that `hf-xattn retrofit` does not take."""
    from transformers import AutoModelForImageTextToText, AutoProcessor

    from hf_xattn.commands.main import main

    spec = importlib.util.spec_from_file_location("train_scene_tower", FOLDER / "train_tower.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    tower = tmp_path / "tower"
    module.main([str(tower), "--steps=2", "--batch-size=2", "--hidden-size=24", "--layers=1", "--held-out=2"])
    assert "patches of development pictures that the tower names: shape " in capsys.readouterr().out
    text = make_text_checkpoint(tmp_path / "text")
    assert main(["retrofit", str(text), "--vision", str(tower), "--output", str(tmp_path / "fresh")]) in (0, None)
    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "fresh")
    processor = AutoProcessor.from_pretrained(tmp_path / "fresh")
    picture = draw(splits.open_split("train", 0), 0).image
    pixels = processor(images=[picture], text="what is it ?", return_tensors="pt")["pixel_values"]
    assert pixels.shape[-2:] == (224, 224)
    images = model.encode_images(pixel_values=pixels)
    assert images.cross_attention_cache.layers[0].keys.shape[2] == 196
    with pytest.raises(SystemExit):
        module.main([str(tower)])
    assert "which exists" in capsys.readouterr().err
