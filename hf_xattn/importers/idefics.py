"""Imports Idefics, the first version (`IdeficsForVisionText2Text`).

Its text model is a Llama with a gated cross-attention layer in front of every `cross_layer_interval`-th layer. Its
vision tower is CLIP's.

| Idefics | here |
|---|---|
| `model.embed_tokens`, `.additional_embedding` | `model.text_model.model.embed_tokens`, `.additional` |
| `lm_head`, `.additional_fc` | `model.text_model.lm_head`, `.additional` |
| `model.layers.<i>` | `model.text_model.model.layers.<i>` |
| `model.gated_cross_attn_layers.<k>` | `model.text_model.model.layers.<k * interval>.cross_attention_block` |
| `... .cross_attn.{q,k,v,o}_proj`, `{q,k}_layer_norm` | `... .attn.*`, `{q,k}_norm` |
| `alpha_cross_attn`, `alpha_dense` | `attn_gate`, `mlp_gate` |
| `model.vision_model` | `model.vision_tower` |
| `model.perceiver_resampler` | `model.connector.layers.0` |

There is one difference: for a text token that sees no image, Idefics adds the MLP branch of a block. This package adds
nothing.
"""

from __future__ import annotations

import functools
import re
from typing import TYPE_CHECKING, Any

from transformers import CLIPVisionConfig, IdeficsConfig, IdeficsPerceiverConfig, IdeficsVisionConfig, LlamaConfig
from transformers.utils import logging

from ..configuration_xattn import PerceiverConfig, XAttnConfig
from .conversion import LLAMA_FIELDS, Recipe, Target, block_config, renamed


if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.get_logger(__name__)

VISION_FIELDS = """
    image_size intermediate_size patch_size num_hidden_layers num_attention_heads num_channels hidden_act layer_norm_eps
    attention_dropout initializer_range initializer_factor
    """.split()

BLOCK_RULES = [
    (r"cross_attn\.((?:q|k|v|o)_proj)\.weight", r"attn.\1.weight"),
    (r"cross_attn\.(q|k)_layer_norm\.weight", r"attn.\1_norm.weight"),
    (r"input_layernorm\.weight", r"attn_norm.weight"),
    (r"post_attention_layernorm\.weight", r"mlp_norm.weight"),
    (r"mlp\.((?:gate|up|down)_proj)\.weight", r"mlp.\1.weight"),
    (r"alpha_cross_attn", r"attn_gate"),
    (r"alpha_dense", r"mlp_gate"),
]
PERCEIVER_RULES = [
    (r"latents", r"latents"),
    (r"layer_norm\.(weight|bias)", r"norm.\1"),
    (r"blocks\.(\d+)\.0\.(context|latents)_layer_norm\.(weight|bias)", r"layers.\1.attn.\2_norm.\3"),
    (r"blocks\.(\d+)\.0\.(q|k)_layer_norm\.(weight|bias)", r"layers.\1.attn.\2_norm.\3"),
    (r"blocks\.(\d+)\.0\.(q|k|v)_proj\.weight", r"layers.\1.attn.\2_proj.weight"),
    (r"blocks\.(\d+)\.0\.output_proj\.weight", r"layers.\1.attn.o_proj.weight"),
    (r"blocks\.(\d+)\.1\.ln\.(weight|bias)", r"layers.\1.mlp.norm.\2"),
    (r"blocks\.(\d+)\.1\.fc\.weight", r"layers.\1.mlp.up_proj.weight"),
    (r"blocks\.(\d+)\.1\.c_proj\.weight", r"layers.\1.mlp.down_proj.weight"),
]
TEXT = "model.text_model.model"
RULES = [
    (r"model\.vision_model\.(.+)", r"model.vision_tower.\1"),
    (r"model\.(layers\.\d+\..+|norm\.weight)", rf"{TEXT}.\1"),
    (r"model\.embed_tokens\.weight", rf"{TEXT}.embed_tokens.weight"),
    (r"lm_head\.weight", r"model.text_model.lm_head.weight"),
]
ADDITIONAL_ROWS = {
    "model.embed_tokens.additional_embedding.weight": f"{TEXT}.embed_tokens.additional.weight",
    "lm_head.additional_fc.weight": "model.text_model.lm_head.additional.weight",
}


FAKE_TOKEN, END_OF_UTTERANCE = "<fake_token_around_image>", "<end_of_utterance>"


def chat_template(tokenizer: PreTrainedTokenizerBase, image_token: str) -> str:
    """Returns the chat template of Idefics' instructed models. In transformers, the processor holds it as code.

    As in that code, two images side by side share the token between them. If the tokenizer has no
    `<end_of_utterance>`, as that of the base models, the template leaves this token out.
    """
    known = tokenizer.get_vocab()
    fake, end = (token if token in known else "" for token in (FAKE_TOKEN, END_OF_UTTERANCE))
    return (
        "{{ bos_token }}{% for message in messages %}{% set ns = namespace(after=false) %}"
        "{{ 'User: ' if message.role == 'user' else message.role | capitalize + ': ' }}"
        "{% for part in message.content %}{% if part.type == 'image' %}"
        f"{{{{ ('' if ns.after else '{fake}') + '{image_token}{fake}' }}}}"
        "{% set ns.after = true %}{% else %}{{ part.text }}{% set ns.after = false %}{% endif %}{% endfor %}"
        f"{{{{ '{end}\n' }}}}"
        "{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
    )


def recipe(config: IdeficsConfig) -> Recipe:
    """Returns the recipe that converts an Idefics checkpoint."""
    vision = config.vision_config
    assert isinstance(vision, IdeficsVisionConfig)
    fields: dict[str, Any] = {name: getattr(config, name) for name in (*LLAMA_FIELDS, "num_hidden_layers")}
    tower = CLIPVisionConfig(hidden_size=vision.embed_dim, **{name: getattr(vision, name) for name in VISION_FIELDS})
    if config.dropout:
        logger.warning(f"Expected `dropout` of 0, got {config.dropout}: only the blocks have it after the import.")
    interval, has_marker = config.cross_layer_interval, config.additional_vocab_size > 1
    target = XAttnConfig(
        text_config=LlamaConfig(**fields, head_dim=config.hidden_size // config.num_attention_heads),
        vision_config=tower,
        cross_attention_config=block_config(
            config,
            context_size=vision.embed_dim,
            qk_norm=config.qk_layer_norms,
            gate_granularity="channel" if config.alpha_type == "vector" else "scalar",
        ),
        cross_attention_layers=[interval * index for index in range(config.num_hidden_layers // interval)],
        # The first two added tokens are <fake_token_around_image> and <image>.
        image_token_id=config.vocab_size + 1 if has_marker else None,
        image_visibility="latest" if has_marker else "all",
        connector_type="perceiver" if config.use_resampler else "identity",
        perceiver_config=_perceiver(config, vision.embed_dim) if config.use_resampler else None,
        additional_vocab_size=config.additional_vocab_size,
        additional_vocab_in_head=config.additional_vocab_size > 0,
        source_config=config.to_dict(),
        dtype=config.dtype,
    )
    return Recipe(target, functools.partial(_targets, interval))


def _perceiver(config: IdeficsConfig, width: int) -> PerceiverConfig:
    resampler = config.perceiver_config
    assert isinstance(resampler, IdeficsPerceiverConfig)
    return PerceiverConfig(
        hidden_size=width,
        num_latents=resampler.resampler_n_latents,
        num_hidden_layers=resampler.resampler_depth,
        num_attention_heads=resampler.resampler_n_heads,
        head_dim=resampler.resampler_head_dim,
        hidden_act="relu",
        qk_norm=resampler.qk_layer_norms_perceiver,
    )


def _targets(interval: int, name: str) -> list[Target] | None:
    if name in ADDITIONAL_ROWS:
        return [Target(ADDITIONAL_ROWS[name])]
    if match := re.fullmatch(r"model\.gated_cross_attn_layers\.(\d+)\.(.+)", name):
        part = renamed(match[2], BLOCK_RULES)
        place = f"{TEXT}.layers.{int(match[1]) * interval}.cross_attention_block"
        return None if part is None else [Target(f"{place}.{part}")]
    if name.startswith("model.perceiver_resampler."):
        part = renamed(name.removeprefix("model.perceiver_resampler."), PERCEIVER_RULES)
        return None if part is None else [Target(f"model.connector.layers.0.{part}")]
    if name.endswith(("rotary_emb.inv_freq", "embeddings.position_ids")):
        return []  # buffers that older releases of transformers saved, and that the model computes
    new = renamed(name, RULES)
    return None if new is None else [Target(new)]
