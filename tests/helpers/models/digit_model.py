"""A tiny model that tells a drawn zero from a drawn one, trained in seconds for the tests of the page."""

from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    SiglipImageProcessorPil,
    ViTConfig,
    ViTModel,
)

from hf_xattn import XAttnProcessor, retrofit


SIDE, QUESTION, WORDS = 16, "which digit ?", ("zero", "one")
TEMPLATE = "{% for message in messages %}{{ message.content }} {% if message.role == 'assistant' %}{{ eos_token }} {% endif %}{% endfor %}"  # noqa: E501


def drawn(digit: int, rng: np.random.Generator, scale: int = 8) -> Image.Image:
    """White lines on black, larger than what the model reads: a ring or an upright line, anywhere, of any size."""
    picture = Image.new("RGB", (SIDE * scale, SIDE * scale), "black")
    x, y = rng.uniform(0.35, 0.65, 2) * SIDE * scale
    high = rng.uniform(0.22, 0.34) * SIDE * scale
    wide = high * rng.uniform(0.5, 1.0)
    pen, width = ImageDraw.Draw(picture), int(rng.uniform(1.2, 2.0) * scale)
    if digit == 0:
        pen.ellipse((x - wide, y - high, x + wide, y + high), outline="white", width=width)
    else:
        lean = rng.uniform(-0.2, 0.2) * high
        pen.line((x + lean, y - high, x - lean, y + high), fill="white", width=width)
    return picture


def make_digit_model(folder: Path) -> Path:
    """Trains everything at once: the answers are right, which is all that the tests need."""
    vocabulary = ["[PAD]", "[EOS]", "[UNK]", *QUESTION.split(), *WORDS, "a", "."]
    words = Tokenizer(models.WordLevel({word: index for index, word in enumerate(vocabulary)}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="[PAD]", eos_token="[EOS]", unk_token="[UNK]", chat_template=TEMPLATE
    )
    torch.manual_seed(0)
    text = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(vocabulary),
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            pad_token_id=0,
            eos_token_id=1,
            bos_token_id=None,
            initializer_range=0.1,
        )
    )
    tower = ViTModel(
        ViTConfig(
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            image_size=SIDE,
            patch_size=4,
        )
    )
    model = retrofit(text, tower, every=1, connector_type="linear")
    processor = XAttnProcessor(SiglipImageProcessorPil(size={"height": SIDE, "width": SIDE}), tokenizer)
    rng = np.random.default_rng(0)
    digits = rng.integers(0, 2, 512)
    pixels = processor.image_processor([drawn(digit, rng) for digit in digits], return_tensors="pt")["pixel_values"]
    rows = [tokenizer(f"{QUESTION} a {word} . [EOS]")["input_ids"] for word in WORDS]
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model.train()
    for _ in range(250):
        chosen = torch.from_numpy(rng.choice(len(digits), 32))
        ids = torch.tensor([rows[digit] for digit in digits[chosen]])
        loss = model(input_ids=ids, pixel_values=pixels[chosen][:, None], labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval().save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder
