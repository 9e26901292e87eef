"""Runs that are killed at any moment, and go on from the last complete checkpoint as if nothing had happened."""

import json
import logging
import os
import random
import shutil
import time

import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers.checkout import ROOT
from helpers.inputs.training_examples import MIXED, write_examples
from helpers.models.template_models import save_chat_model
from helpers.processes import killed_runs
from helpers.processes.warm_processes import KILLED, call, start
from hf_xattn import last_complete_checkpoint
from hf_xattn.training.run_folder import CHECKPOINTS, OPTIONS_FILE, UNFINISHED, find_checkpoints


slow = pytest.mark.slow  # a file more of the same kind


@pytest.fixture(scope="module")
def arguments(tmp_path_factory):
    """Ten steps with an evaluation in between, a checkpoint after every two, a shuffled order, and gradient
    accumulation.
    """
    folder = tmp_path_factory.mktemp("resume")
    save_chat_model(folder / "model")
    data = write_examples(folder / "data", MIXED)
    options = "--steps 10 --save-steps 2 --batch-size 2 --gradient-accumulation 2 --eval-share 0.25 --log-steps 1 --text-share 0 --device cpu"  # noqa: E501
    return [str(folder / "model"), "--data", str(data), "--learning-rate", "0.01", *options.split()]


@pytest.fixture(scope="module")
def whole(arguments, tmp_path_factory):
    """The run that nobody kills."""
    folder = tmp_path_factory.mktemp("whole") / "out"
    assert call(killed_runs.command, [*arguments, "--output", str(folder)]) == 0
    return folder


def logs_of(folder):
    """What was measured, without times."""
    state = json.loads((folder / CHECKPOINTS / "checkpoint-10" / "trainer_state.json").read_text())
    timed = ("runtime", "per_second", "data_wait")
    return [
        {name: value for name, value in entry.items() if not name.endswith(timed)} for entry in state["log_history"]
    ]


def check_same(folder, whole):
    for file in ("model.safetensors", f"{CHECKPOINTS}/checkpoint-10/optimizer.pt"):
        assert (folder / file).read_bytes() == (whole / file).read_bytes(), file
    assert logs_of(folder) == logs_of(whole)
    assert json.loads((folder / OPTIONS_FILE).read_text())["complete"]
    assert sorted(path.name for path in folder.iterdir()) == sorted(path.name for path in whole.iterdir())
    kept = sorted(path.name for path in (folder / CHECKPOINTS).iterdir())
    assert kept == ["checkpoint-10", "checkpoint-8"]


@pytest.mark.parametrize(
    "moment, number, before, skipped",
    [
        ("step", 14, 6, None),  # the second micro-batch of a step
        pytest.param("weights", 1, None, "trainer_state.json, which is written last, is missing", marks=slow),
        ("weights", 3, 4, "trainer_state.json, which is written last, is missing"),
        pytest.param("optimizer", 2, 2, "trainer_state.json, which is written last, is missing", marks=slow),
        pytest.param("random state", 2, 2, "trainer_state.json, which is written last, is missing", marks=slow),
        ("state", 3, 4, "trainer_state.json is cut off"),
        pytest.param("removal", 1, 6, None, marks=slow),
        pytest.param("weights", 6, 10, None, marks=slow),  # of the trained model, after the last checkpoint
        ("options", 3, 10, None),
    ],
)
def test_a_killed_run_goes_on_as_if_nothing_had_happened(moment, number, before, skipped, arguments, whole, tmp_path):
    """A run that starts from a checkpoint that was never written to its end, or does not start; other weights than
    without a break.
    """
    command = [*arguments, "--output", str(tmp_path / "out")]
    assert call(killed_runs.command, command, moment, number) == KILLED
    assert not (tmp_path / "out" / OPTIONS_FILE).read_text().count("complete")
    log = tmp_path / "log"
    assert call(killed_runs.command, [*command, "--resume"], output=log) == 0, log.read_text()
    printed = log.read_text()
    assert ("No checkpoint found" if before is None else f"checkpoint-{before}\n") in printed
    assert printed.count("is skipped") == (skipped is not None)
    if skipped:
        assert f"checkpoint-{(before or 0) + 2} is skipped: it is not complete ({skipped})" in printed
    check_same(tmp_path / "out", whole)
    assert "| optimizer steps | 10 |" in (tmp_path / "out" / "README.md").read_text()


def test_killed_in_bfloat16(arguments, tmp_path):
    """A warning that a checkpoint is rounded, whose trained weights are read in float32; other weights."""
    command = [*arguments, "--dtype", "bfloat16", "--steps", "3", "--save-steps", "1"]
    assert call(killed_runs.command, [*command, "--output", str(tmp_path / "whole")]) == 0
    command += ["--output", str(tmp_path / "out")]
    assert call(killed_runs.command, command, "step", 4) == KILLED
    log = tmp_path / "log"
    assert call(killed_runs.command, [*command, "--resume"], output=log) == 0, log.read_text()
    assert "Continuing from" in log.read_text() and "rounded" not in log.read_text()
    name = "model.safetensors"
    assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_a_run_of_an_earlier_version(arguments, tmp_path):
    """A run that goes on in another order: some rows come twice in an epoch, and others never."""
    command = [*arguments, "--output", str(tmp_path / "out")]
    assert call(killed_runs.command, command, "step", 10) == KILLED
    file = tmp_path / "out" / OPTIONS_FILE
    saved = json.loads(file.read_text())
    file.write_text(json.dumps({name: value for name, value in saved.items() if name != "order"}))
    log = tmp_path / "log"
    assert call(killed_runs.command, [*command, "--resume"], output=log) == 2
    told = f"got the run in {tmp_path / 'out'}, which another version began. Finish it with that version"
    assert told in log.read_text() and "each epoch a permutation of all rows" in log.read_text()


@pytest.mark.slow
def test_killed_again_and_again(arguments, whole, tmp_path):
    """A checkpoint that is killed a second time, with files of both times: it looks complete."""
    command = [*arguments, "--output", str(tmp_path / "out")]
    assert call(killed_runs.command, command, "options", 1) == KILLED
    assert call(killed_runs.command, [*command, "--resume"], "step", 10) == KILLED
    last = tmp_path / "out" / CHECKPOINTS / "checkpoint-4"
    os.truncate(
        last / "model.safetensors", 1000
    )  # cut off, beside a state that is whole: a machine that lost its power
    for moment in ("optimizer", "weights", "state"):
        assert call(killed_runs.command, [*command, "--resume"], moment, 1) == KILLED
        assert last_complete_checkpoint(last.parent).endswith("checkpoint-2")
        assert moment == "state" or not (last / "trainer_state.json").exists()
    assert call(killed_runs.command, [*command, "--resume"]) == 0
    check_same(tmp_path / "out", whole)


@pytest.mark.parametrize(
    "file", ["checkpoint-2/model.safetensors", pytest.param("checkpoint-4/optimizer.pt", marks=slow)]
)
def test_killed_from_outside(file, arguments, whole, tmp_path):
    """A process of the command that ends at a moment of which it knows nothing."""
    command = ["-m", "hf_xattn", "train", *arguments, "--output", str(tmp_path / "out")]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    run = start(command, tmp_path, environment=environment)
    end = time.monotonic() + 120
    while run.is_alive() and not (tmp_path / "out" / CHECKPOINTS / file).exists() and time.monotonic() < end:
        time.sleep(0.001)
    run.kill()
    run.join()
    assert run.exitcode == KILLED
    assert call(killed_runs.command, [*command[3:], "--resume"]) == 0
    check_same(tmp_path / "out", whole)


@slow
@pytest.mark.parametrize("seed", range(20))
def test_killed_at_any_moment(seed, arguments, whole, tmp_path):
    """A moment that nobody thought of, after which a run does not go on, or goes on as another one."""
    out = tmp_path / "out"
    command = [*arguments, "--output", str(out)]
    rng = random.Random(seed)
    for _ in range(2):
        begun = (out / OPTIONS_FILE).exists() or (out / UNFINISHED).exists()
        again = [*command, "--resume"] if begun else command
        code = call(killed_runs.command, again, "event", rng.randrange(1, 400))
        assert code in (0, KILLED)
        if code == 0:
            break
    log = tmp_path / "log"
    if "complete" not in ((out / OPTIONS_FILE).read_text() if (out / OPTIONS_FILE).exists() else ""):
        begun = (out / OPTIONS_FILE).exists() or (out / UNFINISHED).exists()
        assert call(killed_runs.command, [*command, "--resume"] if begun else command, output=log) == 0, log.read_text()
    check_same(out, whole)


@pytest.mark.parametrize(
    "moment, number", [("step", 5), *(pytest.param(moment, 2, marks=slow) for moment in ("weights", "state"))]
)
def test_script_that_was_killed(moment, number, tmp_path):
    """A script with a plain `Trainer` that cannot be started again, or that gives other weights."""
    assert call(killed_runs.script, tmp_path / "whole") == 0
    assert call(killed_runs.script, tmp_path / "killed", moment, number) == KILLED
    log = tmp_path / "log"
    assert call(killed_runs.script, tmp_path / "killed", output=log) == 0, log.read_text()
    files = [tmp_path / name / "trained" / "model.safetensors" for name in ("whole", "killed")]
    assert files[0].read_bytes() == files[1].read_bytes()
    assert ("is skipped" in log.read_text()) == (moment != "step")


# --- which checkpoint is complete


def make_checkpoint(folder, step):
    path = folder / f"checkpoint-{step}"
    path.mkdir(parents=True)
    weights = {"a": torch.ones(8, 8), "b": torch.ones(3)}
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin"):
        torch.save(weights, path / name)
    (path / "trainer_state.json").write_text(json.dumps({"global_step": step, "log_history": []}))
    return path


def remove(name):
    return lambda path: (path / name).unlink()


def cut(name):
    return lambda path: killed_runs.halve(path / name)


def empty(name):
    return lambda path: (path / name).write_bytes(b"")


def shards(path):
    (path / "model.safetensors").rename(path / "model-00001-of-00002.safetensors")
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


def sharded_state(path):
    (path / "model.safetensors").unlink()
    (path / "pytorch_model_fsdp_0").mkdir()
    (path / "pytorch_model_fsdp_0" / "__0_0.distcp").write_bytes(b"part")


def header(text):
    def spoil(path):
        (path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text.encode() + b"0" * 8)

    return spoil


def other_index(path):
    (path / "model.safetensors.index.json").write_text("[]")


@pytest.mark.parametrize(
    "spoil, reason",
    [
        (remove("trainer_state.json"), "trainer_state.json, which is written last, is missing"),
        (cut("trainer_state.json"), "trainer_state.json is cut off"),
        (remove("model.safetensors"), "it has no weights"),
        (cut("model.safetensors"), "model.safetensors is cut off"),
        (empty("model.safetensors"), "model.safetensors is cut off"),
        (header("[]"), "model.safetensors is cut off"),
        (header('{"a": {"dtype": "F32"}}'), "model.safetensors is cut off"),
        (other_index, "model.safetensors.index.json is damaged"),
        (cut("optimizer.pt"), "optimizer.pt is cut off"),
        (empty("rng_state.pth"), "rng_state.pth is cut off"),
        (shards, "model-00002-of-00002.safetensors of model.safetensors.index.json is missing"),
        (sharded_state, "pytorch_model_fsdp_0/.metadata, which is written last, is missing"),
    ],
)
def test_an_incomplete_checkpoint_is_skipped(spoil, reason, tmp_path, monkeypatch):
    """A checkpoint that does not load, taken because its number is the highest; a good one that is passed over."""
    good, last = make_checkpoint(tmp_path, 9), make_checkpoint(tmp_path, 10)
    (tmp_path / "checkpoint-11").touch()
    (tmp_path / "checkpoint-best").mkdir()
    assert last_complete_checkpoint(str(tmp_path)) == str(last)
    spoil(last)
    warnings = []
    monkeypatch.setattr(logging.getLogger("hf_xattn.training.run_folder"), "warning", warnings.append)
    assert last_complete_checkpoint(tmp_path) == str(good)
    assert warnings == [f"{last} is skipped: it is not complete ({reason})."]
    shutil.rmtree(good)
    assert last_complete_checkpoint(tmp_path) is None


def test_what_counts_as_complete(tmp_path):
    """A checkpoint of another kind that is passed over: an adapter's, one without an optimizer, one of several
    processes.
    """
    assert last_complete_checkpoint(tmp_path / "nothing") is None
    path = make_checkpoint(tmp_path, 2)
    (path / "model.safetensors").rename(path / "adapter_model.safetensors")
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
        (path / name).unlink()
    torch.save({}, path / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    assert last_complete_checkpoint(tmp_path) == str(path)
    torch.save({}, path / "rng_state_0.pth")
    assert find_checkpoints(tmp_path, processes=2)[1] == [(path, "rng_state_1.pth is missing")]
    torch.save({}, path / "rng_state_1.pth")
    assert find_checkpoints(tmp_path, processes=2)[0] == path
    assert load_file(path / "adapter_model.safetensors").keys() == {"a", "b"}
