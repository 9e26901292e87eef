"""`hf-xattn train --stream`: rows are read as they come, in an order that a killed run goes on with."""

import json
import os
import re
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForImageTextToText

from helpers.checkout import HELPERS
from helpers.inputs.data_sources import content, questions, write_all, write_tar
from helpers.inputs.training_examples import CAPTIONS, write_examples
from helpers.models.template_models import save_chat_model
from helpers.processes import killed_runs
from helpers.processes.command_runs import run_training
from helpers.processes.warm_processes import KILLED, call, run_ranks
from hf_xattn.data.loading import WITHOUT_BAD
from hf_xattn.training import run_data
from hf_xattn.training.bad_rows import BAD_ROWS_FILE
from hf_xattn.training.picture_use import MOST_ROWS
from hf_xattn.training.run_folder import OPTIONS_FILE


FAST = "--learning-rate 0.01 --log-steps 1 --device cpu".split()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("streaming") / "model"
    save_chat_model(folder)
    return folder


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    return write_all(tmp_path_factory.mktemp("sources"), 24)


def same_weights(one, other):
    states = [AutoModelForImageTextToText.from_pretrained(folder).state_dict() for folder in (one, other)]
    return all(torch.equal(weight, states[1][name]) for name, weight in states[0].items())


@pytest.mark.parametrize("step, workers", [(5, 0), pytest.param(14, 2, marks=pytest.mark.slow)])
def test_killed_in_the_middle_of_a_shard(step, workers, model, sources, tmp_path):
    """A run that goes on at another row: each row of the first part is read twice, and others never."""
    data = ["--data", f"{sources['tar']}", "--data", f"{sources['parquet']}:0.5", "--data", str(sources["llava"])]
    more = f"--stream --steps 8 --save-steps 2 --batch-size 2 --gradient-accumulation 2 --workers {workers}".split()
    arguments = [str(model), *data, *more, "--text-share", "0", *FAST]
    whole, out = tmp_path / "whole", tmp_path / "out"
    assert call(killed_runs.command, [*arguments, "--output", str(whole)]) == 0
    command = [*arguments, "--output", str(out)]
    assert call(killed_runs.command, command, "step", step) == KILLED
    log = tmp_path / "log"
    assert call(killed_runs.command, [*command, "--resume"], output=log) == 0, log.read_text()
    assert f"checkpoint-{(step - 1) // 2 // 2 * 2}\n" in log.read_text()
    assert (whole / "model.safetensors").read_bytes() == (out / "model.safetensors").read_bytes()
    assert not same_weights(whole, model)


def test_each_rank_and_worker_reads_its_own(model, tmp_path):
    """A row that two processes read, or none."""
    for shard in range(16):
        write_tar(tmp_path / f"{shard:02d}.tar", list(questions(48)), first=48 * shard)
    log = tmp_path / "log"
    log.mkdir()
    options = "--stream --batch-size 3 --workers 2 --epochs 1 --log-steps 50 --text-share 0 --device cpu".split()
    words = [str(model), "--data", f"{tmp_path}/{{00..15}}.tar", "--output", str(tmp_path / "out"), *options]
    run_ranks(2, [HELPERS / "processes" / "stream_ranks.py", log, "train", *words])
    read = {path.name: [int(line) for line in path.read_text().split()] for path in log.iterdir()}
    compared = [read.pop(f"{rank}-main") for rank in range(2)]  # with their own picture and with another
    assert compared[0] == compared[1] and len(compared[0]) == MOST_ROWS
    assert read.keys() == {"0-0", "0-1", "1-0", "1-1"}
    assert sorted(index for rows in read.values() for index in rows) == list(range(768))


def lines(count, broken):
    good = [{"file_name": "red.png", "question": f"{index} ?", "answer": "red."} for index in range(count)]
    for index, line in broken.items():
        good[index] = line
    return good


BROKEN = {
    3: {"file_name": "gone.png", "text": "a"},
    10: {"file_name": "red.png", "question": "a"},
    17: {"file_name": "bad.png", "text": "a"},
}
REASONS = {4: "'gone.png' does not exist", 11: "'answer' is missing", 18: "'bad.png' cannot be read"}


@pytest.mark.parametrize("batch_size", ["4", pytest.param("1", marks=pytest.mark.slow)])
@pytest.mark.parametrize("stream", [["--stream"], pytest.param([], marks=pytest.mark.slow)])
@pytest.mark.parametrize("workers", ["2", pytest.param("0", marks=pytest.mark.slow)])
def test_bad_rows_are_left_out(stream, workers, batch_size, model, tmp_path, capsys):
    """A bad row that ends the run, is trained on, or goes without a word; a batch of bad rows alone."""
    data = write_examples(tmp_path / "data", lines(30, BROKEN))
    (data / "bad.png").write_bytes(b"no picture")
    options = ["--data", data, *stream, "--workers", workers, "--batch-size", batch_size, "--epochs", "2"]
    skip = ["--bad-rows", "skip", "--bad-rows-limit", "0.1"]
    status, out, error = run_training(capsys, model, *options, *skip, "--output", tmp_path / "out", *FAST[:4])
    assert status == 0, error
    assert "3 bad row(s) were left out" in out and f"{len(BROKEN)} bad" in out
    found = {}
    for line in (tmp_path / "out" / BAD_ROWS_FILE).read_text().splitlines():
        told = json.loads(line)
        assert told["source"] == str(data) and told["file"] == str(data / "metadata.jsonl")
        found[int(told["row"].removeprefix("line "))] = told["reason"]
    assert found.keys() == REASONS.keys() and all(REASONS[line] in reason for line, reason in found.items())

    status, _, error = run_training(
        capsys, model, *options, *skip[:3], "0.05", "--output", tmp_path / "limit", *FAST[:4]
    )
    assert status == 2 and re.search(r"at most 5.00% of 30 rows to be bad \(`--bad-rows-limit`\), got [23]\b", error)
    status, _, error = run_training(capsys, model, *options, "--output", tmp_path / "stop", *FAST[:4])
    assert status == 2 and "Traceback" not in error and f"{data / 'metadata.jsonl'}" in error
    assert any(f"line {line}: " in error and reason in error for line, reason in REASONS.items())
    assert stream == [] or "add `--bad-rows skip`" in error


NAMES = ["iVBORw0KGgo=" * 400, "a\0b.png", "red.png/b.png", "."]


@pytest.mark.parametrize("stream", [["--stream"], []])
def test_names_that_cannot_be_opened(stream, model, tmp_path, capsys):
    """Base64 where the name of a file is expected, that ends a run which is to leave bad rows out."""
    broken = {3 * index + 2: {"file_name": name, "text": "a"} for index, name in enumerate(NAMES)}
    data = write_examples(tmp_path / "data", lines(30, broken))
    skip = ["--bad-rows", "skip", "--bad-rows-limit", "0.2", "--batch-size", "4", "--epochs", "1"]
    options = ["--data", data, *stream, *skip, "--output", tmp_path / "out"]
    status, out, error = run_training(capsys, model, *options, *FAST[:4])
    assert status == 0, error
    told = [json.loads(line) for line in (tmp_path / "out" / BAD_ROWS_FILE).read_text().splitlines()]
    assert {int(each["row"].removeprefix("line ")) for each in told} == {row + 1 for row in broken}
    assert all(re.search("does not exist|cannot be opened|is no file", each["reason"]) for each in told)
    assert max(len(each["reason"]) for each in told) < 600


def test_a_row_group_that_cannot_be_read(model, sources, tmp_path, capsys):
    """A disk error in a table that ends a run in its middle, or is taken for the end of the data."""
    whole = bytearray(sources["parquet"].read_bytes())
    place = whole.index(content("red"))
    whole[place - 40 : place + 400] = os.urandom(440)
    (tmp_path / "a.parquet").write_bytes(whole)
    options = ["--data", tmp_path / "a.parquet", "--stream", "--batch-size", "2", *FAST[:4]]
    status, _, error = run_training(capsys, model, *options, "--output", tmp_path / "out")
    assert status == 2 and re.search(r"a.parquet, row \d+ to row \d+ \(row group \d\) cannot be read", error)
    assert not (tmp_path / "out").exists()


def test_some_rows_are_checked(model, tmp_path, capsys, monkeypatch):
    """Minutes in which all rows are checked, before anything is said; a table of bad rows, of which a run reads one."""
    monkeypatch.setattr(run_data, "CHECKED", 8)
    data = write_examples(tmp_path / "data", lines(30, BROKEN))
    some = dict.fromkeys(range(0, 30, 2), BROKEN[3])
    spoilt = write_examples(tmp_path / "spoilt", lines(30, some))
    options = ["--steps", "1", "--batch-size", "1", "--seed", "3", *FAST[:4]]
    status, out, error = run_training(capsys, model, "--data", data, *options, "--output", tmp_path / "out")
    assert status == 0 and "30 examples to train on, 0 to evaluate on, read as they come" in out, error
    status, _, error = run_training(capsys, model, "--data", spoilt, *options, "--output", tmp_path / "none")
    assert status == 2 and "'gone.png' does not exist" in error and "Of 30 rows, 8 were checked." in error
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("begun", ["now", "before"])
def test_a_bad_row_is_left_out_of_a_resumed_run(begun, model, tmp_path, capsys):
    """A run that can only start anew after a bad row; one of an earlier version, which read rows in another order."""
    data = write_examples(tmp_path / "data", lines(12, {10: BROKEN[10]}))
    options = ["--data", data, "--stream", "--batch-size", "1", "--epochs", "1", "--save-steps", "1", *FAST[:4]]
    folder = ["--output", tmp_path / "out"]
    status, _, error = run_training(capsys, model, *options, *folder)
    assert status == 2 and "line 11: the field 'answer' is missing" in error and "continue with `--resume`" in error
    skip = ["--bad-rows", "skip", "--bad-rows-limit", "0.1", "--resume"]
    file = tmp_path / "out" / OPTIONS_FILE
    if begun == "before":
        saved = {**json.loads(file.read_text()), "order": WITHOUT_BAD}
        file.write_text(json.dumps({**saved, "stream": False, "bad_rows": "skip"}))
        status, _, error = run_training(capsys, model, *options, *folder, *skip)
        assert status == 2 and "which another version began" in error
        file.write_text(json.dumps(saved))
    status, out, error = run_training(capsys, model, *options, *folder, *skip)
    assert status == 0 and "Continuing from" in out and "1 bad row(s) were left out" in out, error


def test_what_a_stream_lacks(model, tmp_path, capsys):
    """A run in which nothing can learn, and a question that no caption has: found before the first step."""
    data = write_examples(tmp_path / "data", [{"question": "a ?", "answer": "b"}] * 3)
    options = ["--data", data, "--stream", "--steps", "1", "--output", tmp_path / "out"]
    status, _, error = run_training(capsys, model, *options)
    assert status == 2 and "Expected an image in" in error
    status, _, error = run_training(capsys, model, *options, "--train-text", "--prompt", "what ?")
    assert status == 2 and "for `--prompt`" in error
    assert not (tmp_path / "out").exists()


def test_held_out_rows_of_a_stream(model, sources, tmp_path, capsys):
    """Rows that are trained on and evaluated on."""
    options = ["--data", sources["tar"], "--stream", "--eval-share", "0.25", "--steps", "2", "--batch-size", "2"]
    status, out, error = run_training(capsys, model, *options, "--output", tmp_path / "out", *FAST[:4])
    assert status == 0 and "18 examples to train on, 6 to evaluate on" in out and "evaluation loss" in out, error


@pytest.mark.parametrize("most", [100, 4])
def test_bad_rows_of_an_evaluation(most, model, tmp_path, capsys, monkeypatch):
    """A row that counts twice in the evaluation loss, in place of a bad one; a run that ends at its first evaluation,
    after the training.
    """
    monkeypatch.setattr(run_data, "CHECKED", most)
    data = write_examples(tmp_path / "data", lines(8, {}))
    another = {2: {"file_name": "red.png", "question": "how many ?", "answer": "There are 7 of them."}}
    others = write_examples(tmp_path / "others", lines(4, another | {1: BROKEN[3]}))
    good = write_examples(tmp_path / "good", [each for index, each in enumerate(lines(4, another)) if index != 1])
    options = ["--data", data, "--stream", "--steps", "2", "--batch-size", "1", *FAST[:4]]
    losses = []
    for name, folder, more in (("good", good, []), ("skip", others, ["--bad-rows", "skip", "--bad-rows-limit", "0.2"])):
        output = tmp_path / f"out_{name}"
        status, out, error = run_training(capsys, model, *options, *more, "--eval-data", folder, "--output", output)
        assert status == 0, error
        losses.append(re.search(r"evaluation loss (\S+)", out)[1])
    assert losses[0] == losses[1] and "1 bad row(s) were left out" in out
    assert len((output / BAD_ROWS_FILE).read_text().splitlines()) == 1
    status, out, error = run_training(capsys, model, *options, "--eval-data", others, "--output", tmp_path / "stop")
    assert status == 2 and "line 2: " in error and "does not exist" in error and not (tmp_path / "stop").exists()


def test_pictures_on_both_sides(model, tmp_path, capsys):
    """An evaluation loss of pictures that the model has seen, taken for one of new pictures."""
    data = write_examples(tmp_path / "data", lines(8, {}))  # eight questions about one picture
    options = ["--data", data, "--steps", "1", "--batch-size", "2", *FAST[:4]]
    told = "2 of the examples to evaluate on show images that are trained on, too"
    status, out, error = run_training(capsys, model, *options, "--eval-share", "0.25", "--output", tmp_path / "a")
    assert status == 0 and told in out, error
    others = write_examples(tmp_path / "others", lines(2, {}))
    status, out, error = run_training(capsys, model, *options, "--eval-data", others, "--output", tmp_path / "b")
    assert status == 0 and "to evaluate on show" not in out, error


def test_what_the_log_says(model, tmp_path, capsys):
    """A run that waits for its data, and nobody sees it; an epoch that is counted wrongly."""
    data = write_examples(tmp_path / "data", CAPTIONS)
    options = ["--data", data, "--epochs", "2", "--batch-size", "2", "--save-steps", "8", *FAST[:4]]
    assert run_training(capsys, model, *options, "--output", tmp_path / "out")[0] == 0
    state = json.loads((tmp_path / "out" / "checkpoints" / "checkpoint-8" / "trainer_state.json").read_text())
    logs = [entry for entry in state["log_history"] if "loss" in entry]
    assert [entry["epoch"] for entry in logs] == [0.25 * step for step in range(1, 9)]
    assert all(0 < entry["data_wait"] < 1 and entry["rows_per_second"] > 0 for entry in logs)


ROWS = """
import json, sys
from hf_xattn.data.loading import load_rows
from hf_xattn.data.loading import Shuffled
rows = load_rows(sys.argv[1])
order = Shuffled(rows, len(rows))
for place in range(0, len(rows), len(rows) // 2000):
    order[place]
print(next(line for line in open("/proc/self/status") if line.startswith("RssAnon")).split()[1])
"""


@pytest.mark.slow
def test_memory_of_a_million_rows(tmp_path):
    """A list of all rows, in each process."""
    used = {}
    for count in (10_000, 1_000_000):
        path = tmp_path / f"{count}.jsonl"
        with path.open("w") as file:
            for index in range(count):
                file.write(
                    json.dumps({"file_name": f"{index}.png", "question": "what ? " * 9, "answer": "a " * 30}) + "\n"
                )
        done = subprocess.run([sys.executable, "-c", ROWS, str(path)], capture_output=True, text=True, check=True)
        used[count] = int(done.stdout)  # kB
    assert used[1_000_000] - used[10_000] < 200_000
