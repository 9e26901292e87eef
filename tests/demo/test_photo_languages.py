"""`examples/photos/make_rows.py --languages`: rows in German and French, by the captions of the photographs."""

import importlib.util
import json

import pytest

from helpers.checkout import EXAMPLES
from helpers.inputs.tiny_stamps import THINGS, make_stamps
from hf_xattn.demo.photographs.pictures import STAMPS


PHOTOS = EXAMPLES / "photos"
FILES = sorted({file for thing in THINGS for file in (*thing.trained, *thing.others)})


@pytest.fixture
def make_rows(monkeypatch):
    monkeypatch.syspath_prepend(str(PHOTOS))
    spec = importlib.util.spec_from_file_location("photo_rows", PHOTOS / "make_rows.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def stamps(tmp_path_factory):
    """Pictures whose captions are numbers: `Ein Bild 7`, `L'image 7`."""
    folder = make_stamps(tmp_path_factory.mktemp("stamps"))
    for number, file in enumerate(FILES):
        captions = f"A picture.\nde.utf8=Ein Bild {number}. Wirf es weg!\nfr.utf8=L'image {number} !\n"
        (folder / STAMPS.folder / f"{file}.txt").write_text(captions, encoding="utf-8")
    return folder


def read(folder):
    return [json.loads(line) for line in (folder / "metadata.jsonl").read_text().splitlines()]


def test_rows_of_languages(make_rows, stamps, tmp_path):
    """A language that is trained alone or not at all, a question that is asked in trained words, a wrong answer."""
    common = ["--stamps", str(stamps), "--pictures=60"]
    make_rows.main([str(tmp_path / "one"), *common])
    make_rows.main([str(tmp_path / "three"), *common, "--languages", "de", "fr"])
    english, mixed = read(tmp_path / "one" / "train"), read(tmp_path / "three" / "train")
    assert mixed[:60] == english and len(mixed) == 60 + 12 + 12
    assert not (tmp_path / "one" / "held_out_de").exists()
    chats = {"de": mixed[60:72], "fr": mixed[72:]}
    for code, article in (("de", "Ein Bild "), ("fr", "L'image ")):
        language = make_rows.languages.LANGUAGES[code]
        asked = read(tmp_path / "three" / f"held_out_{code}")
        assert {row["kind"] for row in asked} == {
            f"{code}: {kind}" for kind in ("name", "at side", "how many", "caption")
        }
        trained = json.dumps(chats[code], ensure_ascii=False)
        assert not any(row["question"] in trained for row in asked)
        for row in asked:
            if row["kind"].endswith("how many"):
                assert row["answer"].rstrip(".") in language.numbers
            else:
                named = row["answer"].rstrip(".").replace(f" {language.conjunction} ", ", ").split(", ")
                assert named[0].startswith(article)
                assert all(name.startswith(article[0].lower() + article[1:]) for name in named[1:])
                assert len(named) == 1 or row["kind"].endswith("caption")


def test_a_missing_caption_is_told_before_any_work(make_rows, stamps, tmp_path, capsys):
    """Rows that are written in half, or an answer that is empty."""
    without = tmp_path / "stamps"
    without.symlink_to(stamps)
    thing = next(thing for thing in THINGS if thing.known)
    file = stamps / STAMPS.folder / f"{thing.trained[0]}.txt"
    kept = file.read_text()
    file.write_text("A picture.\nfr.utf8=L'image.\n")
    try:
        with pytest.raises(SystemExit):
            make_rows.main([str(tmp_path / "rows"), "--stamps", str(without), "--languages", "fr", "de"])
    finally:
        file.write_text(kept)
    assert f"{thing.trained[0]}.txt" in (error := capsys.readouterr().err) and "'de'" in error
    assert not (tmp_path / "rows").exists()
