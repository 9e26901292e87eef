"""Teaches a model to caption pictures, with transformers' `Trainer` and rows in memory.

python examples/training/caption_with_trainer.py

The rows have the columns `messages` and `images`. `XAttnDataCollator` makes the batches, in which only the captions
are labels.
"""

import sys
import tempfile
from pathlib import Path

from transformers import Trainer, TrainingArguments

from hf_xattn import XAttnDataCollator


sys.path.append(str(Path(__file__).parents[1]))
from tiny_chat import caption_rows, captions_right, make_chat_model


QUESTION = "what is in the picture ?"


def main(folder: Path) -> None:
    model, processor = make_chat_model(folder)
    # With a real model, freeze the pretrained weights: hf_xattn.freeze_base(model). This one has random weights, so
    # all are trained.
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(folder / "trainer"),
            max_steps=60,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            learning_rate=3e-3,
            warmup_steps=3,
            logging_steps=20,
            save_strategy="no",
            report_to="none",
            remove_unused_columns=False,  # the collator reads columns that the model does not know
        ),
        # Each row is {"messages": [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": caption}],
        # "images": [picture]}.
        train_dataset=caption_rows(QUESTION),
        data_collator=XAttnDataCollator(processor),
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    print(f"loss falls: {losses[-1] < losses[0] / 2}")
    print(f"captions right: {captions_right(model.eval(), processor, QUESTION)} of 4")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        main(Path(name))
