"""The checkpoints that the demo of digits starts from: a text-only decoder and a vision tower."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from tqdm.auto import tqdm
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedTokenizerFast,
    SiglipImageProcessorPil,
    ViTConfig,
)

from .canvases import CHAT_TEMPLATE, HEIGHT, PATCH, WIDTH, DigitPool, patch_labels, sentence, to_pixel_values


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Inside, torch uses one thread: with small tensors, more are several times slower on busy cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def optimize(parameters, steps: int, rate: float, loss_of_step, name: str) -> None:
    """AdamW with warm-up in a tenth of the steps, and a progress bar."""
    parameters = list(parameters)
    optimizer = torch.optim.AdamW(parameters, lr=rate, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps, pct_start=0.1)
    bar = tqdm(range(steps), desc=name)
    for step in bar:
        loss = loss_of_step(step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 20 == 0:
            bar.set_postfix(loss=f"{loss.item():.3f}")


def make_text_checkpoint(folder: Path, steps: int, seed: int) -> None:
    """Trains a Llama and its tokenizer on sentences without images. The model can only guess the digits."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    rng = np.random.default_rng((seed, 1))
    sentences = [sentence(rng.integers(0, 10, rng.integers(1, 4)).tolist()) for _ in range(64 * 64)]
    words = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.WordLevelTrainer(special_tokens=["[PAD]", "[EOS]", "[UNK]"], show_progress=False)
    words.train_from_iterator(sentences, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token="[PAD]",
        eos_token="[EOS]",
        unk_token="[UNK]",
        padding_side="left",
        model_input_names=["input_ids", "attention_mask"],
        chat_template=CHAT_TEMPLATE,
    )
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
            bos_token_id=None,
            initializer_range=0.1,  # at this width, the usual 0.02 makes the logits of all words almost equal
        )
    )

    def loss_of_step(step: int) -> torch.Tensor:
        start = step * 64 % len(sentences)
        batch = tokenizer(
            [f"{text} [EOS]" for text in sentences[start : start + 64]],
            padding=True,
            padding_side="right",
            return_tensors="pt",
        )
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        return model(**batch, labels=labels).loss

    optimize(model.parameters(), steps, 3e-3, loss_of_step, "text model, on text alone")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def make_vision_checkpoint(folder: Path, pool: DigitPool, steps: int, seed: int) -> None:
    """Trains a small ViT to predict, for each patch, the digit and the digit's place. Its heads are not saved."""
    torch.manual_seed(seed + 1)
    config = ViTConfig(
        hidden_size=96,
        intermediate_size=192,
        num_hidden_layers=3,
        num_attention_heads=4,
        image_size=(HEIGHT, WIDTH),
        patch_size=PATCH,
    )
    tower = AutoModel.from_config(config)
    classes = (11, 4)
    heads = torch.nn.ModuleList([torch.nn.Linear(config.hidden_size, count) for count in classes])
    weights = [torch.tensor([1.0] * (count - 1) + [0.2]) for count in classes]  # most patches are background

    def loss_of_step(step: int) -> torch.Tensor:
        canvases = [pool.canvas(np.random.default_rng((seed, 2, step, row))) for row in range(64)]
        pixel_values = torch.cat([to_pixel_values(canvas) for canvas in canvases])
        labels = torch.stack([patch_labels(canvas) for canvas in canvases], dim=1)
        patches = tower(pixel_values=pixel_values).last_hidden_state[:, 1:].flatten(0, 1)  # without the class token
        losses = [
            torch.nn.functional.cross_entropy(head(patches), label.flatten(), weight=weight)
            for head, label, weight in zip(heads, labels, weights)
        ]
        return torch.stack(losses).sum()

    optimize([*tower.parameters(), *heads.parameters()], steps, 3e-3, loss_of_step, "vision tower, digits of patches")
    tower.save_pretrained(folder)
    SiglipImageProcessorPil(size={"height": HEIGHT, "width": WIDTH}).save_pretrained(folder)
