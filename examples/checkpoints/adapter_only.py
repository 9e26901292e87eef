"""Trains two models on one frozen base, saves only what was added to it, and puts one folder after the other onto one
loaded text model.

python examples/checkpoints/adapter_only.py

The first model names the colour of a drawing, the second one its shape.
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoImageProcessor, AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

from hf_xattn import (
    XAttnDataCollator,
    XAttnForConditionalGeneration,
    XAttnProcessor,
    freeze_base,
    remove_blocks,
    retrofit,
)


sys.path.append(str(Path(__file__).parents[1]))
from tiny_chat import CHAT_TEMPLATE, COLOURS, SHAPES, caption_rows, drawings
from tiny_checkpoints import make_text_checkpoint, make_vision_checkpoint


QUESTION = "what is in the picture ?"


def rows_with(words: tuple[str, ...]) -> list[dict[str, Any]]:
    """Rows whose answer is one word of the caption, such as `red`."""
    rows = caption_rows(QUESTION)
    for row in rows:
        answer = row["messages"][1]
        answer["content"] = next(word for word in words if word in answer["content"])
    return rows


def train_and_save(text: Path, vision: Path, words: tuple[str, ...], output: Path) -> None:
    """Trains blocks that answer with one of `words`. Writes blocks and connector, without text model and tower."""
    model = retrofit(text, vision, every=1)
    freeze_base(model)
    arguments = TrainingArguments(
        str(output.with_suffix(".trainer")),
        max_steps=40,
        per_device_train_batch_size=4,
        learning_rate=5e-3,
        save_strategy="no",
        report_to="none",
        remove_unused_columns=False,
    )
    collator = XAttnDataCollator(load_processor(text, vision))
    Trainer(model, arguments, data_collator=collator, train_dataset=rows_with(words)).train()
    model.save_pretrained(output, adapter_only=True)


def load_processor(text: Path, vision: Path) -> XAttnProcessor:
    images, tokenizer = AutoImageProcessor.from_pretrained(vision), AutoTokenizer.from_pretrained(text)
    return XAttnProcessor(images, tokenizer, chat_template=CHAT_TEMPLATE)


def answers(model: XAttnForConditionalGeneration, processor: XAttnProcessor) -> list[str]:
    """What the model answers about each drawing."""
    chats = [
        [{"role": "user", "content": [{"type": "image", "image": picture}, {"type": "text", "text": QUESTION}]}]
        for picture in drawings().values()
    ]
    inputs = processor.apply_chat_template(
        chats, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
    )
    tokens = model.eval().generate(**inputs, max_new_tokens=4, do_sample=False)
    return processor.batch_decode(tokens[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def main(folder: Path) -> None:
    text, vision = make_text_checkpoint(folder / "text"), make_vision_checkpoint(folder / "vision")
    teach_words(text)
    train_and_save(text, vision, COLOURS, folder / "colours")
    train_and_save(text, vision, SHAPES, folder / "shapes")

    model = XAttnForConditionalGeneration.from_pretrained(folder / "colours")  # loads text model and tower as well
    processor = load_processor(text, vision)
    print(f"colours: {answers(model, processor)}")
    base = remove_blocks(model)
    model = XAttnForConditionalGeneration.from_pretrained(folder / "shapes", text_base=base)  # does not load it again
    print(f"shapes: {answers(model, processor)}")

    base = remove_blocks(model)  # text alone
    inputs = processor(text=QUESTION)
    with torch.no_grad():
        same = torch.equal(base(**inputs).logits, AutoModelForCausalLM.from_pretrained(text)(**inputs).logits)
    print(f"without blocks, logits bit-identical to the base: {same}")


def teach_words(text: Path) -> None:
    """The tiny text model has random weights. A real model knows such answers already."""
    tokenizer, model = AutoTokenizer.from_pretrained(text), AutoModelForCausalLM.from_pretrained(text)
    chats = [f"user : {QUESTION} [EOS] assistant : {word} [EOS]" for word in (*COLOURS, *SHAPES)]
    batch = tokenizer(chats, return_tensors="pt")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(30):
        model(**batch, labels=batch["input_ids"]).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(text)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        main(Path(name))
