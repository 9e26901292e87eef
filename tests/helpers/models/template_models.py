"""Chat templates in the styles of the well-known families, written for these tests, with a tokenizer and a tiny model
for them.
"""

import functools
import os
import string

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast, SiglipImageProcessorPil

from helpers.models.tiny_models import randomize, vision_config
from hf_xattn import XAttnConfig, XAttnForConditionalGeneration, XAttnProcessor


# Reads the text of a message, with a marker for each image: what a template for text alone lacks.
TEXT = """{%- macro text(content) -%}
{%- if content is string -%}{{ content }}
{%- else -%}{%- for part in content -%}{%- if part.type == 'image' -%}<image>{%- else -%}{{ part.text }}{%- endif -%}{%- endfor -%}
{%- endif -%}{%- endmacro -%}
"""  # noqa: E501
CHATML = (
    TEXT
    + """{%- for m in messages -%}{{ '<|im_start|>' + m.role + '\n' + text(m.content) | trim + '<|im_end|>' + '\n' }}{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"""  # noqa: E501
)
GENERATION = (
    TEXT
    + """{%- for m in messages -%}{%- if m.role == 'assistant' -%}
{{ '<|im_start|>assistant\n' }}{%- generation -%}{{ text(m.content) + '<|im_end|>' }}{%- endgeneration -%}{{ '\n' }}
{%- else -%}{{ '<|im_start|>' + m.role + '\n' + text(m.content) + '<|im_end|>' + '\n' }}{%- endif -%}{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"""
)
HEADERS = (
    TEXT
    + """{{- '<s>' -}}{%- for m in messages -%}
{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + text(m.content) | trim + '<|eot_id|>' }}{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif -%}"""
)
INST = (
    TEXT
    + """{{- '<s>' -}}{%- for m in messages -%}{%- if m.role == 'assistant' -%}{{ ' ' + text(m.content) + ' </s>' }}
{%- else -%}{{ '[INST] ' + text(m.content) | trim + ' [/INST]' }}{%- endif -%}{%- endfor -%}"""
)
# Leaves the reasoning of all turns but the last out; writes an empty one where the last has none.
REASONING = (
    TEXT
    + """{%- for m in messages -%}{%- set c = text(m.content) -%}{%- set think = m.reasoning_content or '' -%}
{%- if '</think>' in c -%}{%- set think = c.split('</think>')[0].split('<think>')[-1].strip('\n') -%}
{%- set c = c.split('</think>')[-1].lstrip('\n') -%}{%- endif -%}{{ '<|im_start|>' + m.role + '\n' }}
{%- if m.role == 'assistant' and loop.last -%}{{ '<think>\n' + think + '\n</think>\n\n' }}{%- endif -%}
{{ c + '<|im_end|>' + '\n' }}{%- endfor -%}{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"""  # noqa: E501
)
# No special tokens: tokens of the answer may be merged with what follows.
PLAIN = (
    TEXT
    + """{%- for m in messages -%}{{ m.role + ': ' + text(m.content) + '###' }}{%- endfor -%}
{%- if add_generation_prompt -%}{{ 'assistant: ' }}{%- endif -%}"""
)
TEMPLATES = {"chatml": CHATML, "generation": GENERATION, "headers": HEADERS, "inst": INST, "reasoning": REASONING}

SPECIAL = [
    "<pad>",
    "<s>",
    "</s>",
    "<|im_start|>",
    "<|im_end|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
]
SENTENCES = ["what is in the picture ?", "a red circle.", "a blue square.", "user assistant system", string.printable]


@functools.cache
def _tokenizer_json() -> str:
    """A byte-level tokenizer: every text survives it, and words are several tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=360, special_tokens=[*SPECIAL, "<image>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(SENTENCES * 4, trainer)
    return tokenizer.to_str()


def make_tokenizer(template: str = CHATML, eos: str = "<|im_end|>", **kwargs) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_tokenizer_json()),
        **{"pad_token": "<pad>", "eos_token": eos, "bos_token": "<s>", "chat_template": template, **kwargs},
        additional_special_tokens=[
            "<|im_start|>",
            "<|im_end|>",
            "<|start_header_id|>",
            "<|end_header_id|>",
            "<|eot_id|>",
        ],
    )


def make_processor(template: str = CHATML, marker: str | None = "<image>", **kwargs) -> XAttnProcessor:
    images = SiglipImageProcessorPil(size={"height": 32, "width": 32})
    return XAttnProcessor(images, make_tokenizer(template, **kwargs), chat_template=template, image_token=marker)


def make_chat_model(
    processor: XAttnProcessor, seed: int = 0, random: bool = True, text_class: type = LlamaConfig, **config
) -> XAttnForConditionalGeneration:
    """A tiny Llama, or another decoder, with blocks in front of both layers."""
    torch.manual_seed(seed)
    tokenizer = processor.tokenizer
    text = AutoModelForCausalLM.from_config(
        text_class(
            vocab_size=len(tokenizer),
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
    )
    config = {"cross_attention_layers": [0, 1], "image_token_id": processor.image_token_id, **config}
    made = XAttnConfig(text_config=text.config, vision_config=vision_config(), **config)
    model = XAttnForConditionalGeneration(made, text_model=text)
    return randomize(model) if random else model


def save_chat_model(folder: str | os.PathLike[str], **config) -> None:
    """A folder for `hf-xattn train`: the model, and a processor with the template of ChatML."""
    processor = make_processor(CHATML)
    make_chat_model(processor, **config).save_pretrained(folder)
    processor.save_pretrained(folder)


def picture(seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (20, 30, 3), dtype=np.uint8))
