"""`hf-xattn check`, called as a person would: its lines, its exit status, and the kinds of models that it takes."""

import json

import pytest
import torch
from quantized_bases import folder as quantized_folder
from quantized_bases import quantization
from tiny_checkpoints import make_text_checkpoint, make_vision_checkpoint
from tiny_mllama import make_mllama
from tiny_models import make_text, randomize
from transformers import AutoModelForImageTextToText
from transformers.integrations.peft import MIN_PEFT_VERSION

from hf_xattn import retrofit
from hf_xattn.checks import NAMES
from hf_xattn.commands.main import main
from hf_xattn.utils.transformers_api import has


QUICK = [part for name in NAMES if name.startswith("cache-") and name != "cache-dynamic" for part in ("--skip", name)]


@pytest.fixture(autouse=True)
def few_steps(monkeypatch):
    monkeypatch.setattr("hf_xattn.checks.caches.STEPS", 3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("check")
    text, vision = make_text_checkpoint(folder / "text"), make_vision_checkpoint(folder / "vision")
    model = randomize(retrofit(text, vision, every=2))
    model.save_pretrained(folder / "model")
    model.save_pretrained(folder / "added", adapter_only=True)
    with torch.no_grad():
        model.model.text_model.model.layers[0].mlp.up_proj.weight[0, 0] += 1
    model.save_pretrained(folder / "changed")
    randomize(retrofit(text, every=2)).save_pretrained(folder / "features")
    return folder


def run(capsys, *arguments):
    status = main(["check", *(str(argument) for argument in arguments)])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def lines_of(out):
    """Status and text of each line, by the name of its check."""
    return {line[13:30].strip(): (line[:13].strip(), line[30:]) for line in out.splitlines()[1:-1]}


def test_lines(folder, capsys):
    """A line that is missing, has no number, or comes only when all is over; a status that says otherwise than the
    lines.
    """
    status, out, error = run(capsys, folder / "model", "--base", folder / "text")
    assert status == 0, out + error
    assert out.startswith("hf_xattn ") and "transformers " in out.splitlines()[0] and "float32" in out.splitlines()[0]
    lines = lines_of(out)
    assert list(lines) == list(NAMES)
    unchecked = {name for name, (status, _) in lines.items() if status != "holds"}
    lacking = set() if has("cache of FP8") else {"cache-quantized"}
    assert unchecked == {"cache-offloaded", "cache-sliding"} | lacking
    assert all(any(letter.isdigit() for letter in lines[name][1]) for name in NAMES if name not in unchecked)
    assert out.splitlines()[-1] == f"all hold: {len(NAMES) - len(unchecked)}, not checked: {len(unchecked)}"


def test_a_broken_promise(folder, capsys):
    """A base that was changed, status 0, and nothing that names the weight."""
    status, out, _ = run(capsys, folder / "changed", "--base", folder / "text", *QUICK)
    lines = lines_of(out)
    assert status == 1 and out.splitlines()[-1] == "broken: base-weights, text-only"
    assert lines["base-weights"][0] == "BROKEN" and "model.layers.0.mlp.up_proj.weight" in lines["base-weights"][1]
    assert {status for name, (status, _) in lines.items() if name not in ("base-weights", "text-only")} == {
        "holds",
        "not checked",
    }


@pytest.mark.parametrize("name, status", [("half", 0), ("half_changed", 1), ("half_adapter", 0)])
def test_a_model_in_half_precision_of_a_float32_base(name, status, folder, tmp_path, capsys):
    """`--dtype float32`, which makes the lines sharp, calls the rounding of the saved model a changed base."""
    model = randomize(retrofit(folder / "text", every=2, dtype="bfloat16"))
    if name == "half_changed":
        with torch.no_grad():
            model.model.text_model.model.layers[0].mlp.up_proj.weight[0, 0] += 1
    model.save_pretrained(tmp_path / name, adapter_only=name == "half_adapter")
    skipped = [*QUICK, "--skip", "save-load", "--skip", "cache-dynamic"]
    given = (tmp_path / name, "--base", folder / "text", "--dtype", "float32", *skipped)
    found, out, error = run(capsys, *given)
    assert found == status, out + error
    assert ("broken: base-weights, text-only" in out) == (status == 1)


def test_json(folder, capsys):
    """Output that a program cannot read, or a status that it does not agree with."""
    for name, expected in (("model", 0), ("changed", 1)):
        skip = [*QUICK, "--skip", "save-load", "--skip", "cache-dynamic"]
        status, out, _ = run(capsys, folder / name, "--base", folder / "text", "--json", *skip)
        found = json.loads(out)
        assert status == expected and found["holds"] == (expected == 0)
        assert found["model"] == str(folder / name) and found["base"] == str(folder / "text")
        assert [check["name"] for check in found["checks"]] == list(NAMES)
        assert found["checks"][0]["measured"] == expected and found["checks"][0]["allowed"] == 0
        assert found["checks"][-1] == {
            "name": "save-load",
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
    status, out, _ = run(capsys, tmp_path, "--json", *QUICK, "--skip", "save-load")

    def refuse(name):
        raise ValueError(name)

    checks = {check["name"]: check for check in json.loads(out, parse_constant=refuse)["checks"]}
    assert status == 1 and checks["text-only"]["status"] == "BROKEN" and checks["text-only"]["measured"] is None


@pytest.mark.parametrize("name", ["added", "features"])
def test_other_folders(name, folder, capsys):
    """A folder without the bases' weights, or a model without a vision tower, that cannot be checked."""
    status, out, error = run(capsys, folder / name, "--base", folder / "text", *QUICK)
    assert status == 0, out + error
    assert ("only what was added (adapter-only)" in out) == (name == "added")
    status, out, _ = run(capsys, folder / name, *QUICK, "--skip", "save-load", "--skip", "cache-dynamic")
    assert status == 0 and f"no --base (the model names {folder / 'text'})" in out


def test_an_adapter_on_the_model(folder, tmp_path, capsys):
    """A folder of PEFT, whose base is the model, that is called no model; or whose layers nobody mentions."""
    peft = pytest.importorskip("peft", minversion=MIN_PEFT_VERSION)
    model = AutoModelForImageTextToText.from_pretrained(folder / "model")
    target = "model.text_model.model.layers.0.self_attn.q_proj"
    model.add_adapter(peft.LoraConfig(target_modules=[target], init_lora_weights=False))
    model.save_pretrained(tmp_path)
    status, out, error = run(capsys, tmp_path, "--base", folder / "text", *QUICK)
    assert status == 1, out + error
    assert "model.layers.0.self_attn.q_proj (LoRA or another adapter)" in out
    assert lines_of(out)["save-load"][0] == "not checked"


def test_an_imported_model(tmp_path, capsys):
    """Tiles, image markers and added tokens that random inputs do not fit."""
    make_mllama().save_pretrained(tmp_path / "theirs")
    assert main(["import", str(tmp_path / "theirs"), "--output", str(tmp_path / "ours")]) == 0
    capsys.readouterr()
    status, out, error = run(capsys, tmp_path / "ours", *QUICK)
    assert status == 0, out + error


@pytest.mark.parametrize("method", ["torchao_8bit", "bitsandbytes_8bit", "bitsandbytes_4bit"])
def test_a_quantized_base(method, tmp_path, capsys):
    """A quantized base whose packed weights or scales pass for other weights than those of the checkpoint."""
    model = AutoModelForImageTextToText.from_pretrained(
        quantized_folder() / "model", quantization_config=quantization(method), dtype=torch.bfloat16
    )
    model.save_pretrained(tmp_path)
    status, out, error = run(capsys, tmp_path, "--base", quantized_folder() / "text", *QUICK)
    assert status == 0, out + error
    assert lines_of(out)["base-weights"][0] == lines_of(out)["text-only"][0] == "holds"


def test_a_gguf_base(tmp_path, capsys):
    """A base that is one file."""
    pytest.importorskip("gguf")
    from tiny_gguf import write_gguf

    file = tmp_path / "tiny.gguf"
    write_gguf(file)
    randomize(retrofit(file, every=2)).save_pretrained(tmp_path / "model")
    status, out, error = run(capsys, tmp_path / "model", "--base", file, *QUICK, "--skip", "save-load")
    assert status == 0, out + error


def test_code_of_a_checkpoint(checkpoints, capsys):
    """Code that runs without permission, or a model that cannot be checked because it brings some."""
    model = retrofit(checkpoints / "text", checkpoints / "vision", every=2, trust_remote_code=True)
    randomize(model).save_pretrained(checkpoints / "model")
    options = ["--base", checkpoints / "text", *QUICK]
    status, _, error = run(capsys, checkpoints / "model", *options)
    assert status == 2 and "trust_remote_code=True" in error
    status, out, error = run(capsys, checkpoints / "model", *options, "--trust-remote-code")
    assert status == 0, out + error


def test_wrong_usage(folder, tmp_path, capsys):
    """A text checkpoint that is checked, a base of another kind, or a misspelled check: after work,
    with a traceback.
    """
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "adapter_config.json").write_text("{")
    model, text = folder / "model", folder / "text"
    make_text("gpt2").save_pretrained(tmp_path / "gpt2")
    wrong = [
        ((text,), "without cross-attention blocks"),
        ((tmp_path / "missing",), "missing"),
        ((tmp_path / "damaged",), "is damaged"),
        ((model, "--skip", "caches"), "`--skip` to be one of base-weights"),
        ((model, "--base", tmp_path / "missing"), "missing"),
        ((model, "--base", model), "already has cross-attention blocks"),
        ((model, "--base", tmp_path / "gpt2"), "Expected `--base` to be a 'llama' model"),
        ((model, "--base", folder / "vision"), "not a causal language model"),
    ]
    for arguments, message in wrong:
        status, _, error = run(capsys, *arguments)
        assert status == 2 and message in error.strip().splitlines()[-1], (arguments, error)
