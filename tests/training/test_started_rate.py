"""`hf-xattn train --started-rate`: what does not start at zero learns slower."""

import pytest
import torch
from safetensors.torch import load_file

from helpers.inputs.training_examples import CAPTIONS, write_examples
from helpers.models.template_models import save_chat_model
from helpers.models.tiny_models import make_model
from helpers.processes.command_runs import interrupted, run_training
from hf_xattn import freeze, parameter_groups
from hf_xattn.training.freezing import starts_at_zero


RATE = 1e-3


def weights(folder):
    return {name: value.float() for name, value in load_file(folder / "model.safetensors").items()}


@pytest.fixture
def arguments(tmp_path):
    save_chat_model(tmp_path / "model")
    data = write_examples(tmp_path / "data", CAPTIONS)
    words = f"--steps 4 --batch-size 2 --learning-rate {RATE} --warmup 0 --save-steps 2 --started-rate 0.1"
    return [tmp_path / "model", "--data", data, *words.split()]


def test_what_has_a_start_moves_less(arguments, tmp_path, capsys):
    """A share that is dropped, or given to the wrong weights; weights that are in no group."""
    status, _, error = run_training(capsys, *arguments, "--output", tmp_path / "out")
    assert status == 0, error
    assert (
        "share of the learning rate for weights that do not start at zero" in (tmp_path / "out/README.md").read_text()
    )
    before, after = weights(tmp_path / "model"), weights(tmp_path / "out")
    moved = {name: float((after[name] - value).abs().max()) for name, value in before.items()}
    trained = {name for name in moved if "cross_attention_block" in name or "connector" in name}
    assert all((moved[name] > 0) == (name in trained) for name in moved)
    assert max(moved[name] for name in trained if "q_proj" in name) > 0.05 * RATE
    # A step of AdamW moves a weight by about its rate; four steps of a cosine are 2.5 of the first.
    for name in trained:
        share = 1.0 if "o_proj" in name or "down_proj" in name else 0.1
        assert moved[name] < 2.6 * share * RATE, name
        assert moved[name] > (0.5 * share * RATE if share == 1.0 else 0), name


def test_a_resumed_run_keeps_its_rates(arguments, tmp_path, capsys, monkeypatch):
    """Groups in another order than those of the checkpoint, or a run that goes on with another share."""
    assert run_training(capsys, *arguments, "--output", tmp_path / "whole")[0] == 0
    interrupted(capsys, monkeypatch, 3, *arguments, "--output", tmp_path / "stopped")
    resumed = [*arguments, "--output", tmp_path / "stopped", "--resume"]
    status, _, error = run_training(capsys, *resumed, "--started-rate", "0.2")
    assert status == 2 and "`--started-rate` to be 0.1" in error
    status, out, error = run_training(capsys, *resumed)
    assert status == 0 and "checkpoint-2" in out, error
    whole, stopped = weights(tmp_path / "whole"), weights(tmp_path / "stopped")
    assert all(torch.equal(stopped[name], value) for name, value in whole.items())


def test_where_nothing_starts_at_zero(arguments, tmp_path, capsys):
    """A share that would slow all weights."""
    save_chat_model(tmp_path / "model", cross_attention_config={"zero_init": False, "gate_init": 0.0})
    status, _, error = run_training(capsys, *arguments, "--output", tmp_path / "out")
    assert status == 2 and "whose output projections start at zero" in error and not (tmp_path / "out").exists()
    status, _, error = run_training(capsys, *arguments, "--output", tmp_path / "out", "--started-rate", "0")
    assert status == 2 and "`--started-rate` must be above 0, got 0.0" in error


def test_groups_for_an_optimizer():
    """A share for weights that start at zero, for no others, or that other groups get."""
    model = freeze(make_model(), text=True)
    groups = {
        group["name"]: group
        for group in parameter_groups(model, {"connector": 1.0, "blocks": 2.0}, 0.1, started_rate=0.5)
    }
    rates = {name: group["lr"] for name, group in groups.items()}
    assert rates == {
        "connector, started": 0.5,
        "connector, no decay, started": 0.5,
        "blocks": 2.0,
        "blocks, started": 1.0,
        "blocks, no decay, started": 1.0,
    }
    assert {id(weight) for weight in groups["blocks"]["params"]} == {id(weight) for weight in starts_at_zero(model)}
    together = parameter_groups(model, 1.0, include_frozen=True)
    split = parameter_groups(model, 1.0, include_frozen=True, started_rate=0.5)
    assert {group["name"] for group in split if "started" not in group["name"]} == {"blocks"}
    count = [sum(weight.numel() for group in groups for weight in group["params"]) for groups in (together, split)]
    assert count[0] == count[1] == sum(weight.numel() for weight in model.parameters())
