"""Cross-attention: text queries, image keys and values.

It differs from self-attention in three ways:

- The image axis has no causal order. So all queries that share keys and values are folded into one query axis: the heads
  of a K/V group, the text positions, and the text rows that look at the same image. K/V are never repeated, neither for
  GQA nor for beams, and a decode step reads them once.
- There is no rotary embedding, because image features contain their positions. A context with an order (audio, video)
  may use T5's relative bias.
- The output projection starts at zero (`zero_init`), so a fresh layer changes nothing.

Letters in comments: R image rows, r text rows for each image row, T text tokens, N image tokens, K K/V heads, G query
heads for each K/V head, D head width.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import logging

from ..cache.cross_cache import KeyValue, append
from ..cache.image_layout import rows_to
from ..cache.int8_cache import Int8States, States, as_stored, attend, dense, multiplies_few
from ..configuration_xattn import CrossAttentionConfig
from ..utils.distributed import is_distributed, is_split
from ..utils.projection import ImageLinear, to_dtype_of
from ..utils.tensor_checks import check_floating, check_states, check_tensor
from .context import CrossAttentionContext, Ragged, check_context, plain_context
from .float32_attention import attend_in_float32, attends_in_float32
from .norms import CrossAttentionKeyNorm, CrossAttentionRMSNorm, at_least_float32
from .position_bias import relative_position_bucket
from .row_groups import attend_by_group


logger = logging.get_logger(__name__)


def zero_init_linear(in_features: int, out_features: int, bias: bool, zero_init: bool) -> nn.Linear:
    """Makes a linear layer with the attribute `zero_init`, which tells `_init_weights` whether the layer starts at zero.

    transformers initialises weights module by module, and again if a checkpoint lacks them. So the mark is on the module.
    """
    linear: Any = nn.Linear(in_features, out_features, bias=bias)
    linear.zero_init = zero_init
    if zero_init:
        nn.init.zeros_(linear.weight)
        if bias:
            nn.init.zeros_(linear.bias)
    return linear


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
    """Plain attention in the folded layout. Takes and returns what transformers' attention interface does, with weights."""
    scores = torch.matmul(query, key.transpose(-1, -2)) * scaling
    scores = scores.to(at_least_float32(scores.dtype))
    if position_bias is not None:
        scores = scores + position_bias
    if attention_mask is not None:
        scores = scores.masked_fill(~attention_mask, torch.finfo(scores.dtype).min)
    weights = scores.softmax(dim=-1).to(query.dtype)
    dropped = nn.functional.dropout(weights, p=dropout, training=module.training)
    return torch.matmul(dropped, value).transpose(1, 2), weights


class GatedCrossAttention(nn.Module):
    """Multi-head cross-attention over a context of any width. Also works on its own, on plain tensors.

    The gate that scales the output is in [`GatedCrossAttentionBlock`], next to the residual connection.

    Args:
        config ([`CrossAttentionConfig`]): sizes and options.
        layer_idx (`int`): index of this layer's keys and values in the cross-attention half of a cache.
    """

    is_causal = False
    num_key_value_groups = 1  # folded calls have as many query heads as K/V heads

    def __init__(self, config: CrossAttentionConfig, layer_idx: int = 0):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        # Of this process: under tensor parallelism a rank holds some of the heads (see `learning/tensor_parallel.py`).
        self.num_key_value_heads = config.num_key_value_heads
        self.num_groups = config.num_attention_heads // config.num_key_value_heads
        self.head_dim = config.head_dim
        self.scaling = config.head_dim**-0.5
        self.attention_dropout = config.attention_dropout
        self.quiet_softmax = config.quiet_softmax
        query_size = config.num_attention_heads * config.head_dim
        key_value_size = config.num_key_value_heads * config.head_dim
        bias = config.attention_bias
        self.q_proj = nn.Linear(config.hidden_size, query_size, bias=bias)
        self.k_proj = ImageLinear(config.context_size, key_value_size, bias=bias)
        self.v_proj = ImageLinear(config.context_size, key_value_size, bias=bias)
        self.o_proj = zero_init_linear(query_size, config.hidden_size, bias, config.zero_init)
        self.q_norm = CrossAttentionRMSNorm(config.head_dim, config.qk_norm_eps) if config.qk_norm else None
        self.k_norm = CrossAttentionKeyNorm(config.head_dim, config.qk_norm_eps) if config.qk_norm else None
        self.relative_attention_bias = (
            nn.Embedding(config.position_bias_num_buckets, config.num_attention_heads) if config.position_bias else None
        )

    def forward(
        self,
        hidden_states: torch.Tensor | None,
        cross_attention_states: torch.Tensor | None = None,
        cross_attention_mask: torch.Tensor | None = None,
        output_attentions: bool = False,
        cross_attention: CrossAttentionContext | None = None,
    ) -> tuple[Any, torch.Tensor | None]:
        """
        Args:
            hidden_states (`torch.Tensor`): `(batch, text_len, hidden_size)`; None if only keys and values are computed.
            cross_attention_states (`torch.Tensor`): `(batch, num_image_tokens, context_size)`.
            cross_attention_mask (`torch.BoolTensor`, *optional*): True = attend; `(batch, num_image_tokens)` or
                `(batch, text_len, num_image_tokens)`. The output of a text token that may see nothing is zero, before the
                bias of the output projection.
            output_attentions (`bool`): also return the attention weights.
            cross_attention ([`CrossAttentionContext`], *optional*): what a model passes to its blocks, in place of the three
                arguments above.

        Returns:
            `(output, weights)`: `(batch, text_len, hidden_size)`, and `(batch, num_attention_heads, text_len,
            num_image_tokens)` or None. Without `hidden_states`, keys and values in the place of the output.

        Raises:
            TypeError: for a mask that is not boolean or states that are not floating point.
            ValueError: for a wrong rank, width or batch.
        """
        if cross_attention is None:
            if hidden_states is None or cross_attention_states is None:
                raise ValueError(
                    "`hidden_states` (batch, text_len, hidden_size) and `cross_attention_states` (batch, num_image_tokens, "
                    "context_size) are required."
                )
            check_text_and_states(hidden_states, cross_attention_states, self.config)
            cross_attention = plain_context(
                hidden_states, cross_attention_states, cross_attention_mask, self.config, output_attentions
            )
        else:
            check_context(cross_attention)
        key, value = self._keys_values(cross_attention)
        if hidden_states is None:
            return (key, value), None  # FSDP reads a module's outputs to know when its weights are needed again
        output, weights = self._attend(hidden_states, key, value, cross_attention)
        if cross_attention.unused is not None:
            output = output + self._unused(cross_attention.unused, cross_attention).to(output.dtype)
        return output, weights

    def _unused(self, zero: torch.Tensor, context: CrossAttentionContext) -> torch.Tensor:
        """A zero that depends on the weights which this call does not use, but may use in other processes."""
        if context.cross_attention_states is None:
            for weight in (*self.k_proj.parameters(), *self.v_proj.parameters()):
                if weight.requires_grad and not is_split(
                    weight
                ):  # under tensor parallelism, no process has other images
                    zero = zero + weight.flatten()[:0].sum()
        return zero

    def _keys_values(self, context: CrossAttentionContext) -> KeyValue:
        """Returns keys and values of all images: projects new images, and reads the others from the cache."""
        cached, states = context.cached(self.layer_idx), context.cross_attention_states
        if states is None:
            assert cached is not None
            return cached
        key, value = self.project_key_value(states, self.quiet_softmax and cached is None, context.ragged)
        # Rounded before they are used: this call must see what later calls read from the cache.
        new = as_stored(key, context.cache_dtype), as_stored(value, context.cache_dtype)
        keys_values = append(cached, new)
        if context.recorder is not None and context.recorder.wants_keys_values:
            context.recorder.keys_values[self.layer_idx] = keys_values
        return keys_values

    def project_key_value(
        self, cross_attention_states: torch.Tensor, null_key: bool = False, ragged: Ragged | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Projects image tokens to keys and values, in the layout of transformers' caches.

        Args:
            cross_attention_states (`torch.Tensor`): `(rows, num_image_tokens, context_size)`.
            null_key (`bool`): put the null key of quiet softmax in front. Its score is 0, so the null key adds `exp(0) = 1` to
                the denominator of the softmax.
            ragged ([`Ragged`], *optional*): tells where the tokens stand, if they are the real ones of a padded batch.

        Returns:
            two `torch.Tensor`: `(rows, num_key_value_heads, num_image_tokens, head_dim)`, with one token more if there is a null
            key. With `qk_norm`, the queries are multiplied by the weight of the key norm, not the keys (see
            [`CrossAttentionKeyNorm`]).
        """
        states = to_dtype_of(self.k_proj, cross_attention_states)
        # -1 is the number of heads: under tensor parallelism a rank holds only some of them.
        shape = (*states.shape[:2], -1, self.head_dim)
        key = self.k_proj(states).view(shape)
        value = self.v_proj(states).view(shape)
        if self.k_norm is not None:
            key = self.k_norm.normalize(key)
        if ragged is not None and ragged.real is not None:
            return ragged.real.spread(key, null_key), ragged.real.spread(value, null_key)
        return _in_cache_layout(key, null_key), _in_cache_layout(value, null_key)

    def _attend(
        self, hidden_states: torch.Tensor, key: States, value: States, context: CrossAttentionContext
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Computes the attention of all text rows over their images.

        Args:
            hidden_states (`torch.Tensor`): `(R * r, T, hidden_size)`; text rows `i * r ... i * r + r - 1` look at image
                row `i`. If `context.slots` is given, text rows of any number and order: their queries go to their slots.
            key, value (`torch.Tensor` or [`Int8States`]): `(R, num_key_value_heads, N, head_dim)`; with the null key `N + 1`
                tokens.
            context ([`CrossAttentionContext`]): masks in the folded layout, positions, and whether to return weights.
        """
        text_rows, text_len = hidden_states.shape[:2]
        rows, kv_heads = key.shape[:2]
        num_tokens = key.shape[2] - self.quiet_softmax
        slots, places = context.slots or (None, None)
        repeats = (text_rows if slots is None else slots.shape[0]) // rows
        mask, visible = context.mask, context.visible
        if mask is not None:
            mask = self._mask_of_rank(mask, repeats * text_len)
        output_attentions = context.recorder is not None and context.recorder.wants_weights
        dropout = self.attention_dropout if self.training else 0.0
        one_key = num_tokens == 1 and not (
            self.quiet_softmax or output_attentions or dropout or torch.is_grad_enabled()
        )
        # FSDP may gather the weights of the norms, which other processes use if their images have more tokens.
        if one_key and (self.q_norm is None or not is_distributed()):
            # The softmax over one key is 1, so the output is the value, whatever the query.
            heads = dense(value).repeat_interleave(self.num_groups, dim=1)
            output = (
                heads.reshape(rows, 1, 1, -1).expand(-1, repeats, text_len, -1).reshape(rows * repeats, text_len, -1)
            )
            output = _rows_at(output, places)
            if visible is not None:
                output = torch.where(visible, output, 0)
            return self.o_proj(output), None

        query = self.q_proj(to_dtype_of(self.q_proj, hidden_states)).view(text_rows, text_len, -1, self.head_dim)
        if self.q_norm is not None and self.k_norm is not None:
            query = self.k_norm(self.q_norm(query.to(at_least_float32(query.dtype)))).to(query.dtype)
        num_heads = query.shape[2]
        group = num_heads // kv_heads
        query = fold_queries(_rows_at(query, slots), rows, kv_heads)

        position_bias = None
        if self.relative_attention_bias is not None:
            position_bias = self._position_bias(context, text_rows, text_len, num_tokens, key.device)
            position_bias = _rows_at(position_bias, slots)
            # (R * r, K * G, T, N) -> (R, K, r * T * G, N)
            position_bias = position_bias.view(rows, repeats, kv_heads, group, text_len, num_tokens)
            position_bias = position_bias.permute(0, 2, 1, 4, 3, 5).reshape(rows, kv_heads, -1, num_tokens)
            position_bias = position_bias.to(query.dtype)
            if self.quiet_softmax:
                position_bias = nn.functional.pad(position_bias, (1, 0))

        groups = None if context.ragged is None else context.ragged.groups
        # Compiled code reads all rows whole: it would be compiled anew for every batch.
        if groups is None or output_attentions or torch.compiler.is_compiling():
            output, weights = self._call_kernel(
                query, key, value, mask, position_bias, group, dropout, output_attentions
            )
        else:
            weights = None
            output = attend_by_group(
                partial(self._call_kernel, group=group, dropout=dropout, output_attentions=False),
                groups,
                query,
                key,
                value,
                mask,
                position_bias,
            )
        output = _rows_at(unfold_output(output, repeats, text_len), places)
        if visible is not None:
            output = torch.where(visible, output, 0)
        output = self.o_proj(output)
        if weights is None:
            return output, None
        weights = weights.view(rows, kv_heads, repeats, text_len, group, -1)[..., -num_tokens:]
        weights = weights.permute(0, 2, 1, 4, 3, 5).reshape(rows * repeats, num_heads, text_len, num_tokens)
        weights = _rows_at(weights, places)
        if visible is not None:
            weights = torch.where(visible[:, None], weights, 0)
        return output, weights

    def _mask_of_rank(self, mask: torch.Tensor, positions: int) -> torch.Tensor:
        """Takes the entries of this rank's heads from a mask `(R, 1, r * T * G, N)`. All heads of a text position see the same."""
        group = self.config.num_attention_heads // self.config.num_key_value_heads
        if group == self.num_groups or mask.shape[2] != positions * group:
            return mask
        return mask.unflatten(2, (positions, group))[:, :, :, : self.num_groups].flatten(2, 3)

    def _call_kernel(
        self,
        query: torch.Tensor,
        key: States,
        value: States,
        mask: torch.Tensor | None,
        position_bias: torch.Tensor | None,
        group: int,
        dropout: float,
        output_attentions: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Folded attention of `(R, K, r * T * G, D)` over `(R, K, N, D)`. Returns `(R, r * T * G, K, D)`, and weights on request."""
        if isinstance(key, Int8States) and isinstance(value, Int8States) and self._multiplies_int8(query, dropout):
            if mask is not None and mask.shape[2] not in (1, query.shape[2]):
                mask = mask.repeat_interleave(group, dim=2)
            output, weights = attend(query, key, value, mask, self.scaling, position_bias)
            return output, weights if output_attentions else None
        key, value = dense(key), dense(value)
        attention_interface, mask, name = self._attention_interface(mask, query, key, position_bias, output_attentions)
        shared_mask = mask is not None and mask.shape[2] not in (1, query.shape[2])
        if shared_mask and name == "sdpa" and position_bias is None:
            return self._attend_with_shared_mask(query.to(key.dtype), key, value, mask, group, dropout), None
        if name == "sdpa" and position_bias is None and attends_in_float32(key, dropout):
            output = attend_in_float32(query.to(key.dtype), key, value, mask, self.scaling)
            return output.transpose(1, 2), None
        if shared_mask and mask is not None:
            mask = mask.repeat_interleave(group, dim=2)
        output, weights = attention_interface(
            self,
            query.to(key.dtype),
            key,
            value,
            mask,
            dropout=dropout,
            scaling=self.scaling,
            is_causal=False,
            **({} if position_bias is None else {"position_bias": position_bias}),
        )
        return output, weights if output_attentions else None

    def _multiplies_int8(self, query: torch.Tensor, dropout: float) -> bool:
        """Whether keys and values in int8 are multiplied as they are. Kernels of another name get them dequantised."""
        return (
            (self.config._attn_implementation or "sdpa") in ("sdpa", "eager") and not dropout and multiplies_few(query)
        )

    def _attend_with_shared_mask(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        group: int,
        dropout: float,
    ) -> torch.Tensor:
        """The same for a mask `(R, 1, r * T, N)` that the heads of a group share. Takes the heads apart again, so that the mask need
        not be repeated."""
        rows, kv_heads, _, head_dim = query.shape
        query = query.view(rows, kv_heads, -1, group, head_dim).transpose(2, 3).flatten(1, 2)
        if attends_in_float32(key, dropout):
            output = attend_in_float32(query, key, value, mask, self.scaling)
        else:
            output = nn.functional.scaled_dot_product_attention(
                query, key, value, attn_mask=mask, dropout_p=dropout, scale=self.scaling, enable_gqa=group > 1
            )
        output = output.view(rows, kv_heads, group, -1, head_dim).transpose(2, 3).flatten(2, 3)
        return output.transpose(1, 2)

    def _attention_interface(
        self,
        mask: torch.Tensor | None,
        query: torch.Tensor,
        key: torch.Tensor,
        position_bias: torch.Tensor | None,
        output_attentions: bool,
    ) -> tuple[Callable[..., Any], torch.Tensor | None, str]:
        """Returns the kernel, the mask in the form that the kernel takes, and the kernel's name."""
        name = self.config._attn_implementation or "sdpa"
        if output_attentions or name == "eager":
            return eager_attention_forward, mask, "eager"
        if "flash" in name and (mask is not None or position_bias is not None or key.dtype == torch.float32):
            logger.warning_once(
                f"`{name}` supports no cross-attention mask, no position bias and no float32. Calls that need one of them use `sdpa`."
            )
            name = "sdpa"
        if name == "flex_attention" and mask is not None and not _flex_reads_masks(query.device):
            logger.warning_once(
                "`flex_attention` supports no cross-attention mask on CPU. Calls with a mask use `sdpa`."
            )
            name = "sdpa"
        if name == "flex_attention" and mask is not None:
            # transformers adds the mask to the scores of flex attention, and reads it at every position.
            if mask.shape[2] not in (1, query.shape[2]):
                mask = mask.repeat_interleave(query.shape[2] // mask.shape[2], dim=2)
            mask = torch.where(mask, 0.0, torch.finfo(query.dtype).min).to(query.dtype)
            mask = mask.expand(-1, -1, query.shape[2], -1)
        return ALL_ATTENTION_FUNCTIONS.get_interface(name, eager_attention_forward), mask, name

    def _position_bias(
        self,
        context: CrossAttentionContext,
        text_rows: int,
        text_len: int,
        num_tokens: int,
        device: torch.device,
    ) -> torch.Tensor:
        """Returns T5's bias for each query and image token, `(text_rows, num_heads, text_len, num_image_tokens)`."""
        query_positions, key_positions = context.positions or (None, None)
        if query_positions is None:
            query_positions = torch.arange(text_len, device=device)[None]
        if key_positions is None:
            key_positions = torch.arange(num_tokens, device=device)[None]
        else:
            key_positions = rows_to(key_positions, text_rows)
        distance = key_positions[:, None, :] - query_positions[:, :, None]
        assert self.relative_attention_bias is not None
        buckets = relative_position_bucket(
            distance, self.config.position_bias_num_buckets, self.config.position_bias_max_distance
        )
        return self.relative_attention_bias(buckets).permute(0, 3, 1, 2).expand(text_rows, -1, -1, -1).contiguous()


def _in_cache_layout(states: torch.Tensor, null_key: bool) -> torch.Tensor:
    """Turns `(rows, tokens, heads, D)` into a contiguous `(rows, heads, tokens, D)`, because every decode step reads all of it. The
    same copy adds the null token, if there is one."""
    states = states.transpose(1, 2)
    if not null_key:
        return states.contiguous()
    rows, heads, _, width = states.shape
    return torch.cat([states.new_zeros(rows, heads, 1, width), states], dim=2)


def _rows_at(tensor: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
    """The rows of a tensor at `rows`; the same tensor for None."""
    return tensor if rows is None else tensor[rows]


def _flex_reads_masks(device: torch.device) -> bool:
    """Whether flex attention takes a mask tensor. With one, torch's compiled CPU kernel crashes the process (seen in torch 2.13)."""
    return device.type != "cpu"


def fold_queries(query: torch.Tensor, rows: int, kv_heads: int) -> torch.Tensor:
    """Folds all queries that share keys and values into one query axis.

    Args:
        query (`torch.Tensor`): `(R * r, T, K * G, D)`.
        rows, kv_heads (`int`): R and K.

    Returns:
        `torch.Tensor`: `(R, K, r * T * G, D)`.
    """
    text_rows, text_len, _, head_dim = query.shape
    query = query.reshape(rows, text_rows // rows, text_len, kv_heads, -1, head_dim)
    return query.permute(0, 3, 1, 2, 4, 5).reshape(rows, kv_heads, -1, head_dim)


def unfold_output(output: torch.Tensor, repeats: int, text_len: int) -> torch.Tensor:
    """Undoes [`fold_queries`] on the output: turns `(R, r * T * G, K, D)` into `(R * r, T, K * G * D)`."""
    rows, _, kv_heads, head_dim = output.shape
    output = output.reshape(rows * repeats, text_len, -1, kv_heads, head_dim)
    return output.transpose(2, 3).reshape(rows * repeats, text_len, -1)


def check_text_and_states(
    hidden_states: torch.Tensor, cross_attention_states: torch.Tensor, config: CrossAttentionConfig
) -> None:
    """Raises if the hidden states or the image tokens of a layer have a wrong type, rank, width, batch or dtype."""
    check_tensor("hidden_states", hidden_states)
    check_floating("hidden_states", hidden_states)
    shape = tuple(hidden_states.shape)
    if len(shape) != 3 or shape[-1] != config.hidden_size:
        raise ValueError(
            f"Expected `hidden_states` of shape (batch, text_len, hidden_size={config.hidden_size}), got {shape}."
        )
    if 0 in shape:
        raise ValueError(f"Expected `hidden_states` with at least one text token, got shape {shape}.")
    check_states(cross_attention_states, config.context_size)
    if cross_attention_states.shape[0] != shape[0]:
        raise ValueError(
            f"Expected `cross_attention_states` of batch {shape[0]}, like `hidden_states`, got batch {cross_attention_states.shape[0]}. To "
            "ask many questions about one image, encode it once with `encode_images` of a model and pass the cache."
        )
