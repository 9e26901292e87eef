"""Small checkpoints with random weights whose tokens are words: a text model and a vision tower in folders."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedTokenizerFast,
    SiglipImageProcessor,
    SiglipVisionConfig,
)


WORDS = "[PAD] [EOS] [UNK] what is in the picture ? how many which colour describe it a an dog cat house tree".split()
WORDS += "user assistant system : red blue circle square".split()


def make_text_checkpoint(folder: Path, more_words: Sequence[str] = ()) -> Path:
    """A Llama of four layers with a word-level tokenizer."""
    torch.manual_seed(0)
    words = [*WORDS, *more_words]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "[PAD]", "eos_token": "[EOS]", "unk_token": "[UNK]"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, padding_side="left", **special).save_pretrained(folder)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    ids = {"vocab_size": len(words), "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    AutoModelForCausalLM.from_config(LlamaConfig(**sizes, **heads, **ids)).save_pretrained(folder)
    return folder


def make_vision_checkpoint(folder: Path) -> Path:
    """A SigLIP tower of two layers, which makes 16 tokens of an image of 32 by 32 pixels."""
    torch.manual_seed(1)
    sizes = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    AutoModel.from_config(SiglipVisionConfig(**sizes, image_size=32, patch_size=8)).save_pretrained(folder)
    SiglipImageProcessor(size={"height": 32, "width": 32}).save_pretrained(folder)
    return folder


def make_picture(seed: int = 0) -> Image.Image:
    """A picture of random pixels."""
    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (40, 40, 3), dtype=np.uint8))
