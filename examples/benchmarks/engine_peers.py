"""The models that `engine.py` serves: one decoder with one vision tower, joined in three ways. Random weights.

- by the blocks of this package,
- as LLaVA does: each of the 576 image tokens of a picture stands in the prompt. vLLM's class for this is Idefics3's
  without compression, as its Llava needs torchvision, which the CPU build of torch here has not;
- as Idefics3 does: four image tokens become one, and 144 stand in the prompt.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Idefics3ImageProcessor,
    Idefics3Processor,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    SiglipImageProcessor,
    SiglipVisionConfig,
    SiglipVisionModel,
)

from hf_xattn import XAttnProcessor, retrofit


SIDE, PATCH = 336, 14
IMAGE_TOKENS = (SIDE // PATCH) ** 2
SPECIAL = ["<pad>", "<eos>", "<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"]
WORDS = [f"w{index}" for index in range(4096 - len(SPECIAL))]
TEMPLATE = (
    "{%- for message in messages -%}{%- for part in message.content -%}"
    "{{ '<image>' if part.type == 'image' else ' ' + part.text }}{%- endfor -%}{%- endfor -%}"
)
TEXT = {
    "vocab_size": len(SPECIAL) + len(WORDS),
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,  # answers have a given length
}
TOWER = {
    "hidden_size": 384,
    "intermediate_size": 1536,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "image_size": SIDE,
    "patch_size": PATCH,
}


def make_tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {word: index for index, word in enumerate([*SPECIAL, *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        unk_token="w0",
        additional_special_tokens=SPECIAL[2:],
        chat_template=TEMPLATE,
    )


def save_ours(folder: Path) -> None:
    torch.manual_seed(0)
    text, tower = LlamaForCausalLM(LlamaConfig(**TEXT)), SiglipVisionModel(SiglipVisionConfig(**TOWER))
    model = retrofit(text, tower, every=4, cross_attention={"zero_init": False})
    model.save_pretrained(folder)
    images = SiglipImageProcessor(size={"height": SIDE, "width": SIDE})
    XAttnProcessor(images, make_tokenizer(), chat_template=TEMPLATE).save_pretrained(folder)


def save_in_prompt(folder: Path, compression: int) -> None:
    """`compression`: how many image tokens become one, a square."""
    config = Idefics3Config(
        text_config=LlamaConfig(**TEXT),
        vision_config=TOWER,
        image_token_id=SPECIAL.index("<image>"),
        scale_factor=math.isqrt(compression),
        pad_token_id=0,
    )
    torch.manual_seed(0)
    Idefics3ForConditionalGeneration(config).save_pretrained(folder)
    sizes = {"size": {"longest_edge": SIDE}, "max_image_size": {"longest_edge": SIDE}}
    Idefics3Processor(
        Idefics3ImageProcessor(**sizes, do_image_splitting=False),
        make_tokenizer(),
        image_seq_len=IMAGE_TOKENS // compression,
        chat_template=TEMPLATE,
    ).save_pretrained(folder)


def cache_bytes(image_tokens: int, in_prompt: bool, text_tokens: int, itemsize: int = 4) -> int:
    """Bytes of the keys and values of a request."""
    head_dim = TEXT["hidden_size"] // TEXT["num_attention_heads"]
    of_token, layers = 2 * TEXT["num_key_value_heads"] * head_dim * itemsize, TEXT["num_hidden_layers"]
    return of_token * (layers * text_tokens + (layers if in_prompt else layers // 4) * image_tokens)
