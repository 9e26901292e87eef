"""Which models have the shape of Llama 3.2 Vision, so that its format can hold them: a Llama with blocks of Mllama's
kind, and Mllama's tower.

A model that was imported from Mllama has that shape. A retrofit has it with these options:

    retrofit(llama, mllama_vision_model, connector_type="linear", image_visibility="latest_group", image_token_id=...,
             cross_attention={"qk_norm": True, "norm_eps": llama.config.rms_norm_eps})
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import MllamaConfig, MllamaTextConfig, PreTrainedConfig

from ..configuration_xattn import XAttnConfig
from .mllama import ADDITIONAL_TOKENS, places
from .mllama import EMBEDDING as EMBEDDING_OF_MLLAMA
from .recipe import LLAMA_FIELDS, Recipe, renamed


EMBEDDING = "model.text_model.model.embed_tokens"
HEAD = "model.text_model.lm_head.weight"


def mllama_config(config: XAttnConfig) -> MllamaConfig:
    """Returns the configuration of the Mllama that a model is equal to.

    Raises:
        ValueError: for a model of another shape. The message lists each difference, with what was expected and found.
    """
    if differences := mllama_differences(config):
        listed = "".join(f"\n- `{name}`: expected {expected}, found {found}" for name, expected, found in differences)
        raise ValueError(
            "`source` cannot be written in Llama 3.2 Vision's format, the only one that can be exported, because its "
            "shape differs:" + listed
        )
    text: Any = config.text_config
    cross = [place + number for number, place in enumerate(sorted(config.cross_attention_layers))]
    fields = {name: getattr(text, name) for name in (*LLAMA_FIELDS, "num_key_value_heads")}
    text_config = MllamaTextConfig(
        **{**fields, "tie_word_embeddings": False},  # Mllama's embedding has more rows than its head
        num_hidden_layers=text.num_hidden_layers + len(cross),
        cross_attention_layers=cross,
        dropout=config.cross_attention_config.attention_dropout,
    )
    assert [places(text_config)[index] for index in cross] == sorted(config.cross_attention_layers)
    assert config.vision_config is not None and config.image_token_id is not None
    return MllamaConfig(
        text_config=text_config.to_dict(),
        vision_config=config.vision_config.to_dict(),
        image_token_index=config.image_token_id,
        dtype=config.dtype,
    )


def mllama_differences(config: XAttnConfig) -> list[tuple[str, Any, Any]]:
    """Compares a configuration with Mllama's. Returns name, expected and found value of each difference."""
    text: Any = config.text_config
    vision = config.vision_config
    wanted: list[tuple[str, Any, Any]] = [
        ("text_config.model_type", "llama", text.model_type),
        ("vision_config.model_type", "mllama_vision_model", getattr(vision, "model_type", None)),
        ("connector_type", "linear", config.connector_type),
        ("connector_bias", True, config.connector_bias),
        ("image_visibility", "latest_group", config.image_visibility),
        ("additional_vocab_in_head", False, config.additional_vocab_in_head),
    ]
    if text.model_type == "llama":
        wanted += _of_llama(text)
        wanted += _of_blocks(config, text)
    found = [(name, repr(expected), repr(value)) for name, expected, value in wanted if expected != value]
    if 0 in config.cross_attention_layers:
        # transformers' Mllama takes the length of the text from the cache of its first layer, which would hold an
        # image.
        found.append(("cross_attention_layers", "no block in front of layer 0", str(config.cross_attention_layers)))
    if config.image_token_id is None:
        found.append(("image_token_id", "the id of the image marker", "None"))
    if config.additional_vocab_size > ADDITIONAL_TOKENS:
        found.append(
            ("additional_vocab_size", f"at most {ADDITIONAL_TOKENS}, as in Mllama", str(config.additional_vocab_size))
        )
    return found


def _of_llama(text: PreTrainedConfig) -> list[tuple[str, Any, Any]]:
    """What Mllama's text model has no option for."""
    heads, width = getattr(text, "num_attention_heads", 1), getattr(text, "hidden_size", 0)
    return [
        ("text_config.attention_bias", False, getattr(text, "attention_bias", False)),
        ("text_config.mlp_bias", False, getattr(text, "mlp_bias", False)),
        ("text_config.head_dim", width // heads, getattr(text, "head_dim", None) or width // heads),
        ("text_config.quantization_config", None, getattr(text, "quantization_config", None)),
    ]


def _of_blocks(config: XAttnConfig, text: Any) -> list[tuple[str, Any, Any]]:
    """Mllama's cross-attention layers have the sizes of its self-attention layers."""
    expected = {
        "context_size": text.hidden_size,
        "num_attention_heads": text.num_attention_heads,
        "num_key_value_heads": text.num_key_value_heads,
        "head_dim": text.hidden_size // text.num_attention_heads,
        "intermediate_size": text.intermediate_size,
        "hidden_act": text.hidden_act,
        "norm_type": "rmsnorm",
        "norm_eps": text.rms_norm_eps,
        "qk_norm_eps": text.rms_norm_eps,
        "qk_norm": True,
        "gate": "tanh",
        "gate_granularity": "scalar",
        "mlp_type": "gated",
        "attention_bias": False,
        "mlp_bias": False,
        "quiet_softmax": False,
        "position_bias": False,
    }
    block = config.cross_attention_config
    return [(f"cross_attention_config.{name}", value, getattr(block, name)) for name, value in expected.items()]


def parts_of(name: str, recipe: Recipe, config: XAttnConfig) -> list[str]:
    """Names of the parameters that make up a tensor of Mllama, in the order of its rows."""
    parts = [target.name for target in recipe.targets(name) or []]
    if parts == [HEAD] and config.text_config.tie_word_embeddings:
        return [f"{EMBEDDING}.weight"]
    if not config.additional_vocab_size:
        parts = [part for part in parts if part != f"{EMBEDDING}.additional.weight"]
    return parts


def missing_rows(name: str, config: XAttnConfig) -> int:
    """Rows of additional tokens that a tensor of Mllama has and this model has not. They become zeros, which no text
    uses.
    """
    return (
        ADDITIONAL_TOKENS - config.additional_vocab_size
        if renamed(name, [(EMBEDDING_OF_MLLAMA, "")]) is not None
        else 0
    )


def with_rows(tensor: torch.Tensor, count: int) -> torch.Tensor:
    """Appends rows of zeros."""
    return tensor if not count else torch.cat([tensor, tensor.new_zeros(count, *tensor.shape[1:])])
