"""Models for `against_llava.py`: one decoder with blocks, and the same decoder with image tokens in its prompt.

The peers are transformers' own classes. `LlavaForConditionalGeneration` puts all 576 tokens of an image into the
prompt. `InternVLForConditionalGeneration` joins each 2x2 of them to one (pixel shuffle) in front of its projector, so
an image takes 144 tokens. All weights are random; the peers share one decoder, whose weights equal ours.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from peers import VOCABULARY
from timing import DEVICE
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    CLIPVisionConfig,
    CLIPVisionModel,
    InternVLConfig,
    InternVLForConditionalGeneration,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PreTrainedConfig,
)
from transformers.initialization import no_init_weights
from transformers.modeling_outputs import BaseModelOutputWithPooling

from hf_xattn import retrofit


LAYERS, BLOCKS = 16, [3, 7, 11, 15]
IMAGE_TOKEN = VOCABULARY - 1
TOKENS = {"Llava": 576, "InternVL": 144}  # of an image in the prompt
# the tower beside a hidden size. All make 576 tokens of an image, and a class token that all sides leave out.
TOWERS = {
    64: {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 128},
    **dict.fromkeys(
        (1024, 2048),  # CLIP ViT-L/14-336
        {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096},
    ),
}


class GivenFeatures(nn.Module):
    """A tower that returns what it gets."""

    def forward(self, pixel_values: torch.Tensor, **kwargs) -> BaseModelOutputWithPooling:
        return BaseModelOutputWithPooling(last_hidden_state=pixel_values, hidden_states=(pixel_values,))


def build(hidden: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Any, dict[str, Any]]:
    """A decoder with blocks, and the peers over a copy of the decoder. The connector's weights are those of Llava's
    projector.
    """
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=hidden,
        num_hidden_layers=LAYERS,
        num_attention_heads=hidden // 64,
        num_key_value_heads=min(8, hidden // 64),
        intermediate_size=4 * hidden,
        vocab_size=VOCABULARY,
        max_position_embeddings=2**15,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    vision_config = CLIPVisionConfig(image_size=336, patch_size=14, **TOWERS[hidden])
    with no_init_weights():  # slow for a large decoder; `fill` is fast
        text = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
        tower = CLIPVisionModel._from_config(vision_config, dtype=dtype, attn_implementation="sdpa")
    fill(text)
    fill(tower)
    peers = build_peers(copy.deepcopy(text), vision_config)
    with no_init_weights():
        ours: Any = retrofit(
            text,
            tower,
            cross_attention_layers=BLOCKS,
            cross_attention={"qk_norm": True},
            vision_feature_select_strategy="default",
        )
    for part in (*ours.model.blocks, ours.model.connector):  # also what would start at zero: the blocks see
        fill(part)
    projector = peers["Llava"].model.multi_modal_projector
    layers = [layer for layer in ours.model.connector.layers if isinstance(layer, nn.Linear)]
    for layer, of_ours in zip((projector.linear_1, projector.linear_2), layers, strict=True):
        layer.load_state_dict(of_ours.state_dict())
    return ours.to(DEVICE).eval(), {name: peer.to(DEVICE).eval() for name, peer in peers.items()}


def build_peers(decoder: Any, vision_config: PreTrainedConfig) -> dict[str, Any]:
    """Both peers over one decoder. Their features are given."""
    shared = {
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "default",
        "image_token_id": IMAGE_TOKEN,
        "tie_word_embeddings": False,
    }
    peers: dict[str, Any] = {}
    for name, config_class, model_class in (
        ("Llava", LlavaConfig, LlavaForConditionalGeneration),
        ("InternVL", InternVLConfig, InternVLForConditionalGeneration),
    ):
        configs = {"vision_config": copy.deepcopy(vision_config), "text_config": copy.deepcopy(decoder.config)}
        with torch.device("meta"):  # the parts that have weights are put in below
            peer = model_class(config_class(**configs, **shared))
        peer.model.language_model, peer.lm_head = decoder.model, decoder.lm_head
        peer.model.vision_tower = GivenFeatures()
        peer.model.multi_modal_projector.to_empty(device="cpu").to(decoder.dtype)
        fill(peer.model.multi_modal_projector)
        peer.generation_config = copy.deepcopy(decoder.generation_config)
        assert peer.model.language_model.config._attn_implementation == "sdpa"
        assert not [weight for weight, value in peer.named_parameters() if value.is_meta]
        peers[name] = peer
    return peers


@torch.no_grad()
def fill(module: nn.Module) -> None:
    """Random weights, from a few values in turn. Norms are 1, biases 0; gates keep their value."""
    noise = torch.randn(2**20 + 7) * 0.02
    for name, weight in module.named_parameters():
        if "norm" in name and name.endswith("weight"):
            nn.init.ones_(weight)
        elif name.endswith("bias"):
            nn.init.zeros_(weight)
        elif not name.endswith("gate"):
            weight.copy_(noise.repeat(weight.numel() // len(noise) + 1)[: weight.numel()].view_as(weight))
