"""Parts that thaw and freeze during a run of `Trainer`."""

import pytest
import torch
from tiny_models import make_model
from training_runs import SCHEDULED_RUN, STAGES, Kill, Pairs, arguments, make_scheduled_trainer
from transformers import Trainer, TrainerCallback
from warm_processes import KILLED, call

from hf_xattn import FreezeSchedule, freeze, parameter_groups
from hf_xattn.decoders.insertion import PARTS, part_of


def weights_of(model):
    return {name: weight.detach().clone() for name, weight in model.named_parameters()}


class Watch(TrainerCallback):
    """Notes after each step which parts have moved."""

    def __init__(self):
        self.moved = []

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        self.before = weights_of(model)

    def on_step_end(self, args, state, control, model=None, **kwargs):
        moved = {name for name, weight in model.named_parameters() if not torch.equal(weight, self.before[name])}
        self.moved.append({part_of(name.removeprefix("model.")) for name in moved})


def test_parts_train_in_their_stages(tmp_path, capsys):
    """A thawed part that the optimizer does not hold, a frozen part that decays or follows its momentum."""
    watch = Watch()
    trainer = make_scheduled_trainer(tmp_path, watch, save_strategy="no")
    trainer.train()
    assert watch.moved == [{"blocks"}] * 2 + [{"blocks", "connector"}] * 2 + [set(PARTS) - {"blocks"}] * 4
    assert capsys.readouterr().out.count("From step ") == 3
    assert trainer.model.get_decoder().layers[0].training and not trainer.model.blocks[0].training


def train_until_killed(folder):
    torch.set_num_threads(1)
    make_scheduled_trainer(folder, Kill()).train()


@pytest.mark.parametrize("killed", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_run_goes_on_from_a_checkpoint(killed, tmp_path):
    """A resumed run that starts its schedule again, or with another optimizer: other weights than without a break."""
    whole = make_scheduled_trainer(tmp_path / "whole")
    whole.train()
    folder = tmp_path / ("killed" if killed else "whole")
    if killed:
        assert call(train_until_killed, folder) == KILLED
        assert [path.name for path in folder.glob("checkpoint-*")] == ["checkpoint-3"]
    for step in (3,) if killed else (3, 6):
        resumed = make_scheduled_trainer(tmp_path / f"resumed-{step}")
        resumed.train(resume_from_checkpoint=str(folder / f"checkpoint-{step}"))
        for name, weight in resumed.model.named_parameters():
            assert torch.equal(weight, whole.model.get_parameter(name)), name


def test_with_groups(tmp_path):
    """An optimizer made before the schedule, which misses what thaws later: it would never train, and
    nobody is told.
    """
    model = freeze(make_model(random=False))
    watch = Watch()

    def run(include_frozen):
        optimizer = torch.optim.AdamW(parameter_groups(model, 1e-2, 0.1, include_frozen))
        options = {"train_dataset": Pairs(), "callbacks": [FreezeSchedule(STAGES), watch]}
        Trainer(
            model, arguments(tmp_path, **SCHEDULED_RUN, save_strategy="no"), optimizers=(optimizer, None), **options
        ).train()

    run(include_frozen=True)
    assert watch.moved[-1] == set(PARTS) - {"blocks"}
    freeze(model)
    with pytest.raises(ValueError, match="optimizer with the parameters of all stages.*include_frozen=True"):
        run(include_frozen=False)


def test_stages_are_checked_before_a_step(tmp_path):
    """A run of days that fails at the step where a part shall thaw."""
    with pytest.raises(ValueError, match=r"begin one after the other.*\[0, 6, 4\]"):
        make_scheduled_trainer(tmp_path, stages={0: {}, 6: {}, 0.5: {}}).train()
    with pytest.raises(ValueError, match="`names`.*'no.such'"):
        make_scheduled_trainer(tmp_path, stages={0: {}, 4: {"names": {"no.such": True}}})
    for stages, error in (
        ({1: {}}, "first stage at 0"),
        ({0: {}, 0.7: {}, 0.2: {}}, "increase"),
        ([(0, {}), (0.0, {"text": False})], "one stage for each beginning"),
        ({0: {"test": True}}, r"arguments of `freeze`.*\['test'\]"),
        ({0: {}, 1.5: {}}, "got 1.5"),
    ):
        with pytest.raises(ValueError, match=error):
            FreezeSchedule(stages)
    late = Trainer(freeze(make_model()), arguments(tmp_path, **SCHEDULED_RUN), train_dataset=Pairs())
    late.create_optimizer()
    late.add_callback(FreezeSchedule(STAGES))
    with pytest.raises(ValueError, match=r"`Trainer\(callbacks=\[...\]\)`"):
        late.train()
