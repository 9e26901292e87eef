"""`hf-xattn train` starts a fresh model by the words of its rows, and has learning rates for each start."""

import json
import re

import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoProcessor

from helpers.checkout import HELPERS
from helpers.inputs.training_examples import CAPTIONS, write_examples
from helpers.models.template_models import save_chat_model
from helpers.processes.command_runs import interrupted, run, run_training
from helpers.processes.warm_processes import run_ranks
from hf_xattn import align_connector, load_rows
from hf_xattn.training import run_data
from hf_xattn.training.run_folder import OPTIONS_FILE


ADDED = re.compile(r"connector|cross_attention_block")
STILL = ("--learning-rate", "1e-30", "--steps", "2", "--batch-size", "2")  # weights stay where they start
PERCEIVER = {
    "connector_type": "perceiver",
    "perceiver_config": {"num_hidden_layers": 1},
    "cross_attention_config": {"context_size": 24},
}
FLAMINGO = {"zero_init": False, "gate_init": 0.0}
OTHERS = [{**row, "text": row["text"].replace("circle", "disc")} for row in CAPTIONS[:4]]


@pytest.fixture
def data(tmp_path):
    return write_examples(tmp_path / "data", CAPTIONS)


def saved(folder, **config):
    save_chat_model(folder, **{"random": False, **config})
    return folder


def weights(folder):
    return AutoModelForImageTextToText.from_pretrained(folder, dtype="float32").state_dict()


def aligned(folder, rows):
    """The weights of a model that `align_connector` has started by these rows."""
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype="float32")
    align_connector(model, AutoProcessor.from_pretrained(folder), rows)
    return model.state_dict()


def check_same(found, expected):
    assert found.keys() == expected.keys()
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], atol=1e-6, rtol=1e-5, msg=name)


def rates(folder, step):
    state = torch.load(folder / "checkpoints" / f"checkpoint-{step}" / "optimizer.pt", weights_only=True)
    return sorted({group["initial_lr"] for group in state["param_groups"]})


def test_a_fresh_model_starts_by_its_rows(data, tmp_path, capsys):
    """A start of other rows, of weights of its own, or none; a run that keeps quiet about it."""
    model = saved(tmp_path / "model")
    status, out, error = run_training(capsys, model, "--data", data, "--output", tmp_path / "out", *STILL)
    assert status == 0, error
    assert "by the words of 8 examples" in out and "They start by 4 words of 8 images" in out
    started = weights(tmp_path / "out")
    check_same(started, aligned(model, load_rows(data)))
    before = weights(model)
    moved = {name.split(".")[-2] for name, value in started.items() if (value - before[name]).abs().max() > 1e-20}
    assert moved == {"2", "q_proj", "k_proj", "v_proj"}
    assert json.loads((tmp_path / "out" / OPTIONS_FILE).read_text())["start"] == "by words"
    assert "connector and blocks start" in (tmp_path / "out" / "README.md").read_text()


def test_other_rows_or_none(data, tmp_path, capsys):
    """`--align` that starts by the rows to train on, or that cannot be turned off."""
    model = saved(tmp_path / "model")
    others = write_examples(tmp_path / "others", OTHERS)
    command = [model, "--data", data, *STILL]
    status, out, error = run_training(capsys, *command, "--align", others, "--output", tmp_path / "others_out")
    assert status == 0 and "by the words of 4 examples" in out, error
    check_same(weights(tmp_path / "others_out"), aligned(model, load_rows(others)))
    status, out, error = run_training(capsys, *command, "--align", "none", "--output", tmp_path / "none")
    assert status == 0 and "start" not in out, error
    check_same(weights(tmp_path / "none"), weights(model))
    trained = [saved(tmp_path / "trained", random=True), *command[1:]]
    status, _, error = run_training(capsys, *trained, "--align", others, "--output", tmp_path / "trained_out")
    assert status == 2 and "Expected `--align SOURCE` with a fresh model" in error
    status, _, error = run_training(capsys, *command, "--align", tmp_path / "gone", "--output", tmp_path / "gone_out")
    assert status == 2 and "gone" in error
    status, _, error = run_training(capsys, *command, "--align", f"{data}:0.5", "--output", tmp_path / "half")
    assert status == 2 and "without a weight for `--align`" in error


@pytest.mark.parametrize(
    ("config", "options", "expected"),
    [
        ({}, (), [3e-3 * 0.03, 3e-3]),
        ({}, ("--align", "none"), [1e-3]),
        ({"random": True}, (), [1e-4]),
        ({}, ("--learning-rate", "0.01"), [0.01 * 0.03, 0.01]),
        ({}, ("--started-rate", "0.5"), [3e-3 * 0.5, 3e-3]),
        ({"cross_attention_config": FLAMINGO}, (), [1e-3]),
        ({}, ("--align", "none", "--train-text"), [1e-4]),  # its text model is not new
        ({}, ("--train-text",), [3e-3 * 0.03, 3e-3]),
    ],
)
def test_each_start_has_its_learning_rates(config, options, expected, data, tmp_path, capsys):
    """A rate for another start, or a given one that is not used. A gate that starts at zero would learn slowly."""
    model = saved(tmp_path / "model", **config)
    steps = ("--steps", "2", "--save-steps", "1", "--batch-size", "2")
    status, _, error = run_training(capsys, model, "--data", data, "--output", tmp_path / "out", *steps, *options)
    assert status == 0, error
    assert rates(tmp_path / "out", 1) == pytest.approx(sorted(expected))


def test_a_trained_model_stays(data, tmp_path, capsys):
    """What was learned, written over."""
    model = saved(tmp_path / "model", random=True)
    status, out, error = run_training(capsys, model, "--data", data, "--output", tmp_path / "out", *STILL)
    assert status == 0 and "start" not in out, error
    check_same(weights(tmp_path / "out"), weights(model))


def test_where_no_start_is_possible(tmp_path, capsys):
    """A run that ends, or that starts at random without a word."""
    same = write_examples(tmp_path / "data", [{**row, "text": "a circle."} for row in CAPTIONS])
    for name, config, reason in (
        ("words", {}, "Expected `rows` whose texts name what images differ in"),
        ("layers", PERCEIVER, "Expected `model` with a connector of a type of"),
        ("zero", {"cross_attention_config": FLAMINGO}, "Expected blocks with `zero_init`"),
    ):
        model = saved(tmp_path / name, **config)
        status, out, error = run_training(capsys, model, "--data", same, "--output", tmp_path / f"{name}_out", *STILL)
        assert status == 0 and f"so the model learns later to use its images: {reason}" in out, error
        check_same(weights(tmp_path / f"{name}_out"), weights(model))
        asked = ("--align", same, "--output", tmp_path / f"{name}_asked")
        status, _, error = run_training(capsys, model, "--data", same, *asked, *STILL)
        assert status == 2 and reason in error


def test_a_bad_row_ends_the_run(tmp_path, capsys):
    """Rates of another start, or half a start, because of one row of a stream."""
    model = saved(tmp_path / "model")
    gone = write_examples(tmp_path / "gone", [*CAPTIONS, {"file_name": "gone.png", "text": "a yellow circle."}])
    command = [model, "--stream", *STILL]
    status, _, error = run_training(capsys, *command, "--data", gone, "--output", tmp_path / "out")
    assert status == 2 and "gone.png" in error

    model = AutoModelForImageTextToText.from_pretrained(model, dtype="float32")
    processor = AutoProcessor.from_pretrained(tmp_path / "model")
    refusing = "{% if messages[0].content == 'which ?' %}{{ raise_exception('no such question') }}{% endif %}"
    processor.chat_template = refusing + processor.chat_template
    rows = [*load_rows(write_examples(tmp_path / "data", CAPTIONS)), "which ?"]
    picture = rows[0]["messages"][0]["content"][0]
    content = [picture, {"type": "text", "text": "which ?"}]
    rows[-1] = {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": "a red one"}]}
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ValueError, match="expected messages that the chat template takes.*no such question"):
        align_connector(model, processor, rows)
    check_same(model.state_dict(), before)


def test_a_resumed_run_keeps_its_start(data, tmp_path, capsys, monkeypatch):
    """A start that writes over the weights of a checkpoint, or other rates than before."""
    model = saved(tmp_path / "model")
    command = [model, "--data", data, "--steps", "6", "--save-steps", "2", "--batch-size", "2"]
    assert run_training(capsys, *command, "--output", tmp_path / "whole")[0] == 0
    interrupted(capsys, monkeypatch, 3, *command, "--output", tmp_path / "stopped")
    interrupted(capsys, monkeypatch, 5, *command, "--output", tmp_path / "stopped", "--resume")
    status, out, error = run_training(capsys, *command, "--output", tmp_path / "stopped", "--resume")
    assert status == 0 and "checkpoint-4" in out and "Starting" not in out, error
    whole, stopped = weights(tmp_path / "whole"), weights(tmp_path / "stopped")
    assert all(torch.equal(stopped[name], value) for name, value in whole.items())

    interrupted(capsys, monkeypatch, 1, *command, "--output", tmp_path / "early")  # before the first checkpoint
    status, out, error = run_training(capsys, *command, "--output", tmp_path / "early", "--resume")
    assert status == 0 and "No checkpoint found" in out and "They start by" in out, error
    early = weights(tmp_path / "early")
    assert all(torch.equal(early[name], value) for name, value in whole.items())


def test_a_start_reads_encoded_features(data, tmp_path, capsys):
    """A start that runs the tower although its features are there, or from other features."""
    model = saved(tmp_path / "model")
    status, _, error = run(capsys, "encode-features", model, "--data", data, "--output", tmp_path / "features")
    assert not status, error
    options = [*STILL, "--features", tmp_path / "features"]
    status, out, error = run_training(capsys, model, "--data", data, "--output", tmp_path / "out", *options)
    assert status == 0 and "They start by 4 words" in out, error
    check_same(weights(tmp_path / "out"), aligned(model, load_rows(data)))


def test_bad_rows_of_a_stream(tmp_path, capsys):
    """A row that nobody has checked, and that ends the start of all the others."""
    lines = [
        *CAPTIONS,
        {"file_name": "gone.png", "text": "a yellow circle."},
        {"file_name": "red.png", "question": "a"},
    ]
    data = write_examples(tmp_path / "data", lines)
    model = saved(tmp_path / "model")
    options = [*STILL, "--stream", "--bad-rows", "skip", "--bad-rows-limit", "0.5"]
    status, out, error = run_training(capsys, model, "--data", data, "--output", tmp_path / "out", *options)
    assert status == 0 and "They start by 4 words of 8 images" in out, error


def test_a_start_reads_a_sample_of_many_rows(data, tmp_path, capsys, monkeypatch):
    """All rows of a large source, or the first ones alone."""
    monkeypatch.setattr(run_data, "ALIGN_ROWS", 4)
    model = saved(tmp_path / "model")
    status, out, error = run_training(capsys, model, "--data", data, "--output", tmp_path / "out", *STILL)
    assert status == 0 and "by the words of 4 examples" in out, error
    rows = load_rows(data)
    check_same(weights(tmp_path / "out"), aligned(model, rows.split([0, 2, 4, 6])[1]))


def test_two_processes_start_alike(data, tmp_path):
    """Processes that start each by itself, or all but the first at random."""
    model = saved(tmp_path / "model")
    words = [*map(str, ["train", model, "--data", data, "--output", tmp_path / "out", *STILL])]
    run_ranks(2, ["-m", "hf_xattn", *words, "--text-share", "0", "--device", "cpu"])
    expected = aligned(model, load_rows(data))
    check_same(weights(tmp_path / "out"), expected)
    told = [
        line
        for line in run_ranks(2, [HELPERS / "processes" / "start_ranks.py", model, data]).splitlines()
        if "words, " in line
    ]
    total = sum(float(value.double().abs().sum()) for name, value in expected.items() if ADDED.search(name))
    assert len(told) == 2 and told[0] == told[1]
    assert float(told[0].removeprefix("by words, ")) == pytest.approx(total, rel=1e-6)
