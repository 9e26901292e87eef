"""Cross-attention: the queries come from the text, the keys and values from the image tokens.

It differs from self-attention in three ways:

- The image axis has no causal order. So all queries that share keys and values can be folded into one query axis: the
  heads of a K/V group, the text positions, and the text rows that look at the same image. Keys and values are never
  repeated, neither for GQA nor for beams, and a decode step reads them once.
- There is no rotary embedding, because image features already contain their positions. For features with an order
  (sound, video), there are position parts (`layers/positions.py`).
- The output projection starts at zero (`zero_init`), so a fresh layer changes nothing.

Letters in the comments: R image rows, r text rows for each image row, T text tokens, N image tokens, K K/V heads, G
query heads for each K/V head, D head width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..cache.image_layout import RealTokens
from ..cache.states import States, dense
from ..configuration_xattn import CrossAttentionConfig
from ..utils.distributed import is_distributed
from ..utils.parts import POSITIONS
from ..utils.projection import ImageLinear, to_dtype_of
from ..utils.tensor_checks import check_floating, check_states, check_tensor
from .context import CrossAttentionContext, ImageTokens, no_context, plain_context
from .kernels import run_kernel
from .norms import NORMS, CrossAttentionKeyNorm, CrossAttentionRMSNorm
from .positions import SCORE_PARTS, added_to_scores, with_position


def zero_init_linear(in_features: int, out_features: int, bias: bool, zero_init: bool) -> nn.Linear:
    """Makes a linear layer with the attribute `zero_init`, which tells `_init_weights` whether to start it at zero.

    transformers initialises weights module by module, and does so again if a checkpoint lacks them. So the attribute is
    on the module.
    """
    linear: Any = nn.Linear(in_features, out_features, bias=bias)
    linear.zero_init = zero_init
    if zero_init:
        nn.init.zeros_(linear.weight)
        if bias:
            nn.init.zeros_(linear.bias)
    return linear


class GatedCrossAttention(nn.Module):
    """Multi-head cross-attention over image tokens of any width. It also works outside of a model, on plain tensors.

    The gate that scales the output is in [`GatedCrossAttentionBlock`], next to the residual connection.

    Args:
        config ([`CrossAttentionConfig`]): Sizes and options.
        layer_idx (`int`): Index of this layer's keys and values in the cross-attention half of a cache.
        position (`nn.Module`, *optional*): The position encoding that `config` names. By default it is built here.

    Example:

    ```python
    >>> import torch
    >>> from hf_xattn import CrossAttentionConfig, GatedCrossAttention

    >>> config = CrossAttentionConfig(hidden_size=64, num_attention_heads=4, context_size=32)
    >>> attention = GatedCrossAttention(config)
    >>> text, images = torch.randn(2, 5, 64), torch.randn(2, 16, 32)
    >>> output, _ = attention(text, cross_attention_states=images)
    >>> output.shape
    torch.Size([2, 5, 64])
    ```
    """

    is_causal = False
    num_key_value_groups = 1  # folded queries have as many heads as keys and values

    def __init__(self, config: CrossAttentionConfig, layer_idx: int = 0, position: nn.Module | None = None):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        # Under tensor parallelism, this is the number of heads of this rank (see `learning/sharding.py`).
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
        self.position = POSITIONS.make(config.position, config) if position is None else position
        norm_of_keys = CrossAttentionKeyNorm if self.position is None else CrossAttentionRMSNorm
        self.k_norm = norm_of_keys(config.head_dim, config.qk_norm_eps) if config.qk_norm else None
        norm = NORMS[config.norm_type]
        self.context_norm = norm(config.context_size, config.norm_eps) if config.context_norm else None
        made = {name: part.make(config) for name, part in SCORE_PARTS.items()}
        for name, module in made.items():
            self.add_module(name, module)
        self.adds_to_scores = any(module is not None for module in made.values())

    def forward(
        self,
        hidden_states: torch.Tensor | None,
        cross_attention_states: torch.Tensor | None = None,
        cross_attention_mask: torch.Tensor | None = None,
        output_attentions: bool = False,
        cross_attention: CrossAttentionContext | ImageTokens | None = None,
    ) -> tuple[Any, torch.Tensor | None]:
        """
        Args:
            hidden_states (`torch.Tensor`): `(batch, text_len, hidden_size)`, the text. None if the layer shall only
                compute keys and values.
            cross_attention_states (`torch.Tensor`): `(batch, num_image_tokens, context_size)`, the image tokens.
            cross_attention_mask (`torch.BoolTensor`, *optional*): True where text may attend to an image token;
                `(batch, num_image_tokens)` or `(batch, text_len, num_image_tokens)`. For a text token that may see
                nothing, the output is zero before the bias of the output projection.
            output_attentions (`bool`, defaults to `False`): Whether to return the attention weights.
            cross_attention ([`CrossAttentionContext`] or [`ImageTokens`], *optional*): What a model passes to its
                blocks, in place of the three arguments above.

        Returns:
            `(output, weights)`: the output `(batch, text_len, hidden_size)`, and the weights `(batch,
            num_attention_heads, text_len, num_image_tokens)` or None. If `cross_attention` is an [`ImageTokens`], the
            output is a tuple of keys and values.

        Raises:
            TypeError: for a mask that is not boolean or states that are not floating point.
            ValueError: for a wrong rank, width or batch.
        """
        if isinstance(cross_attention, ImageTokens):
            images = cross_attention
            assert images.states is not None
            # Keys and values are returned as outputs, because FSDP finds in them when the weights are needed again.
            return self.project_key_value(images.states, bool(images.null_key), images.real, images.positions), None
        if cross_attention is None:
            if hidden_states is None or cross_attention_states is None:
                raise ValueError(
                    "`hidden_states` (batch, text_len, hidden_size) and `cross_attention_states` (batch, "
                    "num_image_tokens, context_size) are required."
                )
            check_text_and_states(hidden_states, cross_attention_states, self.config)
            keys_values = self.project_key_value(cross_attention_states, self.quiet_softmax)
            cross_attention = plain_context(
                hidden_states, keys_values, cross_attention_mask, self.config, output_attentions
            )
        elif not isinstance(cross_attention, CrossAttentionContext):
            raise no_context(cross_attention)
        assert hidden_states is not None
        return self._attend(hidden_states, *cross_attention.read(self.layer_idx), cross_attention)

    def image_parts(self) -> list[tuple[str, nn.Module]]:
        """Returns the modules, with their names, that compute the keys and values of image tokens."""
        names = ["context_norm", "k_proj", "v_proj"]
        if self.position is not None:
            names += ["position", "k_norm"]  # without a position encoding, the weight of the norm scales the queries
        return [(name, part) for name in names if (part := getattr(self, name)) is not None]

    def project_key_value(
        self,
        cross_attention_states: torch.Tensor,
        null_key: bool = False,
        real: RealTokens | None = None,
        positions: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Projects image tokens to keys and values, in the layout of transformers' caches.

        Args:
            cross_attention_states (`torch.Tensor`): `(rows, num_image_tokens, context_size)`.
            null_key (`bool`, defaults to `False`): Whether to put the null key of quiet softmax in front, which adds 1
                to the denominator of the softmax.
            real ([`RealTokens`], *optional*): The places of the tokens in a padded batch, if
                `cross_attention_states` holds only the tokens that are no padding.
            positions (`torch.LongTensor`, *optional*): `(1, num_image_tokens)`, the position of each token in its
                image, for a position encoding. By default all tokens belong to one image.

        Returns:
            two `torch.Tensor`: keys and values `(rows, num_key_value_heads, num_image_tokens, head_dim)`, with one more
            token if there is a null key. With `qk_norm`, the keys are not multiplied by the weight of their norm, which
            scales the queries (see [`CrossAttentionKeyNorm`]), unless there is a position encoding.
        """
        states = cross_attention_states if self.context_norm is None else self.context_norm(cross_attention_states)
        states = to_dtype_of(self.k_proj, states)
        # -1 stands for the number of heads, because under tensor parallelism a rank holds only some of them.
        shape = (*states.shape[:2], -1, self.head_dim)
        key = self.k_proj(states).view(shape)
        value = self.v_proj(states).view(shape)
        if self.k_norm is not None:
            key = self.k_norm.normalize(key) if isinstance(self.k_norm, CrossAttentionKeyNorm) else self.k_norm(key)
        if self.position is not None:
            key = with_position(self.position, "keys", key, positions)
        if real is not None:
            return real.spread(key, null_key), real.spread(value, null_key)
        return _in_cache_layout(key, null_key), _in_cache_layout(value, null_key)

    def _attend(
        self, hidden_states: torch.Tensor, key: States, value: States, context: CrossAttentionContext
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Computes the attention of all text rows over their images.

        Args:
            hidden_states (`torch.Tensor`): `(R * r, T, hidden_size)`. The text rows `i * r` to `i * r + r - 1` look at
                image row `i`.
            key, value (`torch.Tensor` or [`StoredStates`]): `(R, num_key_value_heads, N or N + 1, head_dim)`.
        """
        text_rows, text_len = hidden_states.shape[:2]
        rows, kv_heads = key.shape[:2]
        repeats = text_rows // rows
        output_attentions = context.recorder is not None and context.recorder.wants_weights
        dropout = self.attention_dropout if self.training else 0.0
        num_tokens = key.shape[2] - int(self.quiet_softmax)
        if num_tokens == 1 and self._needs_no_scores(output_attentions, dropout):
            heads = dense(value).repeat_interleave(self.num_groups, dim=1).reshape(rows, 1, 1, -1)
            output = heads.expand(-1, repeats, text_len, -1).reshape(rows * repeats, text_len, -1)
            return self.o_proj(_of_text(output, context)), None
        query = self._queries(hidden_states, None if context.positions is None else context.positions.query)
        num_heads = query.shape[2]
        group = num_heads // kv_heads
        query = fold_queries(query, rows, kv_heads)
        mask = None if context.mask is None else self._mask_of_rank(context.mask, repeats * text_len)
        position_bias = None
        if self.adds_to_scores:
            shape = text_rows, text_len, num_tokens
            position_bias = added_to_scores(self, context.positions, shape, key.device)
            position_bias = fold_queries(position_bias, rows, kv_heads)
            position_bias = nn.functional.pad(position_bias, (key.shape[2] - num_tokens, 0)).to(query.dtype)
        options: dict[str, Any] = {"group": group, "dropout": dropout, "output_attentions": output_attentions}
        output, weights = run_kernel(self, query, key, value, mask, position_bias, **options)
        output = self.o_proj(_of_text(unfold_output(output, repeats, text_len), context))
        if weights is None:
            return output, None
        weights = weights.view(rows, kv_heads, repeats, text_len, group, -1)[..., -num_tokens:]
        weights = weights.permute(0, 2, 1, 4, 3, 5).reshape(rows * repeats, num_heads, text_len, num_tokens)
        return output, _of_text(weights, context)

    def _needs_no_scores(self, output_attentions: bool, dropout: float) -> bool:
        """Whether a single key needs no scores: the softmax over it is 1, so the output is its value."""
        if self.quiet_softmax or output_attentions or dropout or torch.is_grad_enabled():
            return False
        # Other processes may have more image tokens, and use the weights of these modules. FSDP gathers weights in all
        # processes at once, so this process uses them, too.
        return (self.q_norm is None and self.position is None) or not is_distributed()

    def _queries(self, hidden_states: torch.Tensor, positions: torch.Tensor | None) -> torch.Tensor:
        """Returns the queries, `(B, T, num_attention_heads, head_dim)`."""
        query = self.q_proj(to_dtype_of(self.q_proj, hidden_states))
        query = query.view(*hidden_states.shape[:2], -1, self.head_dim)
        if self.position is not None:
            query = query if self.q_norm is None else self.q_norm(query)
            return with_position(self.position, "queries", query, positions)
        if self.q_norm is None or self.k_norm is None:
            return query
        return self.k_norm(self.q_norm(query.to(torch.promote_types(query.dtype, torch.float32)))).to(query.dtype)

    def _mask_of_rank(self, mask: torch.Tensor, positions: int) -> torch.Tensor:
        """Returns the part of a mask `(R, 1, r * T * G, N)` for the heads of this rank.

        The mask is equal for all heads of a text position.
        """
        group = self.config.num_attention_heads // self.config.num_key_value_heads
        if group == self.num_groups or mask.shape[2] != positions * group:
            return mask
        return mask.unflatten(2, (positions, group))[:, :, :, : self.num_groups].flatten(2, 3)


def _in_cache_layout(states: torch.Tensor, null_key: bool) -> torch.Tensor:
    """Turns `(rows, tokens, heads, D)` into `(rows, heads, tokens, D)`, and adds the null key if there is one.

    The result is contiguous, because every decode step reads all of it.
    """
    states = states.transpose(1, 2)
    if not null_key:
        return states.contiguous()
    rows, heads, _, width = states.shape
    return torch.cat([states.new_zeros(rows, heads, 1, width), states], dim=2)


def _of_text(tensor: torch.Tensor, context: CrossAttentionContext) -> torch.Tensor:
    """Sets the output or the weights of text tokens that see nothing to zero."""
    if context.visible is None:
        return tensor
    return torch.where(context.visible if tensor.dim() == 3 else context.visible[:, None], tensor, 0)


def fold_queries(query: torch.Tensor, rows: int, kv_heads: int) -> torch.Tensor:
    """Folds all queries that share keys and values into one axis: `(R * r, T, K * G, D)` to `(R, K, r * T * G, D)`."""
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
            f"Expected `cross_attention_states` of batch {shape[0]}, like `hidden_states`, got batch "
            f"{cross_attention_states.shape[0]}. To ask many questions about one image, encode it once with "
            "`encode_images` of a model and pass the cache."
        )
