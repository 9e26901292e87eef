"""Short runs of `Trainer`: rows and arguments."""

import pytest
import torch
from transformers import TrainingArguments

from helpers.models.tiny_models import pixels, token_ids


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
