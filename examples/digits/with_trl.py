"""Reads digits, trained with TRL's `SFTTrainer` on chats with pictures.

pip install -e ".[demo,trl]"
python examples/digits/with_trl.py [--output FOLDER] [--quick]
"""

import sys

from task import Recipe, canvases, finish, make_bases, make_model

from hf_xattn import XAttnDataCollator
from hf_xattn.demo.canvases import PROMPT, CanvasDataset, picture_of, sentence


try:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer
except ImportError as error:
    sys.exit(f'This example needs TRL: pip install "trl>=1.16" ({error})')


def chats(data: CanvasDataset) -> Dataset:
    """The same canvases in TRL's format, drawn when they are asked for: `messages` and `images`."""

    def drawn(rows: dict) -> dict:
        drawings = [data.canvas(index) for index in rows["index"]]
        answers = [sentence(canvas.digits).removeprefix(PROMPT).strip() for canvas in drawings]
        return {
            "messages": [
                [{"role": "user", "content": PROMPT}, {"role": "assistant", "content": answer}] for answer in answers
            ],
            "images": [[picture_of(canvas)] for canvas in drawings],
        }

    return Dataset.from_dict({"index": range(len(data))}).with_transform(drawn)


def train(recipe: Recipe) -> list[float]:
    make_bases(recipe)
    model, processor = make_model(recipe)
    trainer = SFTTrainer(
        model=model,
        args=SFTConfig(
            output_dir=str(recipe.folder / "trl"),
            max_steps=recipe.steps,
            per_device_train_batch_size=recipe.batch_size,
            learning_rate=recipe.learning_rate,
            warmup_steps=recipe.warmup,
            lr_scheduler_type="cosine",
            logging_steps=recipe.log_steps,
            save_strategy="no",
            report_to="none",
            bf16=False,
            train_sampling_strategy="sequential",
            remove_unused_columns=False,  # the column `index`, of which the rows are made
        ),
        train_dataset=chats(canvases(recipe, processor)),
        processing_class=processor,
        # The answers are the labels. TRL's own collator trains on the whole text.
        data_collator=XAttnDataCollator(processor, padding_side="right"),
    )
    trainer.train()
    trainer.save_model(str(recipe.folder / "model"))
    finish(recipe)
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    train(Recipe.from_command_line(__doc__))
