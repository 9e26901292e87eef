"""Trains a model on pictures with the text model unfrozen, and measures what that costs its text ability.

python examples/training/keep_text_ability.py

The text model first learns a text task: sums in words. Then it learns to caption pictures, in three ways:

- frozen: only blocks, connector and vision tower train. Its logits for text stay as they were, bit for bit.
- unfrozen, on pictures alone: the text model forgets its sums.
- unfrozen, on pictures and text: rows without a picture stand among those with one, in one training set. The text
model keeps its sums.

The command above gave, with a perplexity of 1.12 before:

| text model, training set | captions right | perplexity after | logits of text bit-identical |
|---|---|---|---|
| frozen, pictures alone | 4 of 4 | 1.12 | yes |
| unfrozen, pictures alone | 4 of 4 | 109.70 | no |
| unfrozen, pictures and text | 4 of 4 | 1.14 | no |
"""

import argparse
import itertools
import math
import random
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
    freeze,
    parameter_groups,
    retrofit,
)


sys.path.append(str(Path(__file__).parents[1]))
from tiny_chat import CHAT_TEMPLATE, COLOURS, SHAPES, caption_rows, captions_right
from tiny_checkpoints import WORDS, make_text_checkpoint, make_vision_checkpoint


QUESTION = "what is in the picture ?"
NUMBERS = """zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen
seventeen eighteen""".split()
SUMS = ("how much is {} plus {} ?", "add {} and {}", "what is the sum of {} and {} ?")


def text_rows() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Chats without pictures: for training, and held out. A held-out sum occurs in training in other words only."""
    sums = [
        (phrase.format(NUMBERS[first], NUMBERS[second]), NUMBERS[first + second])
        for phrase, first, second in itertools.product(SUMS, range(10), range(10))
    ]
    random.Random(0).shuffle(sums)
    thing = [f"{colour} {shape}" for colour, shape in itertools.product(COLOURS, SHAPES)]
    names = [(f"describe the {each}", f"a {each}") for each in thing]  # so that the words of the captions are known
    rows = [
        {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
        for question, answer in (*sums, *names * 5)
    ]
    return rows[45:], rows[:45]


def make_checkpoints(folder: Path, steps: int) -> XAttnProcessor:
    """Saves a text model that can add and a vision tower with random weights as `folder / "text"` and `folder /
    "vision"`.
    """
    more = {word for row in sum(text_rows(), []) for message in row["messages"] for word in message["content"].split()}
    text, vision = folder / "text", folder / "vision"
    make_text_checkpoint(text, more_words=sorted(more - set(WORDS)))
    make_vision_checkpoint(vision)
    tokenizer = AutoTokenizer.from_pretrained(text)
    processor = XAttnProcessor(AutoImageProcessor.from_pretrained(vision), tokenizer, chat_template=CHAT_TEMPLATE)
    model = AutoModelForCausalLM.from_pretrained(text).train()
    batch = XAttnDataCollator(processor, train_on="all")(text_rows()[0])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
    for _ in range(steps):
        some = torch.randint(len(batch["labels"]), (64,))
        model(**{name: value[some] for name, value in batch.items()}).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    model.save_pretrained(text)
    return processor


@torch.no_grad()
def perplexity(model: Any, batch: dict[str, torch.Tensor]) -> float:
    """Of each token of the held-out answers."""
    return math.exp(model.eval()(**batch).loss)


def train(
    folder: Path, processor: XAttnProcessor, rows: list[dict[str, Any]], text: bool, steps: int
) -> XAttnForConditionalGeneration:
    """Trains a fresh model. `text` is whether the text model trains too, at a third of the learning rate."""
    torch.manual_seed(0)
    model = retrofit(folder / "text", folder / "vision", every=2)
    freeze(model, text=not text, vision=False)  # this tower has random weights; leave a real one frozen
    rates = {"text": 1e-3, "vision": 3e-3, "connector": 3e-3, "blocks": 3e-3}
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(folder / "trainer"),
            max_steps=steps,
            per_device_train_batch_size=8,
            warmup_steps=3,
            save_strategy="no",
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
            remove_unused_columns=False,  # the collator reads columns that the model does not know
        ),
        train_dataset=rows,
        data_collator=XAttnDataCollator(processor),
        optimizers=(torch.optim.AdamW(parameter_groups(model, rates)), None),
    )
    trainer.train()
    return model


def main(folder: Path, steps: int, text_steps: int) -> None:
    processor = make_checkpoints(folder, text_steps)
    train_rows, held_out = text_rows()
    batch = XAttnDataCollator(processor)(held_out)
    base = AutoModelForCausalLM.from_pretrained(folder / "text")
    pictures = caption_rows(QUESTION) * (len(train_rows) // 4)  # as many as rows of text
    runs = {
        "frozen, pictures alone": (False, pictures),
        "unfrozen, pictures alone": (True, pictures),
        "unfrozen, pictures and text": (True, pictures + train_rows),
    }
    lines, after = [], []
    for name, (text, rows) in runs.items():
        model = train(folder, processor, rows, text, steps * (2 if rows is not pictures else 1))  # as many pictures
        right = captions_right(model.eval(), processor, QUESTION)
        with torch.no_grad():
            same = torch.equal(model(**batch).logits, base.eval()(**batch).logits)
        assert same or text, "a frozen text model must give the logits of its base"
        after.append(perplexity(model, batch))
        lines.append(f"| {name} | {right} of 4 | {after[-1]:.2f} | {'yes' if same else 'no'} |")
    before = perplexity(base, batch)
    print(f"perplexity of held-out answers before: {before:.2f}")
    print(
        "| text model, training set | captions right | perplexity after | logits of text bit-identical "
        "|\n|---|---|---|---|"
    )
    print(*lines, sep="\n")
    print(f"frozen, the perplexity stays: {after[0] == before}")
    print(f"on pictures alone it doubles or worse: {after[1] > 2 * before}")
    print(f"with rows of text it stays within a tenth: {after[2] < 1.1 * before}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps on pictures (default: 200)")
    parser.add_argument("--text-steps", type=int, default=800, help="steps of the text task (default: 800)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        main(Path(name), arguments.steps, arguments.text_steps)
