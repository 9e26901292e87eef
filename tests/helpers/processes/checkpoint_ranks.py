"""What a rank of `test_sharded_checkpoints.py` does: `torchrun --nproc-per-node N checkpoint_ranks.py FOLDER WHAT`."""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from transformers import Trainer, TrainingArguments

from helpers.models.tiny_models import pixels, token_ids
from helpers.processes.sharded_ranks import accelerator_with_fsdp, build, shard
from hf_xattn import freeze_base, retrofit


WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)
FROZEN = ("text", "vision")


def step(model, optimizer) -> float:
    """One step on the same rows in all ranks, so that their number does not matter."""
    ids = token_ids()
    loss = model(input_ids=ids, labels=ids, pixel_values=pixels()).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def sharded(distributed: bool):
    """The model of all ranks, and AdamW, whose state is saved and loaded, too."""
    model = build("llama", FROZEN)
    if distributed:
        model, _ = shard(model, "fsdp", {})
    return model, torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad], lr=1e-2)


def save(folder: Path) -> None:
    model, optimizer = sharded(True)
    step(model, optimizer)
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=folder / "checkpoint")
    losses = [step(model, optimizer) for _ in range(2)]
    whole = get_model_state_dict(model, options=WHOLE)
    if dist.get_rank() == 0:
        torch.save({"losses": losses, "weights": whole}, folder / "expected.pt")


def load(folder: Path) -> None:
    distributed = dist.is_initialized()
    model, optimizer = sharded(distributed)
    with torch.no_grad():
        for weight in model.parameters():
            weight.zero_()
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments}
    dcp.load(state, checkpoint_id=folder / "checkpoint")
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    losses = [step(model, optimizer) for _ in range(2)]
    whole = get_model_state_dict(model, options=WHOLE)
    if not distributed or dist.get_rank() == 0:
        torch.save({"losses": losses, "weights": whole}, folder / "found.pt")


def load_once(folder: Path) -> None:
    """A retrofit with accelerate's `fsdp_cpu_ram_efficient_loading`: the ranks get the weights that the
    first one has.
    """
    os.environ.update(ACCELERATE_USE_FSDP="true", FSDP_CPU_RAM_EFFICIENT_LOADING="true", FSDP_VERSION="2")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = retrofit(folder / "text", folder / "vision", every=2)
    read = {name: weight.clone() for name, weight in model.state_dict().items()}
    freeze_base(model)
    accelerator = accelerator_with_fsdp()
    optimizer = torch.optim.SGD([weight for weight in model.parameters() if weight.requires_grad], lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    whole = get_model_state_dict(model, options=WHOLE)
    torch.save({"read": read, "whole": whole}, folder / f"found-{rank}.pt")


class _Rows(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = token_ids(1, seed=index)[0]
        return {"input_ids": ids, "labels": ids, "pixel_values": pixels(1, seed=index)[0]}


def train(folder: Path) -> None:
    """`Trainer` in two processes with FSDP2, and in one without."""
    model = build("llama", FROZEN)
    options = {"per_device_train_batch_size": 4 // int(os.environ.get("WORLD_SIZE", 1)), "max_steps": 3}
    arguments = TrainingArguments(
        folder / "trainer",
        **options,
        learning_rate=1e-2,
        optim="sgd",
        lr_scheduler_type="constant",
        max_grad_norm=0.1,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        seed=0,
    )
    trainer = Trainer(model, arguments, train_dataset=_Rows())
    name = "one"
    if dist.is_initialized():
        name = "ranks"
        accelerator_with_fsdp(trainer.accelerator)
        trainer.is_fsdp_enabled = True
    trainer.train()
    trainer.save_model(folder / name)


if __name__ == "__main__":
    torch.set_num_threads(1)
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        dist.init_process_group("gloo")
    {"save": save, "load": load, "load once": load_once, "train": train}[sys.argv[2]](Path(sys.argv[1]))
    if dist.is_initialized():
        dist.destroy_process_group()
