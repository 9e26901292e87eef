"""Runs the attention kernels, for queries in the folded layout (see `layers/attention.py`).

There are three ways to compute the same attention:

- A kernel of transformers' attention interface: SDPA, flash or flex attention, or a kernel of the user. This file has
  an `eager` kernel of its own, because the folded layout needs no repeated keys.
- Keys and values that are stored in fewer bytes (`cache/states.py`) are multiplied as they are stored, if there are few
  queries.
- On a GPU, with one text position for each image, the heads are unfolded again. SDPA then uses more of the memory
  bandwidth (`examples/benchmarks/decode_attention.py`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import logging
from transformers.utils.import_utils import is_torch_greater_or_equal

from ..cache.states import States, StoredStates, dense
from ..configuration_xattn import CrossAttentionConfig


logger = logging.get_logger(__name__)

UNFOLDED_ON = "cuda"
MASKS_UNFOLDED = torch.version.cuda is not None and is_torch_greater_or_equal("2.11")


class Attention(Protocol):
    """What a kernel reads of [`GatedCrossAttention`]."""

    config: CrossAttentionConfig
    scaling: float


def run_kernel(
    module: Attention,
    query: torch.Tensor,
    key: States,
    value: States,
    mask: torch.Tensor | None,
    position_bias: torch.Tensor | None,
    *,
    group: int,
    dropout: float = 0.0,
    output_attentions: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attends with the kernel of the configuration, or with another one that computes the same for this call.

    Args:
        module ([`GatedCrossAttention`]): Its `config` names the kernel, and its `scaling` is the factor of the scores.
        query (`torch.Tensor`): `(R, K, r * T * G, D)`.
        key, value (`torch.Tensor` or [`StoredStates`]): `(R, K, N, D)`.
        mask (`torch.BoolTensor`, *optional*): True where a query may attend to a key; `(R, 1, 1, N)`, `(R, 1, r * T,
            N)` or `(R, 1, r * T * G, N)`.
        position_bias (`torch.Tensor`, *optional*): `(R, K, r * T * G, N)`.
        group (`int`): G.

    Returns:
        `(output, weights)`: the output `(R, r * T * G, K, D)`, and the weights `(R, K, r * T * G, N)` if
        `output_attentions`, else None.
    """
    shared_mask = mask is not None and mask.shape[2] not in (1, query.shape[2])
    if isinstance(key, StoredStates):
        name = module.config._attn_implementation or "sdpa"
        if name in ("sdpa", "eager") and not dropout and key.multiplies_few(query):
            if shared_mask and mask is not None:
                mask = mask.repeat_interleave(group, dim=2)
            assert isinstance(value, type(key))
            output, weights = key.attend(query, value, mask, module.scaling, position_bias)
            return output, weights if output_attentions else None
        key, value = dense(key), dense(value)
    assert isinstance(key, torch.Tensor) and isinstance(value, torch.Tensor)
    interface, mask, name = _interface(module.config, mask, query, key, position_bias, output_attentions)
    query = query.to(key.dtype)
    if (
        name == "sdpa"
        and position_bias is None
        and (shared_mask or (query.device.type == UNFOLDED_ON and attends_unfolded(query, key, mask, group)))
    ):
        return _attend_unfolded(query, key, value, mask, group, dropout, module.scaling), None
    if mask is not None and mask.shape[2] not in (1, query.shape[2]):
        mask = mask.repeat_interleave(group, dim=2)
    bias = {} if position_bias is None else {"position_bias": position_bias}
    output, weights = interface(
        module, query, key, value, mask, dropout=dropout, scaling=module.scaling, is_causal=False, **bias
    )
    return output, weights if output_attentions else None


def _interface(
    config: Any,
    mask: torch.Tensor | None,
    query: torch.Tensor,
    key: torch.Tensor,
    position_bias: torch.Tensor | None,
    output_attentions: bool,
) -> tuple[Callable[..., Any], torch.Tensor | None, str]:
    """Returns the kernel, the mask in the form that the kernel takes, and the name of the kernel."""
    name = config._attn_implementation or "sdpa"
    if output_attentions or name == "eager":
        return eager_attention_forward, mask, "eager"
    if "flash" in name and (mask is not None or position_bias is not None or key.dtype == torch.float32):
        logger.warning_once(
            f"`{name}` supports no cross-attention mask, no position bias and no float32. Calls that need one of them "
            "use `sdpa`."
        )
        name = "sdpa"
    if name == "flex_attention" and mask is not None and not _flex_reads_masks(query.device):
        logger.warning_once("`flex_attention` supports no cross-attention mask on CPU. Calls with a mask use `sdpa`.")
        name = "sdpa"
    if name == "flex_attention" and mask is not None:
        # transformers adds a mask to the scores of flex attention, and reads an entry of it for every query.
        if mask.shape[2] not in (1, query.shape[2]):
            mask = mask.repeat_interleave(query.shape[2] // mask.shape[2], dim=2)
        mask = torch.where(mask, 0.0, torch.finfo(query.dtype).min).to(query.dtype)
        mask = mask.expand(-1, -1, query.shape[2], -1)
    interface = ALL_ATTENTION_FUNCTIONS.get_interface(name, eager_attention_forward)
    if name in ("sdpa", "flex_attention") or "flash" in name:
        return interface, mask, name
    if position_bias is not None and "position_bias" not in inspect.signature(interface).parameters:
        logger.warning_once(f"`{name}` takes no `position_bias`. Calls with one use `sdpa`.")
        return ALL_ATTENTION_FUNCTIONS.get_interface("sdpa", eager_attention_forward), mask, "sdpa"
    if mask is not None and ALL_MASK_ATTENTION_FUNCTIONS.get(name) is eager_mask:  # a kernel that adds its mask
        mask = torch.where(mask, 0.0, torch.finfo(query.dtype).min).to(query.dtype)
    return interface, mask, name


def _flex_reads_masks(device: torch.device) -> bool:
    """Whether flex attention can read a mask. With one, the compiled CPU kernel of torch 2.13 crashes the process."""
    return device.type != "cpu"


def eager_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    position_bias: torch.Tensor | None = None,
    **kwargs,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Plain attention in the folded layout, which returns the weights. It has transformers' attention interface."""
    scores = torch.matmul(query, key.transpose(-1, -2)) * scaling
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if position_bias is not None:
        scores = scores + position_bias
    if attention_mask is not None:
        scores = scores.masked_fill(~attention_mask, torch.finfo(scores.dtype).min)
    weights = scores.softmax(dim=-1).to(query.dtype)
    dropped = nn.functional.dropout(weights, p=dropout, training=module.training)
    return torch.matmul(dropped, value).transpose(1, 2), weights


def attends_unfolded(query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None, group: int) -> bool:
    """Whether a GPU reads the keys and values of a decode step faster if the heads are unfolded.

    With folded heads, a GPU has only as many thread blocks as there are K/V heads, which are few. If each head has one
    text position, SDPA's kernels for half precision divide the image tokens among more thread blocks, and still read
    each K/V head once for its group. For other sizes, and with a mask before torch 2.11, these kernels may repeat keys
    and values (transformers' `use_gqa_in_sdpa`).
    """
    if query.device.type != UNFOLDED_ON or query.shape[2] != group or group == 1 or key.dtype == torch.float32:
        return False
    if mask is None:
        return key.shape[3] <= 256
    return MASKS_UNFOLDED and mask.shape[2] == 1 and key.shape[3] <= 128


def _attend_unfolded(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    group: int,
    dropout: float,
    scaling: float,
) -> torch.Tensor:
    """Runs SDPA with unfolded heads. They share a mask `(R, 1, r * T, N)`, and keys and values are not repeated."""
    rows, kv_heads, _, head_dim = query.shape
    query = query.view(rows, kv_heads, -1, group, head_dim).transpose(2, 3).flatten(1, 2)
    output = nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, dropout_p=dropout, scale=scaling, enable_gqa=group > 1
    )
    output = output.view(rows, kv_heads, group, -1, head_dim).transpose(2, 3).flatten(2, 3)
    return output.transpose(1, 2)
