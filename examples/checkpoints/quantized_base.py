"""Puts blocks into a text model in 4 bit, trains them, and saves the whole.

pip install bitsandbytes
python examples/checkpoints/quantized_base.py

bitsandbytes quantizes the text model. Blocks, connector and vision tower stay in high precision by themselves. torchao
works alike: `TorchAoConfig(Int8WeightOnlyConfig())`.
"""

import sys
import tempfile
from pathlib import Path

import torch
from transformers import BitsAndBytesConfig, Trainer, TrainingArguments

from hf_xattn import XAttnDataCollator, XAttnForConditionalGeneration, freeze_base, retrofit


sys.path.append(str(Path(__file__).parents[1]))
from tiny_chat import caption_rows, captions_right, make_chat_model


try:
    import bitsandbytes  # noqa: F401 (transformers imports it later)
except ImportError as error:
    sys.exit(f"This example needs bitsandbytes: pip install bitsandbytes ({error})")

QUESTION = "what is in the picture ?"


def main(folder: Path) -> None:
    _, processor = make_chat_model(folder)
    quantization = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    model = retrofit(folder / "text", folder / "vision", every=1, quantization_config=quantization, dtype=torch.float32)
    print(f"text model: {model.model.text_model.model.layers[0].self_attn.q_proj.weight.dtype}")
    print(f"blocks: {model.blocks[0].attn.q_proj.weight.dtype}")
    freeze_base(model)  # only blocks and connector train
    # This text model has random weights and knows no words: its embeddings and head, which are not quantized, train
    # too.
    model.get_input_embeddings().requires_grad_(True)
    model.get_output_embeddings().requires_grad_(True)
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
    model.save_pretrained(folder / "quantized")  # the quantized text model and the blocks
    model = XAttnForConditionalGeneration.from_pretrained(folder / "quantized")
    print(f"captions right: {captions_right(model, processor, QUESTION)} of 4")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        main(Path(name))
