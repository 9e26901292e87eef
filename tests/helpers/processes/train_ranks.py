"""What a rank of `test_sharded_training.py` does: `torchrun --nproc-per-node 2 train_ranks.py FOLDER CASE...`"""

import json
import sys
from pathlib import Path

import torch
from transformers import Trainer

from helpers.processes.sharded_ranks import accelerator_with_fsdp
from hf_xattn.commands.main import main


def with_fsdp(options: dict) -> None:
    """Each `Trainer` made from now on takes its run for one with FSDP2, as under `accelerate launch` with a
    configuration.
    """

    def create(trainer, whole=Trainer.create_accelerator_and_postprocess):
        whole(trainer)
        accelerator_with_fsdp(trainer.accelerator, **options)
        trainer.is_fsdp_enabled = True

    Trainer.create_accelerator_and_postprocess = create


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder, *cases = sys.argv[1:]
    created = Trainer.create_accelerator_and_postprocess
    for case in cases:
        run = json.loads(Path(folder, f"{case}.json").read_text())
        with_fsdp(run["fsdp"])
        if main(["train", *run["arguments"]]):
            sys.exit(f"{case} failed")
        Trainer.create_accelerator_and_postprocess = created
