"""`hf-xattn check`, called as a person would: its lines, its exit status, and the kinds of models that it takes."""

import json

import pytest
import torch
from transformers import AutoModelForImageTextToText

from helpers.models.quantized_bases import folder as quantized_folder
from helpers.models.quantized_bases import quantization
from helpers.models.tiny_mllama import make_mllama
from helpers.models.tiny_models import randomize
from helpers.models.word_models import make_text_checkpoint, make_vision_checkpoint
from hf_xattn import GatedCrossAttentionBlock, retrofit
from hf_xattn.checks import NAMES
from hf_xattn.commands.main import main
from hf_xattn.utils.transformers_api import has


QUICK = [part for name in NAMES if name.startswith("cache-") and name != "cache-dynamic" for part in ("--skip", name)]


@pytest.fixture(autouse=True)
def few_steps(monkeypatch):
    monkeypatch.setattr("hf_xattn.checks.STEPS", 3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("check")
    text, vision = make_text_checkpoint(folder / "text"), make_vision_checkpoint(folder / "vision")
    model = randomize(retrofit(text, vision, every=2))
    model.save_pretrained(folder / "model")
    model.save_pretrained(folder / "added", adapter_only=True)
    randomize(retrofit(text, every=2)).save_pretrained(folder / "features")
    return folder


def run(capsys, *arguments):
    status = main(["check", *(str(argument) for argument in arguments)])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def lines_of(out):
    """Status and text of each line, by the name of its check."""
    return {line[13:30].strip(): (line[:13].strip(), line[30:]) for line in out.splitlines()[1:-1]}


def test_each_check_prints_a_line_with_a_number(folder, capsys):
    """A line that is missing, has no number, or comes only when all is over; a status that says otherwise than the
    lines.
    """
    status, out, error = run(capsys, folder / "model")
    assert status == 0, out + error
    assert out.startswith("hf_xattn ") and "transformers " in out.splitlines()[0] and "float32" in out.splitlines()[0]
    lines = lines_of(out)
    assert list(lines) == list(NAMES)
    unchecked = {name for name, (status, _) in lines.items() if status != "holds"}
    lacking = set() if has("cache of FP8") else {"cache-quantized"}
    assert unchecked == {"cache-offloaded", "cache-sliding"} | lacking
    assert all(any(letter.isdigit() for letter in lines[name][1]) for name in NAMES if name not in unchecked)
    assert out.splitlines()[-1] == f"all hold: {len(NAMES) - len(unchecked)}, not checked: {len(unchecked)}"


def leak(monkeypatch):
    """A branch that reaches rows without an image."""
    forward = GatedCrossAttentionBlock.forward
    monkeypatch.setattr(GatedCrossAttentionBlock, "forward", lambda *args, **named: forward(*args, **named) + 1e-4)


def test_a_broken_promise_gives_a_status_that_says_so(folder, capsys, monkeypatch):
    """A row that sees the image of another, and status 0."""
    leak(monkeypatch)
    status, out, _ = run(capsys, folder / "model", *QUICK)
    assert status == 1 and out.splitlines()[-1] == "broken: image-less-rows"
    assert lines_of(out)["image-less-rows"][0] == "BROKEN" and lines_of(out)["cache-dynamic"][0] == "holds"


def test_the_json_output_agrees_with_the_exit_status(folder, capsys, monkeypatch):
    """Output that a program cannot read, or a status that it does not agree with."""
    for expected in (0, 1):
        if expected:
            leak(monkeypatch)
        status, out, _ = run(capsys, folder / "model", "--json", *QUICK, "--skip", "cache-dynamic")
        found = json.loads(out)
        assert status == expected and found["holds"] == (expected == 0) and found["model"] == str(folder / "model")
        assert [check["name"] for check in found["checks"]] == list(NAMES)
        assert (found["checks"][0]["measured"] > 0) == bool(expected) and found["checks"][0]["allowed"] == 0
        assert found["checks"][-1] == {
            "name": "cache-sliding",
            "status": "not checked",
            "line": "skipped",
            "measured": None,
            "allowed": None,
        }


def test_json_has_no_infinity(folder, tmp_path, capsys):
    """An output that is no JSON, where a weight is no number."""
    model = AutoModelForImageTextToText.from_pretrained(folder / "model")
    model.model.text_model.lm_head.weight.data[5] = float("nan")
    model.save_pretrained(tmp_path)
    status, out, _ = run(capsys, tmp_path, "--json", *QUICK)

    def refuse(name):
        raise ValueError(name)

    checks = {check["name"]: check for check in json.loads(out, parse_constant=refuse)["checks"]}
    assert status == 1 and checks["cache-dynamic"]["status"] == "BROKEN" and checks["cache-dynamic"]["measured"] is None


@pytest.mark.parametrize("name", ["added", "features"])
def test_folders_without_bases_or_tower_can_be_checked(name, folder, capsys):
    """A folder without the bases' weights, or a model without a vision tower, that cannot be checked."""
    status, out, error = run(capsys, folder / name, *QUICK)
    assert status == 0 and lines_of(out)["cache-dynamic"][0] == "holds", out + error


def test_an_imported_model_can_be_checked(tmp_path, capsys):
    """Tiles, image markers and added tokens that random inputs do not fit."""
    make_mllama().save_pretrained(tmp_path / "theirs")
    assert main(["import", str(tmp_path / "theirs"), "--output", str(tmp_path / "ours")]) == 0
    capsys.readouterr()
    status, out, error = run(capsys, tmp_path / "ours", *QUICK)
    assert status == 0, out + error


@pytest.mark.parametrize("method", ["torchao_8bit", "bitsandbytes_8bit", "bitsandbytes_4bit"])
def test_a_quantized_model_passes_its_checks(method, tmp_path, capsys):
    """A quantized model that is called broken."""
    model = AutoModelForImageTextToText.from_pretrained(
        quantized_folder() / "model", quantization_config=quantization(method), dtype=torch.bfloat16
    )
    model.save_pretrained(tmp_path)
    status, out, error = run(capsys, tmp_path, *QUICK)
    assert status == 0, out + error


def test_code_of_a_checkpoint(checkpoints, capsys):
    """Code that runs without permission, or a model that cannot be checked because it brings some."""
    model = retrofit(checkpoints / "text", checkpoints / "vision", every=2, trust_remote_code=True)
    randomize(model).save_pretrained(checkpoints / "model")
    status, _, error = run(capsys, checkpoints / "model", *QUICK)
    assert status == 2 and "trust_remote_code=True" in error
    status, out, error = run(capsys, checkpoints / "model", *QUICK, "--trust-remote-code")
    assert status == 0, out + error


def test_wrong_usage_ends_with_a_sentence_before_any_work(folder, tmp_path, capsys):
    """A text checkpoint that is checked, or a misspelled check: after work, with a traceback."""
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "adapter_config.json").write_text("{")
    model, text = folder / "model", folder / "text"
    wrong = [
        ((text,), "without cross-attention blocks"),
        ((tmp_path / "missing",), "missing"),
        ((tmp_path / "damaged",), "is damaged"),
        ((model, "--skip", "caches"), "`--skip` to be one of image-less-rows"),
    ]
    for arguments, message in wrong:
        status, _, error = run(capsys, *arguments)
        assert status == 2 and message in error.strip().splitlines()[-1], (arguments, error)
