"""Reads digits, trained with a loop of one's own and accelerate.

python examples/digits/with_accelerate.py [--output FOLDER] [--quick]
accelerate launch --num_processes 2 examples/digits/with_accelerate.py
"""

import torch
from accelerate import Accelerator
from task import Recipe, canvases, finish, make_bases, make_model, means
from torch.utils.data import DataLoader
from transformers import get_cosine_schedule_with_warmup

from hf_xattn import parameter_groups


def train(recipe: Recipe) -> list[float]:
    # The loader's batch is that of all processes. On CPUs accelerate joins the processes only if it is told to.
    accelerator = Accelerator(split_batches=True, cpu=not torch.accelerator.is_available())
    with accelerator.main_process_first():
        make_bases(recipe)
    model, processor = make_model(recipe)
    model.train()
    optimizer = torch.optim.AdamW(parameter_groups(model, recipe.learning_rate))
    schedule = get_cosine_schedule_with_warmup(optimizer, recipe.warmup, recipe.steps)
    loader = DataLoader(canvases(recipe, processor), batch_size=recipe.batch_size)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)

    losses: list[float] = []
    for batch in loader:
        # Answers differ in length: the mean over the labels of all processes, not the mean of their means.
        labels = accelerator.reduce((batch["labels"] != -100).sum())
        loss = model(**batch, num_items_in_batch=labels / accelerator.num_processes).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), reduction="mean").item())
        if len(losses) % recipe.log_steps == 0:
            accelerator.print(f"step {len(losses)}: loss {means(losses, recipe.log_steps)[-1]:.4f}")

    trained = accelerator.unwrap_model(model)
    trained.save_pretrained(recipe.folder / "model", is_main_process=accelerator.is_main_process)
    if accelerator.is_main_process:
        processor.save_pretrained(recipe.folder / "model")
        finish(recipe)
    return means(losses, recipe.log_steps)


if __name__ == "__main__":
    train(Recipe.from_command_line(__doc__))
