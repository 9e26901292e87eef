"""Models for what transformers' own tests ask of every model: one of each kind of base, with a vision tower and
without.
"""

import functools
import warnings

import torch
from transformers import AutoModelForCausalLM, CLIPVisionConfig

from helpers.models.tiny_architectures import tiny_config
from helpers.models.tiny_models import make_text, pixels, randomize, token_ids, vision_config
from hf_xattn import XAttnConfig, XAttnForConditionalGeneration, XAttnModel


# Layers of linear attention between others; experts; a window shorter than the text.
BASES = {"dense": "llama", "hybrid": "qwen3_next", "experts": "mixtral", "sliding": "gemma3_text"}
TOWERS = {
    "none": lambda: None,
    "siglip": vision_config,
    "clip": lambda: CLIPVisionConfig(
        hidden_size=24, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, image_size=32, patch_size=8
    ),
}
# Each base, some without a tower: what a tower changes has little to do with what a base does.
KINDS = [("dense", "none"), ("dense", "siglip"), ("hybrid", "siglip"), ("experts", "none"), ("sliding", "siglip")]
CONTEXT_SIZE = 24
CLASSES = [XAttnModel, XAttnForConditionalGeneration]


@functools.cache
def _text_config(base: str) -> dict:
    if base == "dense":
        return make_text().config.to_dict()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # tiny sizes leave special tokens outside the vocabulary
        config = tiny_config(BASES[base])
    config.eos_token_id = None
    return config.to_dict()


def configuration(base: str, tower: str, **config) -> XAttnConfig:
    """A new configuration, with blocks in front of a layer and after the last one."""
    vision = TOWERS[tower]()
    text = type(tiny_config(BASES[base]))(**{**_text_config(base), **config.pop("text", {})})
    if vision is None:
        config["cross_attention_config"] = {"context_size": CONTEXT_SIZE, **config.pop("cross_attention_config", {})}
    config.setdefault("cross_attention_layers", [1, 4])
    return XAttnConfig(text_config=text, vision_config=vision, **config)


def build(base: str, tower: str, made=XAttnForConditionalGeneration, *, random: bool = True, **config):
    """A model with random weights; with `random`, its images matter."""
    torch.manual_seed(0)
    model = made(configuration(base, tower, **config)).eval()
    return randomize(model) if random else model


def base_of(base: str):
    """The text model alone, with other random weights."""
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(configuration(base, "none").text_config).eval()


def inputs_for(tower: str, batch: int = 2, length: int = 9, images: int = 1) -> dict:
    """Ids, and images as pixels or as features."""
    return {"input_ids": token_ids(batch, length), **images_for(tower, batch, images)}


def images_for(tower: str, batch: int = 2, images: int = 1) -> dict:
    if tower != "none":
        return {"pixel_values": pixels(batch, images)}
    generator = torch.Generator().manual_seed(4)
    return {"cross_attention_states": torch.randn(batch, 5 * images, CONTEXT_SIZE, generator=generator)}
