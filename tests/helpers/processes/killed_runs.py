"""Runs of a `Trainer` in processes of their own, which SIGKILL ends at a given moment, as a machine's scheduler would.

`warm_processes.call` calls `command` and `script`.
"""

import functools
import os
import signal
import sys
import tempfile
from pathlib import Path

import safetensors.torch
import torch
import transformers
from transformers import Trainer, TrainerState, modeling_utils, trainer_utils

from helpers.models.tiny_models import make_model
from helpers.processes.killed_saves import Killer
from helpers.processes.training_runs import Pairs, arguments
from hf_xattn import freeze, last_complete_checkpoint
from hf_xattn.commands.main import main


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def halve(path):
    """What is on the disk when a process ends in the middle of a file."""
    os.truncate(path, os.path.getsize(path) // 2)


def in_place_of(owner, name, function):
    """Has `function` called with the original function and its arguments."""
    setattr(owner, name, functools.partial(function, getattr(owner, name)))


def at_step(number):
    """Between two steps, when the gradients of the next are computed."""
    count = iter(range(1, 1000))

    def step(self, *args, whole=Trainer.training_step, **kwargs):
        loss = whole(self, *args, **kwargs)
        if next(count) == number:
            die()
        return loss

    Trainer.training_step = step


def in_weights(number):
    """While the weights of the checkpoint of this number are written."""
    count = iter(range(1, 1000))

    def save(whole, tensors, filename, *args, **kwargs):
        whole(tensors, filename, *args, **kwargs)
        if next(count) == number:
            halve(filename)
            die()

    in_place_of(modeling_utils, "safe_save_file", save)
    in_place_of(safetensors.torch, "save_file", save)


def in_torch_file(name, number):
    count = iter(range(1, 1000))

    def save(whole, value, file, *args, **kwargs):
        whole(value, file, *args, **kwargs)
        if os.path.basename(file) == name and next(count) == number:
            halve(file)
            die()

    in_place_of(torch, "save", save)


in_optimizer = functools.partial(in_torch_file, "optimizer.pt")
in_random_state = functools.partial(in_torch_file, "rng_state.pth")


def in_state(number):
    """While `trainer_state.json` is written, the last file of a checkpoint."""
    count = iter(range(1, 1000))

    def save(self, path, whole=TrainerState.save_to_json):
        whole(self, path)
        if next(count) == number:
            halve(path)
            die()

    TrainerState.save_to_json = save


def in_removal(number):
    """While an old checkpoint is removed."""
    count = iter(range(1, 1000))

    def remove(whole, path, *args, **kwargs):
        if Path(path).name.startswith("checkpoint-") and next(count) == number:
            next(Path(path).glob("*.safetensors")).unlink()
            die()
        whole(path, *args, **kwargs)

    in_place_of(trainer_utils.shutil, "rmtree", remove)


def in_options(number):
    """While the command writes the options of the run."""
    count = iter(range(1, 1000))

    def replace(whole, source, target, *args, **kwargs):
        if os.path.basename(target) == "training.json" and next(count) == number:
            die()
        whole(source, target, *args, **kwargs)

    in_place_of(os, "replace", replace)


def at_event(number):
    """When the process touches the disk for this number of times, whatever it writes."""
    Killer(tempfile.gettempdir(), number).install()


MOMENTS = {
    "event": at_event,
    "step": at_step,
    "weights": in_weights,
    "optimizer": in_optimizer,
    "random state": in_random_state,
    "state": in_state,
    "removal": in_removal,
    "options": in_options,
}


def command(arguments, moment=None, number=0):
    """`hf-xattn train`."""
    _prepare(moment, number)
    sys.exit(main(["train", *arguments]))


def script(folder, moment=None, number=0):
    """A plain `Trainer`, as a user's script: started again and again with the same command."""
    _prepare(moment, number)
    options = arguments(folder, max_steps=8, weight_decay=0.1)
    trainer = Trainer(freeze(make_model(random=False)), options, train_dataset=Pairs())
    trainer.train(resume_from_checkpoint=last_complete_checkpoint(folder))
    trainer.save_model(str(folder / "trained"))


def _prepare(moment, number):
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    if moment is not None:
        MOMENTS[moment](number)
