"""`hf-xattn train` under a real `accelerate launch`: two processes over gloo."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from helpers.checkout import ROOT
from helpers.inputs.training_examples import CAPTIONS, write_examples
from helpers.models.template_models import save_chat_model
from helpers.processes.command_runs import run_training
from hf_xattn.training import launch
from hf_xattn.training.run_folder import CHECKPOINTS, OPTIONS_FILE


# Loaded by each process when it starts: notes which files of the run it opens to write.
WATCH = """
import os, sys
def note(event, given):
    if event == "open" and str(given[0]).startswith(os.environ["WATCHED"]) and isinstance(given[2], int):
        if given[2] & (os.O_WRONLY | os.O_RDWR):
            with_rank = os.environ.get("RANK", "launcher")
            os.write(notes, f"{with_rank} {given[0]}\\n".encode())
notes = os.open(os.environ["NOTES"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
sys.addaudithook(note)
"""
RANKS = ("RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK")
SIZES = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
LAUNCH = [sys.executable, "-m", "accelerate.commands.launch"]
TWO = ["--multi_gpu", "--num_processes", "2", "--num_machines", "1", "--main_process_port", "0"]


@pytest.fixture(scope="module")
def desk(tmp_path_factory):
    """A model, and eight captions of several lengths."""
    folder = tmp_path_factory.mktemp("launched")
    save_chat_model(folder / "model")
    lines = [{**line, "text": line["text"] * (1 + index % 3)} for index, line in enumerate(CAPTIONS)]
    write_examples(folder / "data", lines)
    return folder


def command(desk, output, *options):
    fixed = "--epochs 3 --log-steps 1 --save-steps 2 --learning-rate 0.01 --eval-share 0.25".split()
    fixed += "--text-share 0 --device cpu".split()
    return [str(part) for part in (desk / "model", "--data", desk / "data", "--output", output, *fixed, *options)]


def launched(desk, output, how, *options, folder):
    (folder / "watch").mkdir(exist_ok=True)
    (folder / "watch" / "sitecustomize.py").write_text(WATCH)
    paths = os.pathsep.join([str(folder / "watch"), str(ROOT)])
    environment = {name: value for name, value in os.environ.items() if name not in (*RANKS, *SIZES, "LOCAL_RANK")}
    environment |= {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "HF_HOME": str(folder / "hub")}
    environment |= {"WATCHED": str(output), "NOTES": str(folder / "notes")}
    whole = [*LAUNCH, *how, "-m", "hf_xattn", "train", *command(desk, output, *options)]
    return subprocess.run(whole, env=environment, capture_output=True, text=True, timeout=300)


def logged(output, step):
    state = json.loads((output / CHECKPOINTS / f"checkpoint-{step}" / "trainer_state.json").read_text())
    return [entry for entry in state["log_history"] if "loss" in entry]


def names(folder):
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_two_processes_are_one_run(desk, tmp_path, capsys):
    """Two runs side by side that write over each other; rows that both see; a mean of means;
    everything printed twice.
    """
    done = launched(desk, tmp_path / "two", TWO, "--batch-size", "1", folder=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    status, printed, error = run_training(capsys, *command(desk, tmp_path / "one", "--batch-size", "2"))
    assert status == 0, error

    lines = [re.sub("two|one", "out", line) for line in printed.splitlines() if "'loss'" not in line]
    told = [line for line in lines if not line.startswith(("{", "training loss", "evaluation loss"))]
    assert len(told) >= 3 and all(re.sub("two|one", "out", done.stdout).count(line) == 1 for line in told), done.stdout
    assert done.stdout.count("2 processes, each with 1 examples") == done.stdout.count("training loss") == 1

    one, two = logged(tmp_path / "one", 8), logged(tmp_path / "two", 8)
    assert [entry["step"] for entry in one] == [entry["step"] for entry in two] == list(range(1, 9))
    for expected, found in zip(one, two):
        for name in ("loss", "grad_norm", "learning_rate", "epoch"):
            assert found[name] == pytest.approx(expected[name], rel=1e-4), (expected, found)
    before = load_file(desk / "model" / "model.safetensors")
    expected, found = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    assert expected.keys() == found.keys()
    for name, weight in expected.items():
        assert torch.allclose(found[name], weight, atol=1e-4), name
    assert any((weight - before[name]).abs().max() > 1e-2 for name, weight in expected.items())

    states = {f"{CHECKPOINTS}/checkpoint-{step}/rng_state" for step in (8, 9)}
    assert names(tmp_path / "two") == {
        each for name in names(tmp_path / "one") for each in _of_each(name, states, processes=2)
    }
    assert json.loads((tmp_path / "two" / OPTIONS_FILE).read_text())["processes"] == 2
    card = (tmp_path / "two" / "README.md").read_text()
    assert "| examples a step | 2 |" in card and "| optimizer steps | 9 |" in card
    opened = [line.split(" ", 1) for line in (tmp_path / "notes").read_text().splitlines()]
    assert {path for rank, path in opened if rank == "1"} == set()  # torch and safetensors write past Python
    assert "README.md" in {Path(path).name for rank, path in opened if rank == "0"}

    status, _, error = run_training(capsys, *command(desk, tmp_path / "two", "--batch-size", "1"), "--resume")
    assert status == 2 and "complete" in error
    saved = json.loads((tmp_path / "two" / OPTIONS_FILE).read_text())
    (tmp_path / "two" / OPTIONS_FILE).write_text(json.dumps({**saved, "complete": False}))
    status, _, error = run_training(capsys, *command(desk, tmp_path / "two", "--batch-size", "1"), "--resume")
    assert status == 2 and "expected the number of processes to be 2" in error and "got 1" in error
    (tmp_path / "two" / OPTIONS_FILE).write_text(json.dumps({**saved, "complete": False, "processes": 1, "gpus": 2}))
    status, _, error = run_training(capsys, *command(desk, tmp_path / "two", "--batch-size", "1"), "--resume")
    assert status == 2 and "expected the number of GPUs of a process to be 2" in error and "got 1" in error


def _of_each(name, states, processes):
    """The files that stand for one of the single process: its random state is that of each."""
    stem = name.removesuffix(".pth")
    return [f"{stem}_{rank}.pth" for rank in range(processes)] if stem in states else [name]


@pytest.mark.slow
def test_two_killed_processes_go_on(desk, tmp_path):
    """Processes that go on from different checkpoints, or with the random state of another one."""
    options = ["--batch-size", "1"]
    done = launched(desk, tmp_path / "whole", TWO, *options, folder=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    kill = "import builtins, os, signal, torch\nfrom transformers import Trainer\nwhole, count = Trainer.training_step, iter(range(9))\n"  # noqa: E501
    kill += "def step(self, *given, **named):\n    if next(count) == 5 and os.environ['RANK'] == '1':\n"
    kill += "        os.kill(os.getpid(), signal.SIGKILL)\n    return whole(self, *given, **named)\nTrainer.training_step = step\n"  # noqa: E501
    (tmp_path / "killing.py").write_text(kill + "from hf_xattn.commands.main import main\nraise SystemExit(main())\n")
    script = [*LAUNCH, *TWO, str(tmp_path / "killing.py"), "train", *command(desk, tmp_path / "killed", *options)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    assert subprocess.run(script, env=environment, capture_output=True, timeout=300).returncode != 0
    done = launched(desk, tmp_path / "killed", TWO, *options, "--resume", folder=tmp_path)
    assert done.returncode == 0 and done.stdout.count("Continuing from") == 1, done.stderr[-3000:]
    whole, killed = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "killed"))
    assert all(torch.equal(killed[name], weight) for name, weight in whole.items())


def test_ranks_of_the_launchers(monkeypatch, capsys):
    """A launcher whose ranks are not known: each process takes itself for the first one."""
    for name in (*RANKS, *SIZES):
        monkeypatch.delenv(name, raising=False)
    assert launch.is_first_process() and launch.num_processes() == 1
    for rank, size in zip(RANKS, SIZES):
        with monkeypatch.context() as patch:
            patch.setenv(rank, "1")
            patch.setenv(size, "4")
            assert not launch.is_first_process() and launch.num_processes() == 4
            launch.say("not this one")
    launch.say("once")
    assert capsys.readouterr().out == "once\n"
