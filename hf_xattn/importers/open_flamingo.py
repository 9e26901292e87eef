"""Imports OpenFlamingo: its gated cross-attention blocks and its perceiver resampler.

An OpenFlamingo checkpoint holds the modules that were added to a text model and a CLIP tower, and the embeddings of the
text model with rows for the added tokens. The text model and the tower have checkpoints of their own.

The table shows the names of the state dict. `D` is the text width, `V` the vision width, `H` the number of heads, `d`
the head width (published checkpoints: `H` 8, `d` 64). `<block>` is `<layers>.<i>.gated_cross_attn_layer`. In a model
that was saved whole, `<block>` is `gated_cross_attn_layers.<i>`.

| OpenFlamingo | shape | here |
|---|---|---|
| `lang_encoder.<block>.attn.norm.{weight,bias}` | (D,) | `attn_norm` |
| `... .attn.to_q.weight` | (H d, D) | `attn.q_proj` |
| `... .attn.to_kv.weight` | (2 H d, V) | `attn.k_proj`, then `attn.v_proj` |
| `... .attn.to_out.weight` | (D, H d) | `attn.o_proj` |
| `... .attn_gate`, `ff_gate` | (1,) | `attn_gate`, `mlp_gate` |
| `... .ff.0.{weight,bias}` | (D,) | `mlp_norm` |
| `ff.1.weight`, `ff.3.weight` | (4 D, D), (D, 4 D) | `mlp.up_proj`, `mlp.down_proj` |
| `perceiver.latents` | (latents, V) | `connector.layers.0.latents` |
| `perceiver.media_time_embs`; flamingo-pytorch: `media_pos_emb` | (images, 1, V) | `image_positions` |
| `perceiver.layers.<k>.0.{norm_media,norm_latents,to_q,to_kv,to_out}` | as above, with V | `layers.<k>.attn.*` |
| `perceiver.layers.<k>.1.{0,1,3}`, `perceiver.norm` | as `ff` above | `layers.<k>.mlp.*`, `norm` |
| `lang_encoder.<name>`, of a layer `<layers>.<i>.decoder_layer.<name>` | | the same name in the text model |
| `lang_encoder.old_decoder_blocks`, `vision_encoder` | | ignored: copies of layers, and the frozen tower |

Block `i` stands in front of decoder layer `i`. Text sees the latest image. The resampler reads CLIP's patch tokens
without the class token (`vision_feature_select_strategy="default"`). A resampler with embeddings for the frames of a
video (`frame_embs`) is refused. There is one difference: for text before the first image, OpenFlamingo adds the MLP
branch of a block. This package adds nothing.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from transformers import PreTrainedModel

from ..configuration_xattn import CrossAttentionConfig, PerceiverConfig, XAttnConfig
from ..decoders.decoder import find_decoder
from ..decoders.insertion import check_insertable
from ..modeling_xattn import XAttnForConditionalGeneration
from .blocks import (
    add_once,
    block_options,
    block_tensors,
    check_parts,
    language_weights,
    load_parts,
    shape_of,
    unwrapped,
)
from .conversion import renamed


# Published checkpoints name a block by its layer. A model that was saved whole holds each block under both names.
BLOCK = r"(?:.+\.)?(?:gated_cross_attn_layers\.(\d+)|(\d+)\.gated_cross_attn_layer)\.(.+)"
NOT_TAKEN = r"(?:lang_encoder\.old_decoder_blocks|vision_encoder)\..+"
BLOCK_RULES = [
    (r"attn\.norm\.(weight|bias)", r"attn_norm.\1"),
    (r"attn\.to_q\.weight", r"attn.q_proj.weight"),
    (r"attn\.to_out\.weight", r"attn.o_proj.weight"),
    (r"attn_gate", r"attn_gate"),
    (r"ff_gate", r"mlp_gate"),
    (r"ff\.0\.(weight|bias)", r"mlp_norm.\1"),
    (r"ff\.1\.weight", r"mlp.up_proj.weight"),
    (r"ff\.3\.weight", r"mlp.down_proj.weight"),
]
POSITIONS = "media_time_embs|media_pos_emb"
PERCEIVER_RULES = [
    (r"latents", r"latents"),
    (POSITIONS, r"image_positions"),
    (r"norm\.(weight|bias)", r"norm.\1"),
    (r"layers\.(\d+)\.0\.norm_media\.(weight|bias)", r"layers.\1.attn.context_norm.\2"),
    (r"layers\.(\d+)\.0\.norm_latents\.(weight|bias)", r"layers.\1.attn.latents_norm.\2"),
    (r"layers\.(\d+)\.0\.to_q\.weight", r"layers.\1.attn.q_proj.weight"),
    (r"layers\.(\d+)\.0\.to_out\.weight", r"layers.\1.attn.o_proj.weight"),
    (r"layers\.(\d+)\.1\.0\.(weight|bias)", r"layers.\1.mlp.norm.\2"),
    (r"layers\.(\d+)\.1\.1\.weight", r"layers.\1.mlp.up_proj.weight"),
    (r"layers\.(\d+)\.1\.3\.weight", r"layers.\1.mlp.down_proj.weight"),
]


def import_open_flamingo(
    state_dict: dict[str, torch.Tensor],
    text: PreTrainedModel,
    vision: PreTrainedModel | None = None,
    *,
    image_token_id: int,
    head_dim: int = 64,
) -> XAttnForConditionalGeneration:
    """Puts OpenFlamingo's blocks into a text model. With a vision tower, it adds OpenFlamingo's resampler, too.

    Args:
        state_dict (`dict[str, torch.Tensor]`): an OpenFlamingo checkpoint (`torch.load(..., weights_only=True)`).
        text (`PreTrainedModel`): the text model of the checkpoint. It is changed in place: its vocabulary grows to the
            size of the embeddings in `state_dict`.
        vision (`PreTrainedModel`, *optional*): the vision tower. A model without one has no resampler either, and takes
            resampled features as `cross_attention_states`.
        image_token_id (`int`): id of `<image>`.
        head_dim (`int`, defaults to 64): width of a head in the blocks and the resampler.

    Returns:
        [`XAttnForConditionalGeneration`]: the model.

    Raises:
        ValueError: for unknown tensors, missing tensors or tensors of a wrong shape, and for blocks that do not stand
            in front of every n-th layer of `text`. The error comes before `text` is changed.
    """
    blocks, perceiver, language = _split(state_dict)
    _check_places(sorted(blocks), text)
    block_config, _ = open_flamingo_block(blocks[min(blocks)], head_dim)
    connector: dict[str, Any] = {}
    latents: dict[str, torch.Tensor] = {}
    if vision is not None:
        perceiver_config, latents = open_flamingo_resampler(perceiver, head_dim)
        connector = {
            "connector_type": "perceiver",
            "perceiver_config": perceiver_config,
            "vision_feature_select_strategy": "default",  # patch tokens, without CLIP's class token
        }
    language, text_config = language_weights(text, language)
    config = XAttnConfig(
        text_config=text_config,
        vision_config=None if vision is None else vision.config,
        cross_attention_config=block_config,
        cross_attention_layers=sorted(blocks),
        image_token_id=image_token_id,
        image_visibility="latest",
        **connector,
    )
    parts = block_tensors(text, {place: open_flamingo_block(block, head_dim)[1] for place, block in blocks.items()})
    parts |= {f"model.connector.layers.0.{name}": tensor for name, tensor in latents.items()}
    check_parts(config, text, parts)
    check_insertable(text)
    if text_config.vocab_size != text.config.vocab_size:
        text.resize_token_embeddings(text_config.vocab_size, mean_resizing=False)
    config.text_config = text.config
    model = XAttnForConditionalGeneration(config, text_model=text, vision_tower=vision)
    load_parts(model, parts | {f"model.text_model.{name}": tensor for name, tensor in language.items()})
    return model.train(text.training)


def open_flamingo_block(state_dict: dict[str, torch.Tensor], head_dim: int = 64) -> tuple[CrossAttentionConfig, dict]:
    """Converts the state dict of one OpenFlamingo block, whose names begin with `attn.` and `ff.`.

    Returns:
        the configuration and the state dict of a [`GatedCrossAttentionBlock`].
    """
    names = {"q": "attn.to_q.weight", "k": "attn.to_kv.weight", "down": "ff.3.weight"}
    num_heads = shape_of(state_dict, names["q"])[0] // head_dim
    options: dict[str, Any] = {"norm_type": "layernorm", "norm_eps": 1e-5, "hidden_act": "gelu", "mlp_type": "plain"}
    options |= {"keys_and_values": 2, "gate_init": 0.0, "zero_init": False}
    config = block_options(state_dict, names, num_heads, head_dim, **options)
    return config, _renamed(state_dict, BLOCK_RULES, "attn.to_kv.weight", "attn.{}_proj.weight")


def _split(state_dict: dict[str, torch.Tensor]) -> tuple[dict[int, dict[str, torch.Tensor]], dict, dict]:
    """Returns the tensors of each block, those of the resampler, and those of the text model."""
    blocks: dict[int, dict[str, torch.Tensor]] = {}
    perceiver, language = {}, {}
    for name, tensor in unwrapped(state_dict).items():
        match = re.fullmatch(BLOCK, name)
        if match is not None:
            add_once(blocks.setdefault(int(match[1] or match[2]), {}), match[3], tensor, name)
        elif name.startswith("perceiver."):
            perceiver[name.removeprefix("perceiver.")] = tensor
        elif re.fullmatch(NOT_TAKEN, name) is not None:
            continue
        elif name.startswith("lang_encoder."):
            language[name.removeprefix("lang_encoder.").replace(".decoder_layer.", ".")] = tensor
        else:
            raise ValueError(f"`state_dict` holds {name}, which OpenFlamingo does not have.")
    if not blocks:
        raise ValueError("`state_dict` holds no gated_cross_attn_layer, so it is not an OpenFlamingo checkpoint.")
    return blocks, perceiver, language


def _check_places(places: list[int], text: PreTrainedModel) -> None:
    """Raises a `ValueError` if the blocks do not stand at every n-th layer: some are missing, or they belong to another
    text model.
    """
    _, layers = find_decoder(text)
    step = places[1] - places[0] if len(places) > 1 else places[0] + 1
    expected = list(range(places[0] % step, len(layers), step))
    if places != expected:
        raise ValueError(
            f"`state_dict` holds blocks for the layers {places}: expected {expected}, every {step}. of the "
            f"{len(layers)} layers of `text` ({type(text).__name__}). It is not complete, or of another text model."
        )


def open_flamingo_resampler(
    state_dict: dict[str, torch.Tensor], head_dim: int = 64
) -> tuple[PerceiverConfig, dict[str, torch.Tensor]]:
    """Converts the state dict of OpenFlamingo's or flamingo-pytorch's resampler, in which `latents` has no prefix.

    Embeddings for the place of an image in the text (`media_time_embs`, `media_pos_emb`) become `num_image_positions`.

    Returns:
        the configuration and the state dict of a `PerceiverResampler`, the `"perceiver"` connector.

    Raises:
        ValueError: for missing or unknown tensors, and for a resampler with embeddings of a video's frames.
    """
    if "frame_embs" in state_dict:
        raise ValueError(
            "`state_dict`: expected a resampler of images, got `frame_embs`, embeddings of a video's frames."
        )
    latents, width = shape_of(state_dict, "latents")
    config = PerceiverConfig(
        hidden_size=width,
        num_latents=latents,
        num_image_positions=next((len(state_dict[name]) for name in POSITIONS.split("|") if name in state_dict), 0),
        num_hidden_layers=len({name.split(".")[1] for name in state_dict if name.startswith("layers.")}),
        num_attention_heads=shape_of(state_dict, "layers.0.0.to_q.weight")[0] // head_dim,
        head_dim=head_dim,
        intermediate_size=shape_of(state_dict, "layers.0.1.1.weight")[0],
        hidden_act="gelu",
    )
    both, projections = r"layers\.(\d+)\.0\.to_kv\.weight", r"layers.\1.attn.{}_proj.weight"
    renamed_state = _renamed(state_dict, PERCEIVER_RULES, both, projections)
    if "image_positions" in renamed_state:  # (images, 1, width)
        renamed_state["image_positions"] = renamed_state["image_positions"].reshape(-1, width)
    return config, renamed_state


def _renamed(
    state: dict[str, torch.Tensor], rules: list[tuple[str, str]], both: str, projection: str
) -> dict[str, torch.Tensor]:
    """Renames a state dict. A matrix whose name matches `both` is split: its first rows are those of the keys, and the
    others those of the values.
    """
    result = {}
    for name, tensor in state.items():
        match = re.fullmatch(both, name)
        if match is not None:
            for letter, half in zip("kv", tensor.chunk(2)):
                result[match.expand(projection.format(letter))] = half
            continue
        new = renamed(name, rules)
        if new is None:
            raise ValueError(f"`state_dict` holds {name}, which OpenFlamingo does not have.")
        result[new] = tensor
    return result
