"""Reads digits, trained with FSDP2: each process holds a part of each weight.

torchrun --nproc-per-node 2 examples/digits/with_fsdp2.py [--output FOLDER] [--quick]

Here on CPUs, over gloo. On GPUs: `device_mesh("cuda", ...)`, and model and batches on the process's own GPU.
"""

import json

import torch
import torch.distributed as dist
from task import Recipe, canvases, finish, make_bases, make_model, means
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler
from transformers import get_cosine_schedule_with_warmup

from hf_xattn import parameter_groups, sharding_units


def train(recipe: Recipe) -> list[float]:
    dist.init_process_group("gloo")
    rank, processes = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        make_bases(recipe)
    dist.barrier()
    model, processor = make_model(recipe)

    mesh = dist.init_device_mesh("cpu", (processes,))
    for unit in sharding_units(model):  # layers of the tower; layers of the decoder, each with its block
        fully_shard(unit, mesh=mesh)
    fully_shard(model, mesh=mesh)  # the rest
    model.train()

    # After the sharding: the optimizer holds a process's own parts of the weights.
    optimizer = torch.optim.AdamW(parameter_groups(model, recipe.learning_rate))
    schedule = get_cosine_schedule_with_warmup(optimizer, recipe.warmup, recipe.steps)
    data = canvases(recipe, processor)
    share = DistributedSampler(data, shuffle=False)
    losses: list[float] = []
    for batch in DataLoader(data, batch_size=recipe.batch_size // processes, sampler=share):
        # Answers differ in length: the mean over the labels of all processes, not the mean of their means.
        labels = (batch["labels"] != -100).sum()
        dist.all_reduce(labels)
        loss = model(**batch, num_items_in_batch=labels / processes).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # the norm over the parts of all processes
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(_mean_of_processes(loss))
        if rank == 0 and len(losses) % recipe.log_steps == 0:
            print(f"step {len(losses)}: loss {means(losses, recipe.log_steps)[-1]:.4f}")

    model.save_pretrained(
        recipe.folder / "model"
    )  # by all processes: they gather the weights, and the first one writes
    if rank == 0:
        processor.save_pretrained(recipe.folder / "model")
        (recipe.folder / "losses.json").write_text(json.dumps(means(losses, recipe.log_steps)))
    dist.destroy_process_group()
    if rank == 0:
        finish(recipe)
    return means(losses, recipe.log_steps)


def _mean_of_processes(loss: torch.Tensor) -> float:
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


if __name__ == "__main__":
    train(Recipe.from_command_line(__doc__))
