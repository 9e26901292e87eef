"""Tiny models that quantizers of transformers convert on a CPU, shared by the tests of quantized bases."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig

from helpers.models.tiny_models import randomize, vision_config
from hf_xattn import XAttnForConditionalGeneration, retrofit
from hf_xattn.utils.tensor_checks import is_quantized


FOLDER = tempfile.TemporaryDirectory()  # removed when the tests end


def torchao_8bit() -> Any:
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import TorchAoConfig

    return TorchAoConfig(Int8WeightOnlyConfig())


# torchao's 4-bit weights have no kernel for a CPU: its configuration is tested where the skip list is.
METHODS = {
    "torchao_8bit": ("torchao", torchao_8bit),
    "bitsandbytes_8bit": ("bitsandbytes", lambda: BitsAndBytesConfig(load_in_8bit=True)),
    "bitsandbytes_4bit": ("bitsandbytes", lambda: BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")),
}


def quantization(method: str) -> Any:
    """The configuration of a quantizer. Skips the test where its package is missing."""
    package, make = METHODS[method]
    pytest.importorskip(package)
    return make()


@functools.cache
def folder() -> Path:
    """Folders `text`, `vision` and `model`. Widths are multiples of 64, which bitsandbytes' fast path on
    a CPU needs.
    """
    path = Path(FOLDER.name)
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=128,
        vocab_size=96,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=None,
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval().save_pretrained(path / "text")
    tower = vision_config()
    tower.hidden_size, tower.intermediate_size = 64, 128
    AutoModel.from_config(tower, dtype=torch.bfloat16).save_pretrained(path / "vision")
    randomize(retrofit(path / "text", path / "vision", every=1)).save_pretrained(path / "model")
    return path


def quantized_text(method: str) -> Any:
    """A text model that was loaded quantized."""
    return AutoModelForCausalLM.from_pretrained(
        folder() / "text", quantization_config=quantization(method), dtype=torch.bfloat16
    )


def quantized_retrofit(method: str) -> XAttnForConditionalGeneration:
    """Blocks that see, in a text model that was loaded quantized."""
    vision = AutoModel.from_pretrained(folder() / "vision", dtype=torch.bfloat16)
    return randomize(retrofit(quantized_text(method), vision, every=1)).eval()


def parts_of(model: XAttnForConditionalGeneration) -> dict[str, set[str]]:
    """For the decoder, its head, and everything that was added: how the weights of linear layers are kept."""
    parts: dict[str, set[str]] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            names = ("cross_attention_block", "vision_tower", "connector", "lm_head")
            part = next((each for each in names if each in name), "decoder")
            kind = "quantized" if is_quantized(module.weight) else f"{module.weight.dtype} {module.weight.device}"
            parts.setdefault(part, set()).add(kind)
    return parts


HIGH = {"torch.bfloat16 cpu"}
EXPECTED = {
    "decoder": {"quantized"},
    "lm_head": HIGH,
    "cross_attention_block": HIGH,
    "connector": HIGH,
    "vision_tower": HIGH,
}
