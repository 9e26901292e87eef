"""The pictures and questions of `examples/garments`."""

import gzip
import json
import re

import make_rows
import numpy as np
import pytest
import train_tower
from pictures import GARMENTS, patch_labels, place_things, read_source
from PIL import Image
from questions import NEW, PHRASINGS, TEXT


LABELS = ["bag", "ankle boot", "coat"]
NAMED = PHRASINGS | {TEXT: (("Write in capital letters: {thing}",), ())}


@pytest.fixture
def folder(tmp_path):
    """Ten pictures a label; each has a colour of its own."""
    for number, label in enumerate(LABELS):
        (tmp_path / "source" / label.replace(" ", "_")).mkdir(parents=True)
        for index in range(10):
            colour = (60 + 60 * number, 20 * index + 10, 255)
            Image.new("RGB", (28, 28), colour).save(tmp_path / "source" / label.replace(" ", "_") / f"{index}.png")
    return tmp_path / "source"


def colours(picture):
    return {tuple(colour) for colour in np.asarray(picture).reshape(-1, 3).tolist()} - {(0, 0, 0)}


def test_held_out_pictures_and_phrasings_are_not_trained_on(folder, tmp_path):
    """A score on pictures of things, or on phrasings, that training has held."""
    make_rows.main([str(folder), str(tmp_path / "rows"), "--pictures=60", "--held-out=60", "--size=32"])
    seen, kinds = {}, {}
    for part in ("train", "held_out"):
        inside = tmp_path / "rows" / part
        seen[part] = set().union(*(colours(Image.open(file)) for file in inside.glob("*.png")))
        rows = [json.loads(line) for line in (inside / "metadata.jsonl").read_text().splitlines()]
        kinds[part] = {row["kind"] for row in rows}
        for row in rows:
            kind, new, _ = row["kind"].partition(NEW)
            forms = (".*".join(map(re.escape, re.split("{.*?}", each))) for each in NAMED[kind][bool(new)])
            assert any(re.fullmatch(form, row["question"]) for form in forms), row
    assert not seen["train"] & seen["held_out"] and len(seen["train"]) > 12
    assert kinds["train"] == {*PHRASINGS, TEXT}
    assert kinds["held_out"] == {*PHRASINGS, *(f"{kind}{NEW}" for kind in PHRASINGS), TEXT}
    for known, new in PHRASINGS.values():
        assert not set(known) & set(new)


def test_folders_that_do_not_suit(folder, tmp_path, capsys):
    """A traceback for a folder that is missing, or has no labels; rows that are mixed with those of an earlier run."""
    (tmp_path / "rows" / "train").mkdir(parents=True)
    for source, output, message in (
        (tmp_path / "no", tmp_path / "out", "no, which is not a folder."),
        (tmp_path / "rows", tmp_path / "out", "two pictures or more"),
        (folder, tmp_path / "rows", "File exists"),
    ):
        with pytest.raises(SystemExit) as stopped:
            make_rows.main([str(source), str(output)])
        assert stopped.value.code == 2 and message in capsys.readouterr().err
    with pytest.raises(SystemExit):
        train_tower.main([str(tmp_path / "no"), str(tmp_path / "out")])
    assert "no, which is not a folder." in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_rows_are_what_the_pictures_show(folder, tmp_path):
    """An answer about another picture, or with left and right exchanged."""
    make_rows.main([str(folder), str(tmp_path / "rows"), "--pictures=40", "--held-out=4", "--questions=5"])
    inside = tmp_path / "rows" / "train"
    rows = [json.loads(line) for line in (inside / "metadata.jsonl").read_text().splitlines()]
    assert {row["kind"] for row in rows} == {*PHRASINGS, TEXT}
    reds = {60: "bag", 120: "ankle boot", 180: "coat"}
    for row in rows:
        if (kind := row["kind"]) == TEXT:
            assert "file_name" not in row
            continue
        pixels = np.asarray(Image.open(inside / row["file_name"]))
        names = list(dict.fromkeys(reds[red] for red in pixels[16, :, 0].tolist() if red))
        question, answer = row["question"], row["answer"].lower().rstrip(".")
        listed = " and ".join(f"{'an' if name[0] == 'a' else 'a'} {name}" for name in names)
        asked_for = next((name for name in LABELS if name in question), None)
        if kind == "caption":
            assert answer == listed
        elif kind == "how many":
            assert answer == ("one", "two")[len(names) - 1]
        elif kind == "what is on that side":
            assert answer == listed.split(" and ")["right" in question]
        elif kind == "which of two":
            assert (
                answer
                == f"{listed.split(' and ')[names.index(asked_for)]}: {('left', 'right')[names.index(asked_for)]}"
            )
        else:
            assert answer == f"{listed}, so {'yes' if asked_for in names else 'no'}"


def test_fashion_mnist_is_read_with_its_labels(tmp_path):
    """Pictures under the labels of others, where the source is the files of Fashion-MNIST."""
    for part, count in (("train", 30), ("t10k", 20)):
        labels = (np.arange(count) % 10).astype(np.uint8)
        pixels = np.repeat(labels, 28 * 28).reshape(count, 28, 28) * 20 + 5
        head = np.array([2051, count, 28, 28], ">i4").tobytes()
        (tmp_path / f"{part}-images-idx3-ubyte.gz").write_bytes(gzip.compress(head + pixels.astype(np.uint8).tobytes()))
        head = np.array([2049, count], ">i4").tobytes()
        (tmp_path / f"{part}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(head + labels.tobytes()))
    source = read_source(tmp_path, ["bag", "dress"])
    assert source.labels == ["bag", "dress"]
    for pictures, label in zip(source.train, source.labels):
        assert len(pictures) == 3 and all((picture == GARMENTS.index(label) * 20 + 5).all() for picture in pictures)
    with pytest.raises(ValueError, match="hat"):
        read_source(tmp_path, ["hat", "bag"])


def test_patches_are_named_after_what_stands_on_them():
    """A tower that is trained on labels of other places."""
    pictures = [[np.full((28, 28), 100, np.uint8)], [np.full((28, 28), 200, np.uint8)]]
    for seed in range(20):
        picture, things = place_things(pictures, np.random.default_rng(seed), 32)
        pixels = np.asarray(picture)[4::8, 4::8, 0].flatten()
        labels, places = patch_labels(things, 32, nothing=(2, 5))
        assert labels.tolist() == [{0: 2, 100: 0, 200: 1}[value] for value in pixels]
        order = {thing.label: place for place, thing in enumerate(things)}
        assert places.tolist() == [order.get(label, 5) for label in labels]
