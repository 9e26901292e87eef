"""Reads digits, trained with transformers' `Trainer`.

python examples/digits/with_trainer.py [--output FOLDER] [--quick]
accelerate launch --num_processes 2 examples/digits/with_trainer.py
"""

import torch
from task import Recipe, canvases, finish, make_bases, make_model
from transformers import Trainer, TrainingArguments


def train(recipe: Recipe) -> list[float]:
    arguments = TrainingArguments(
        output_dir=str(recipe.folder / "trainer"),
        max_steps=recipe.steps,
        learning_rate=recipe.learning_rate,
        warmup_steps=recipe.warmup,
        lr_scheduler_type="cosine",
        logging_steps=recipe.log_steps,
        save_strategy="no",
        report_to="none",
        train_sampling_strategy="sequential",  # the canvases are random already
        remove_unused_columns=False,
        use_cpu=not torch.accelerator.is_available(),  # on CPUs Trainer joins several processes only if it is told to
    )
    arguments.per_device_train_batch_size = recipe.batch_size // arguments.world_size
    with arguments.main_process_first():
        make_bases(recipe)
    model, processor = make_model(recipe)
    trainer = Trainer(model=model, args=arguments, train_dataset=canvases(recipe, processor))
    trainer.train()
    trainer.save_model(str(recipe.folder / "model"))
    if trainer.is_world_process_zero():
        processor.save_pretrained(recipe.folder / "model")
        finish(recipe)
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    train(Recipe.from_command_line(__doc__))
