"""Short runs of `Trainer`: rows, arguments, a schedule that thaws parts."""

import os
import signal

import pytest
import torch
from tiny_models import make_model, pixels, token_ids
from transformers import Trainer, TrainerCallback, TrainingArguments

from hf_xattn import FreezeSchedule


class Pairs(torch.utils.data.Dataset):
    """Pictures and the text that goes with them; each third text has none."""

    def __init__(self):
        self.ids, self.pixels = token_ids(9, 6), pixels(9)

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        mask = torch.tensor([index % 3 > 0])
        ids = self.ids[index]
        return {"input_ids": ids, "labels": ids, "pixel_values": self.pixels[index], "image_mask": mask}


def arguments(folder, **changes):
    """Six steps of three rows, with a checkpoint after the third and the last."""
    options = {
        "output_dir": str(folder),
        "max_steps": 6,
        "per_device_train_batch_size": 3,
        "learning_rate": 1e-2,
        "save_steps": 3,
        "logging_steps": 1,
        "report_to": [],
        "use_cpu": True,
        "seed": 0,
        "disable_tqdm": True,
    }
    return TrainingArguments(**options | changes)


STAGES = {0: {"connector": True}, 2: {}, 0.5: {"text": False, "vision": False, "blocks": True}}
SCHEDULED_RUN = {"max_steps": 8, "save_steps": 3, "weight_decay": 0.1}


class Kill(TrainerCallback):
    """Ends the process after the fifth step."""

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 5:
            os.kill(os.getpid(), signal.SIGKILL)


def make_scheduled_trainer(folder, *callbacks, stages=STAGES, **options):
    """A `Trainer` whose parts thaw and freeze in `stages`."""
    model = make_model(random=False)
    return Trainer(
        model,
        arguments(folder, **SCHEDULED_RUN | options),
        train_dataset=Pairs(),
        callbacks=[FreezeSchedule(stages), *callbacks],
    )


def short_arguments(folder, **given):
    """No checkpoints, and nothing printed."""
    return TrainingArguments(
        output_dir=str(folder), report_to="none", use_cpu=True, save_strategy="no", disable_tqdm=True, **given
    )


def sft_settings(folder, **given):
    """The same for TRL's `SFTTrainer`."""
    trl = pytest.importorskip("trl")
    quiet = {"report_to": "none", "save_strategy": "no", "disable_tqdm": True}
    return trl.SFTConfig(output_dir=str(folder), use_cpu=True, bf16=False, **quiet, **given)
