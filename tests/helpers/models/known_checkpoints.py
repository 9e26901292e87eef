"""Small checkpoints of the architectures that the README names, in folders named like their Hub ids.

`from_pretrained("Qwen/Qwen2.5-0.5B-Instruct")` takes a folder of that name in the working directory before it asks the
Hub. So the README's lines run as they stand. Only the sizes and the weights differ from the published checkpoints.
"""

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    SiglipConfig,
    SiglipImageProcessor,
    SiglipModel,
)

from helpers.models.template_models import SENTENCES
from helpers.models.tiny_mllama import make_mllama


QWEN, SMOL, LLAMA = (
    "Qwen/Qwen2.5-0.5B-Instruct",
    "HuggingFaceTB/SmolLM2-135M-Instruct",
    "meta-llama/Llama-3.2-1B-Instruct",
)
SIGLIP = "google/siglip-base-patch16-224"
LLAMA_VISION = "meta-llama/Llama-3.2-11B-Vision-Instruct"

# As in the published templates: for text alone, with the default system message of the family.
CHATML = (
    "{%- if messages[0]['role'] != 'system' %}{{- '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}{%- "
    "endif %}{%- for message in messages %}{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + "
    "'\n' }}{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
HEADERS = (
    "{{- bos_token }}{%- for message in messages %}{{- '<|start_header_id|>' + message['role'] + "
    "'<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"
)
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}
CHATML_TOKENS = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "additional": ["<|im_start|>"]}
LLAMA_TOKENS = {
    "bos_token": "<|begin_of_text|>",
    "eos_token": "<|eot_id|>",
    "additional": ["<|start_header_id|>", "<|end_header_id|>"],
}
TEXTS: dict[str, tuple[type[PreTrainedConfig], str, dict]] = {
    QWEN: (Qwen2Config, CHATML, CHATML_TOKENS),
    SMOL: (LlamaConfig, CHATML, CHATML_TOKENS),
    LLAMA: (LlamaConfig, HEADERS, LLAMA_TOKENS),  # no token for padding, as published
}


def make_text(folder: Path, name: str) -> None:
    """Saves a model of eight layers in bfloat16 and a byte-level tokenizer with a chat template as `folder / name`."""
    config_class, template, tokens = TEXTS[name]
    named = {key: token for key, token in tokens.items() if key != "additional"}
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=360,
        special_tokens=[*named.values(), *tokens["additional"]],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(SENTENCES, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, chat_template=template, additional_special_tokens=tokens["additional"], **named
    )
    tokenizer.save_pretrained(folder / name)
    ids = {key: getattr(tokenizer, f"{key}_id") for key in ("bos_token", "eos_token", "pad_token")}
    config = config_class(
        vocab_size=len(tokenizer), **SIZES, **{f"{key}_id": value for key, value in ids.items() if value is not None}
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder / name)


def make_siglip(folder: Path) -> None:
    """Saves a whole SigLIP, with the text half that its checkpoints have: 196 tokens of an image of 224
    by 224 pixels.
    """
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = SiglipConfig(
        text_config={**sizes, "vocab_size": 64}, vision_config={**sizes, "image_size": 224, "patch_size": 16}
    )
    torch.manual_seed(1)
    SiglipModel(config).save_pretrained(folder / SIGLIP)
    SiglipImageProcessor(size={"height": 224, "width": 224}).save_pretrained(folder / SIGLIP)


def make_llama_vision(folder: Path) -> None:
    """Saves a Llama 3.2 Vision without a processor."""
    make_mllama().save_pretrained(folder / LLAMA_VISION)
