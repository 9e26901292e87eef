"""Trains a LoRA adapter on a retrofitted model, with PEFT: on the text model, beside blocks that train whole. Then
merges it.

pip install "peft>=0.20"
python examples/checkpoints/lora.py

`lora_targets` names exact modules. With `target_modules=["q_proj"]`, PEFT would also adapt the vision tower, whose
layers have that name.
"""

import sys
import tempfile
from pathlib import Path

from transformers import Trainer, TrainingArguments

from hf_xattn import XAttnDataCollator, XAttnForConditionalGeneration, added_modules, lora_targets


sys.path.append(str(Path(__file__).parents[1]))
from tiny_chat import caption_rows, captions_right, make_chat_model


try:
    from peft import LoraConfig, PeftModel, get_peft_model
except ImportError as error:
    sys.exit(f'This example needs PEFT: pip install "peft>=0.20" ({error})')

QUESTION = "what is in the picture ?"


def main(folder: Path) -> None:
    _, processor = make_chat_model(folder)
    # From the folder, whose name the adapter records as its base. A retrofit in memory has no name before it is saved.
    base = XAttnForConditionalGeneration.from_pretrained(folder / "model")
    config = LoraConfig(
        r=16,
        target_modules=lora_targets(base, where="text"),  # "blocks", "both": no adapter in the tower either
        modules_to_save=[*added_modules(base), "embed_tokens", "lm_head"],  # a real model knows its words already
    )
    model = get_peft_model(base, config)
    model.print_trainable_parameters()
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(folder / "trainer"),
            max_steps=60,
            per_device_train_batch_size=4,
            learning_rate=5e-3,
            logging_steps=20,
            save_strategy="no",
            report_to="none",
            remove_unused_columns=False,
        ),
        train_dataset=caption_rows(QUESTION),  # rows with `messages` and `images`
        data_collator=XAttnDataCollator(processor),
    )
    trainer.train()
    print(f"captions right: {captions_right(base.eval(), processor, QUESTION)} of 4")
    model.save_pretrained(folder / "adapter")

    base = XAttnForConditionalGeneration.from_pretrained(folder / "model")
    model = PeftModel.from_pretrained(base, folder / "adapter")
    merged = model.merge_and_unload()  # an ordinary model again: no PEFT needed to load it
    merged.save_pretrained(folder / "merged")
    merged = XAttnForConditionalGeneration.from_pretrained(folder / "merged")
    print(f"captions right after merging: {captions_right(merged, processor, QUESTION)} of 4")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        main(Path(name))
