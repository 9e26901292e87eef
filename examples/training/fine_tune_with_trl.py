"""Fine-tunes a model with TRL's `SFTTrainer`, on a data set in TRL's format: `messages` and `images`.

pip install -e ".[trl]"
python examples/training/fine_tune_with_trl.py
"""

import sys
import tempfile
from pathlib import Path

from hf_xattn import XAttnDataCollator


sys.path.append(str(Path(__file__).parents[1]))
from tiny_chat import caption_rows, captions_right, make_chat_model


try:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer
except ImportError as error:
    sys.exit(f'This example needs TRL: pip install "trl>=1.16" ({error})')

QUESTION = "what is in the picture ?"


def main(folder: Path) -> None:
    model, processor = make_chat_model(folder)
    trainer = SFTTrainer(
        model=model,
        args=SFTConfig(
            output_dir=str(folder / "trl"),
            max_steps=60,
            per_device_train_batch_size=4,
            learning_rate=3e-3,
            logging_steps=20,
            save_strategy="no",
            report_to="none",
            bf16=False,
        ),
        train_dataset=Dataset.from_list(caption_rows(QUESTION)),  # rows with `messages` and `images`
        processing_class=processor,
        # The answers are the labels. TRL's own collator trains on the whole text.
        data_collator=XAttnDataCollator(processor),
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    print(f"loss falls: {losses[-1] < losses[0] / 2}")
    print(f"captions right: {captions_right(model.eval(), processor, QUESTION)} of 4")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        main(Path(name))
