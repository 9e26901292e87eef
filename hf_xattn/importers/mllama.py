"""Llama 3.2 Vision (`MllamaForConditionalGeneration`).

Its text model is one list of layers. Some layers have cross-attention instead of self-attention. The self-attention
layers alone are a Llama. Each cross-attention layer becomes a block in front of the next self-attention layer. A
cross-attention layer at the end of the list becomes a block after the last layer.

| Mllama (`language_model.`) | here (`model.text_model.`) |
|---|---|
| `embed_tokens` (vocab_size + 8 rows) | `model.embed_tokens`, and its last 8 rows `model.embed_tokens.additional` |
| `layers.<self>` | `model.layers.<i>` |
| `layers.<cross>.cross_attn.{q,k,v,o}_proj`, `{q,k}_norm` | `model.layers.<i>.cross_attention_block.attn.*` |
| `layers.<cross>.{input_layernorm,cross_attn_attn_gate}` | `...block.{attn_norm,attn_gate}` |
| `layers.<cross>.{post_attention_layernorm,mlp,cross_attn_mlp_gate}` | `...block.{mlp_norm,mlp,mlp_gate}` |
| several `layers.<cross>` in a row | `...block.0`, `...block.1`, ... |
| `vision_model`, `multi_modal_projector` | `model.vision_tower`, `model.connector.layers.0` |

One difference: at a text position that sees no image, Mllama adds the attention branch (an average of all image
tokens). This package adds nothing.
"""

from __future__ import annotations

import re
from typing import Any

from transformers import LlamaConfig, MllamaConfig, MllamaTextConfig, MllamaVisionConfig

from ..configuration_xattn import CrossAttentionConfig, XAttnConfig
from .recipe import LLAMA_FIELDS, Recipe, Target, block_names, renamed


ADDITIONAL_TOKENS = 8  # fixed in transformers' model

BLOCK_RULES = [
    (r"cross_attn\.((?:q|k|v|o)_proj|(?:q|k)_norm)\.weight", r"attn.\1.weight"),
    (r"input_layernorm\.weight", r"attn_norm.weight"),
    (r"post_attention_layernorm\.weight", r"mlp_norm.weight"),
    (r"mlp\.((?:gate|up|down)_proj)\.weight", r"mlp.\1.weight"),
    (r"cross_attn_(attn|mlp)_gate", r"\1_gate"),
]
RULES = [
    (r"(?:model\.)?vision_model\.(.+)", r"model.vision_tower.\1"),
    (r"(?:model\.)?multi_modal_projector\.(.+)", r"model.connector.layers.0.\1"),
    (r"(?:language_model\.)?lm_head\.weight", r"model.text_model.lm_head.weight"),
    (r"(?:model\.)?language_model\.(?:model\.)?norm\.weight", r"model.text_model.model.norm.weight"),
]
EMBEDDING = r"(?:model\.)?language_model\.(?:model\.)?embed_tokens\.weight"
LAYER = r"(?:model\.)?language_model\.(?:model\.)?layers\.(\d+)\.(.+)"


def places(text_config: MllamaTextConfig) -> dict[int, int]:
    """Maps each layer of the source to the decoder layer that it becomes, or that it becomes a block in front of.

    Raises a `ValueError` for a layer that does not exist, or if no layer has self-attention.
    """
    cross = set(text_config.cross_attention_layers or ())
    if outside := sorted(index for index in cross if index not in range(text_config.num_hidden_layers)):
        raise ValueError(
            f"`cross_attention_layers`: expected indices from 0 to {text_config.num_hidden_layers - 1}, because the "
            f"text model has {text_config.num_hidden_layers} layers, got {outside[:5]}."
        )
    if len(cross) == text_config.num_hidden_layers:
        raise ValueError(
            f"`cross_attention_layers`: expected at least one of the {len(cross)} layers to have self-attention, got "
            "cross-attention in all of them."
        )
    result, count = {}, 0
    for index in range(text_config.num_hidden_layers):
        result[index] = count
        count += index not in cross
    return result


def recipe(config: MllamaConfig) -> Recipe:
    """Returns the recipe that converts an Mllama checkpoint."""
    text, vision = config.text_config, config.vision_config
    assert isinstance(text, MllamaTextConfig) and isinstance(vision, MllamaVisionConfig)
    where = places(text)
    cross = sorted(set(text.cross_attention_layers or ()))
    layers, decoder_places = "model.text_model.model.layers", [where[index] for index in cross]
    fields: dict[str, Any] = {name: getattr(text, name) for name in (*LLAMA_FIELDS, "num_key_value_heads")}
    num_layers = text.num_hidden_layers - len(cross)
    fields["head_dim"] = text.hidden_size // text.num_attention_heads
    fields["tie_word_embeddings"] = False  # transformers' Mllama has a head of its own, whatever its configuration says
    target = XAttnConfig(
        text_config=LlamaConfig(**fields, num_hidden_layers=num_layers),
        vision_config=vision,
        cross_attention_config=CrossAttentionConfig(
            hidden_size=text.hidden_size,
            context_size=text.hidden_size,
            num_attention_heads=text.num_attention_heads,
            num_key_value_heads=text.num_key_value_heads,
            head_dim=fields["head_dim"],
            intermediate_size=text.intermediate_size,
            hidden_act=text.hidden_act,
            norm_eps=text.rms_norm_eps,
            qk_norm_eps=text.rms_norm_eps,
            qk_norm=True,
            attention_dropout=text.dropout,
            gate_init=0.0,
            zero_init=False,
            initializer_range=text.initializer_range,
        ),
        cross_attention_layers=decoder_places,
        image_token_id=config.image_token_id,
        image_visibility="latest_group",
        connector_type="linear",
        connector_bias=True,
        additional_vocab_size=ADDITIONAL_TOKENS,
        source_config=config.to_dict(),
        dtype=config.dtype,
    )

    blocks = dict(zip(cross, block_names(layers, decoder_places, num_layers)))

    def targets(name: str) -> list[Target] | None:
        if re.fullmatch(EMBEDDING, name):
            embedding = "model.text_model.model.embed_tokens"
            return [
                Target(f"{embedding}.weight", slice(None, text.vocab_size)),
                Target(f"{embedding}.additional.weight", slice(text.vocab_size, None)),
            ]
        layer = re.fullmatch(LAYER, name)
        if layer is None:
            new = renamed(name, RULES)
        elif (index := int(layer[1])) not in where:
            return None
        elif index in blocks:
            part = renamed(layer[2], BLOCK_RULES)
            new = None if part is None else f"{blocks[index]}.{part}"
        else:
            new = f"{layers}.{where[index]}.{layer[2]}"
        return None if new is None else [Target(new)]

    return Recipe(target, targets)


def original_name(name: str) -> str:
    """Returns the name that a parameter of transformers' model has in the published checkpoints."""
    rules = [
        (r"model\.language_model\.(.+)", r"language_model.model.\1"),
        (r"model\.((?:vision_model|multi_modal_projector)\..+)", r"\1"),
        (r"lm_head\.weight", r"language_model.lm_head.weight"),
    ]
    return renamed(name, rules) or name
