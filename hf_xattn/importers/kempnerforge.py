"""Imports KempnerForge's cross-attention blocks (`model/cross_attention.py`, architecture "cross_attention").

The weights have the same names in this package. In the table, `D` is the width of the decoder, `H` the number of query
heads, `K` the number of K/V heads, `d` the width of a head, and `F` the inner width of the MLP.

| KempnerForge, `cross_attention_layers.<k>.` | shape | here |
|---|---|---|
| `attn_norm.weight`, `mlp_norm.weight` | (D,) | the same |
| `attn.q_proj.weight` | (H d, D) | the same |
| `attn.{k,v}_proj.weight` | (K d, D) | the same |
| `attn.o_proj.weight` | (D, H d) | the same |
| `mlp.{gate_proj,up_proj}.weight`, `mlp.down_proj.weight` | (F, D), (D, F) | the same; `gate_proj` only with SiLU |

The blocks have no gate. KempnerForge builds their norms with an epsilon of 1e-5: `norm_eps` of its configuration is for
the norms of the decoder alone. Block `k` stands behind decoder layer `(k + 1) * every - 1`, so its index here is `(k +
1) * every`. The image features are the output of KempnerForge's adapter and have the hidden size of the decoder. Pass
them as `cross_attention_states`.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from transformers import PreTrainedModel

from ..configuration_xattn import CrossAttentionConfig, XAttnConfig
from ..decoders.decoder import find_decoder
from ..modeling_xattn import XAttnForConditionalGeneration
from .blocks import add_once, block_options, block_tensors, check_parts, load_parts, shape_of, unwrapped


NORM_EPS = 1e-5  # epsilon of the norms in every block
BLOCK = r"(?:.+\.)?cross_attention_layers\.(\d+)\.(.+)"


def import_kempnerforge(
    state_dict: dict[str, torch.Tensor],
    text: PreTrainedModel,
    *,
    num_attention_heads: int,
    every: int,
    hidden_act: str | None = None,
    norm_type: str = "rmsnorm",
    norm_eps: float = NORM_EPS,
) -> XAttnForConditionalGeneration:
    """Puts KempnerForge's blocks into a text model.

    Args:
        state_dict (`dict[str, torch.Tensor]`): state dict of the trained model. Only names under
            `cross_attention_layers` are read.
        text (`PreTrainedModel`): the decoder, as a causal language model of transformers. It is changed in place.
        num_attention_heads (`int`): number of query heads. The shapes give only its product with the head width.
        every (`int`): `cross_attention_every_n_layers` of KempnerForge's configuration.
        hidden_act (`str`, *optional*): `activation` of KempnerForge's configuration. It is required for blocks
            without a `gate_proj`, because their tensors do not show it. Blocks with a `gate_proj` have SiLU.
        norm_type (`str`): `norm_type` of KempnerForge's configuration.
        norm_eps (`float`, defaults to 1e-5): epsilon of the norms in the blocks. It is not `norm_eps` of KempnerForge's
            configuration, which the blocks do not read. Pass another value only for blocks that were built with it.

    Returns:
        [`XAttnForConditionalGeneration`]: the model.

    Raises:
        ValueError: for missing tensors, tensors of a wrong shape, or a number of blocks that does not fit the decoder.
            The error comes before `text` is changed.
    """
    blocks: dict[int, dict[str, torch.Tensor]] = {}
    for name, tensor in unwrapped(state_dict).items():
        if (match := re.fullmatch(BLOCK, name)) is not None:
            add_once(blocks.setdefault(int(match[1]), {}), match[2], tensor, name)
    if not blocks:
        raise ValueError(
            "`state_dict` holds no cross_attention_layers: expected a KempnerForge model with cross-attention."
        )
    num_layers = len(find_decoder(text)[1])
    if sorted(blocks) != list(range(num_layers // every)):
        raise ValueError(
            f"`state_dict` holds blocks {sorted(blocks)}, but {num_layers} layers with `every={every}` have "
            f"{num_layers // every}. Pass `cross_attention_every_n_layers` of KempnerForge's configuration as `every`."
        )
    config = XAttnConfig(
        text_config=text.config,
        cross_attention_config=kempnerforge_block_config(
            blocks[0], num_attention_heads, hidden_act, norm_type=norm_type, norm_eps=norm_eps
        ),
        cross_attention_layers=[(index + 1) * every for index in blocks],
    )
    parts = block_tensors(text, {(index + 1) * every: block for index, block in blocks.items()})
    check_parts(config, text, parts)
    model = XAttnForConditionalGeneration(config, text_model=text)
    load_parts(model, parts)
    return model.train(text.training)


def kempnerforge_block_config(
    state_dict: dict[str, torch.Tensor],
    num_attention_heads: int,
    hidden_act: str | None = None,
    **norms: Any,
) -> CrossAttentionConfig:
    """Returns the configuration of a [`GatedCrossAttentionBlock`] that loads the state dict of one block unchanged."""
    gated = "mlp.gate_proj.weight" in state_dict
    if hidden_act is None and not gated:
        raise ValueError(
            "Expected `hidden_act` (`--hidden-act`), `activation` of KempnerForge's configuration: blocks without a "
            "`gate_proj` have GELU or ReLU, and their tensors do not tell which. Got None."
        )
    names = {"q": "attn.q_proj.weight", "k": "attn.k_proj.weight", "down": "mlp.down_proj.weight"}
    return block_options(
        state_dict,
        names,
        num_attention_heads,
        shape_of(state_dict, names["q"])[0] // num_attention_heads,
        hidden_act=hidden_act or "silu",
        mlp_type="gated" if gated else "plain",
        gate="none",
        **{"norm_eps": NORM_EPS, **norms},
    )
