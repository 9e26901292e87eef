"""Models that random conversations are held with, their pictures, and random text."""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from helpers.models import own_parts
from helpers.models.tiny_architectures import tiny_config
from helpers.models.tiny_models import TEXT_CONFIGS, make_text, randomize, strengthen, vision_config
from hf_xattn import XAttnConfig, XAttnForConditionalGeneration


MARKER = 3
DECODERS = ("llama", "mistral", "gemma3", "bloom", "mamba", "falcon_h1", "bamba", "jamba", "mixtral")
RULES = ("all", "previous", "latest", "latest_group")
STATE_SPACE = ("mamba", "falcon_h1", "bamba", "jamba")
STEPWISE = ("mamba", "jamba")  # whose `forward` reads one token at a time where it has read some
WINDOWED = ("mistral", "gemma3")
NUM_PICTURES = 24
STATE_TOKENS = 4

# What blocks may be, beside the default.
BLOCKS: dict[str, dict[str, Any]] = {
    "default": {},
    "one K/V head, quiet": {"num_key_value_heads": 1, "quiet_softmax": True},
    "norms of queries and keys": {"qk_norm": True, "norm_type": "layernorm", "qk_norm_eps": 1e-4},
    "a gate for each token": {"gate": "token"},
    "as KempnerForge": {"gate": "none", "mlp_type": "plain", "hidden_act": "gelu"},
    "wide heads, biases": {"head_dim": 12, "attention_bias": True, "mlp_bias": True, "gate_granularity": "channel"},
    # These count the image tokens in front of one, which is another number where images are joined to one row.
    "positions": {"position_bias": True},
    "a code of positions": {"position": own_parts.TURNING, "qk_norm": True},
}


@dataclass
class Bank:
    """A model, and pictures with the features that it makes of them."""

    name: str
    rule: str
    model: XAttnForConditionalGeneration
    pixels: torch.Tensor  # (pictures, channels, height, width)
    features: torch.Tensor  # (pictures, tokens, width)
    states: torch.Tensor  # (pictures, tokens, width), of the kinds without a tower

    def features_of(self, kind: str, picture: int, size: int) -> torch.Tensor:
        return (self.features if kind == "pixels" else self.states)[picture, :size]


@functools.cache
def bank(name: str, rule: str, block: str = "default") -> Bank:
    """A tiny model whose blocks matter, and which writes image markers now and then. `block`: one of `BLOCKS`."""
    if name in TEXT_CONFIGS:
        text = make_text(name)
    else:
        torch.manual_seed(0)
        text = strengthen(AutoModelForCausalLM.from_config(tiny_config(name)).eval())
    torch.manual_seed(2)
    config = XAttnConfig(
        text_config=text.config,
        vision_config=vision_config(),
        cross_attention_layers=[1, 3],
        cross_attention_config=BLOCKS[block],
        image_token_id=MARKER,
        image_visibility=rule,
    )
    model = randomize(XAttnForConditionalGeneration(config, text_model=text).eval())
    model.get_output_embeddings().weight.data[MARKER] *= 2.5
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    generator = torch.Generator().manual_seed(5)
    pixels = torch.randn(NUM_PICTURES, 3, 32, 32, generator=generator)
    states = torch.randn(NUM_PICTURES, STATE_TOKENS, config.text_config.hidden_size, generator=generator)
    with torch.no_grad():
        features = model.get_image_features(pixels[None])
    features = getattr(features, "pooler_output", features)
    return Bank(name, rule, model, pixels, features.reshape(NUM_PICTURES, -1, features.shape[-1]), states)


def draw_text(rng: random.Random, length: int, markers: int) -> list[int]:
    """Random ids with so many image markers, alone or in runs; few different ids make prompt lookup find something."""
    alphabet = rng.choice([range(4, 96), range(4, 10)])
    words = [rng.choice(alphabet) for _ in range(length)]
    markers = min(markers, length)
    if rng.random() < 0.4:
        start = rng.randrange(length - markers + 1)
        places = list(range(start, start + markers))
    else:
        places = rng.sample(range(length), markers)
    for place in places:
        words[place] = MARKER
    place = min(places, default=0)
    if 0 < place and words[-1] != MARKER and rng.random() < 0.4:
        words[-1] = words[place - 1]  # prompt lookup proposes a marker next
    return words
