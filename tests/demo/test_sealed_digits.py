"""The sealed questions of `examples/digits`: what they are drawn from, and who may ask them."""

import json

import numpy as np
import pytest
import sealed_digits
from own_sealed_list import seal_digits

from hf_xattn.demo.canvases import DigitPool
from hf_xattn.demo.questions import KINDS, NEW_PHRASINGS, PHRASINGS


def images_on(canvas):
    """The digits of a canvas, as pixels."""
    return [canvas.pixels[row : row + 8, column : column + 8].tobytes() for row, column in canvas.corners]


def test_the_committed_list_fits_its_hash():
    """A sealed test that was exchanged, or cannot be drawn when it is opened. Nothing is drawn from it here."""
    fields = sealed_digits.read_list()
    assert fields["count"] == 100 and all(len(each) >= 3 for each in fields["phrasings"].values())


def test_the_questions_are_about_held_out_digits(tmp_path, monkeypatch):
    """Digits of training; canvases or phrasings of the demo's own test; another seed that gives the same questions."""
    seal_digits(tmp_path, monkeypatch)
    questions = sealed_digits.draw(sealed_digits.read_list(), seed=3)
    assert [each.kind for each in questions] == [kind for kind in KINDS for _ in range(5)]
    assert all(each.text.startswith("Sealed: ") for each in questions)
    pool = DigitPool(held_out=True, seed=3)
    held_out = {pool.images[index].tobytes() for index in pool.indices}
    assert {image for each in questions for image in images_on(each.canvas)} <= held_out
    seal_digits(tmp_path, monkeypatch, seed=12)
    others = sealed_digits.draw(sealed_digits.read_list(), seed=3)
    shown = [{each.canvas.pixels.tobytes() for each in one} for one in (questions, others)]
    assert len(shown[0]) == len(questions) and not shown[0] & shown[1]


def test_no_digit_is_left_that_nobody_has_used():
    """A guide that calls the digits used up, where some are in neither half."""
    pools = [DigitPool(held_out=held_out) for held_out in (False, True)]
    used = np.concatenate([pool.indices for pool in pools])
    assert sorted(used) == list(range(len(pools[0].images)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": "11"}, "'seed' of a sealed test to be at least 1, got '11'"),
        ({"count": 0}, "'count' of a sealed test to be at least 1, got 0"),
        ({"phrasings": {"read": ["Read it."]}}, "Expected phrasings of"),
    ],
)
def test_a_list_that_cannot_be_asked(tmp_path, monkeypatch, changes, message):
    """A traceback in the middle of the one time that the test is asked."""
    seal_digits(tmp_path, monkeypatch, **changes)
    with pytest.raises(ValueError, match=message):
        sealed_digits.read_list()


@pytest.mark.parametrize("lists", [PHRASINGS, NEW_PHRASINGS])
def test_the_sealed_phrasings_are_new(tmp_path, monkeypatch, lists):
    """A sealed question in words of training, or of the test that the recipe was chosen by."""
    phrasings = {kind: [f"Sealed: {each[0]}"] for kind, each in PHRASINGS.items()}
    seal_digits(tmp_path, monkeypatch, phrasings={**phrasings, "sum": [lists["sum"][1].lower()]})
    with pytest.raises(ValueError, match="no other split has, got .* of 'sum'"):
        sealed_digits.read_list()


def test_a_changed_list_is_refused(tmp_path, monkeypatch, capsys):
    """Questions that were exchanged after the training; an empty folder that is asked."""
    file = seal_digits(tmp_path, monkeypatch)
    out = tmp_path / "out"
    (out / "model").mkdir(parents=True)

    def refused():
        with pytest.raises(SystemExit):
            sealed_digits.main([str(out), "--open-sealed"])
        return capsys.readouterr().err

    assert "folder of a finished `hf-xattn demo --language-model ...`, got" in refused()
    (out / "results.json").write_text(json.dumps({"seed": 0, "digits right": 1.0}))  # of the demo that makes its text
    assert "folder of a finished `hf-xattn demo --language-model ...`, got" in refused()
    (out / "results.json").write_text(json.dumps({"seed": 0, "questions of each kind": 100}))
    file.write_text(file.read_text().replace("Sealed", "sealed", 1))
    assert "Another list is another test" in refused()
