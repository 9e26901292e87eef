"""Checkpoints that bring their code along."""

import json
import shutil
from contextlib import contextmanager

import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

from helpers.checkout import HELPERS
from helpers.models.custom_decoder import CustomDecoderConfig, CustomDecoderForCausalLM
from helpers.models.custom_tower import CustomTower, CustomTowerConfig


@contextmanager
def registered():
    """The decoder in transformers' Auto classes."""
    AutoConfig.register("custom_decoder", CustomDecoderConfig, exist_ok=True)
    AutoModelForCausalLM.register(CustomDecoderConfig, CustomDecoderForCausalLM, exist_ok=True)
    try:
        yield
    finally:
        del CONFIG_MAPPING._extra_content["custom_decoder"]
        del AutoModelForCausalLM._model_mapping._extra_content[CustomDecoderConfig]


def make_custom():
    """Weights that no initialisation gives."""
    torch.manual_seed(0)
    text = CustomDecoderForCausalLM(CustomDecoderConfig()).eval()
    for parameter in text.parameters():
        parameter.data.add_(torch.randn_like(parameter) * 0.1 + 1)
    return text


def save_with_code(model, folder, **auto_map):
    """A checkpoint that brings its code, as on the Hub."""
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "auto_map": auto_map}))
    for reference in auto_map.values():
        file = HELPERS / "models" / f"{reference.split('.')[0]}.py"
        if file.is_file():
            shutil.copy(file, folder)


def save_text_and_vision(folder):
    """A text-only and a vision checkpoint that bring their code."""
    save_with_code(
        make_custom(),
        folder / "text",
        AutoConfig="custom_decoder.CustomDecoderConfig",
        AutoModelForCausalLM="custom_decoder.CustomDecoderForCausalLM",
    )
    torch.manual_seed(1)
    save_with_code(
        CustomTower(CustomTowerConfig()),
        folder / "vision",
        AutoConfig="custom_tower.CustomTowerConfig",
        AutoModel="custom_tower.CustomTower",
    )
