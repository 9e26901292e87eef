"""The gated cross-attention block.

The block is a pre-norm block with two branches: norm, cross-attention, gate, residual; then norm, MLP, gate, residual.
The second branch may be left out. The block differs from the cross-attention of encoder-decoder models in three ways:

- It starts as the identity. In each branch exactly one factor is zero: the last projection (`o_proj`, `down_proj`), or
  the tanh gate.
- A text position that may see no image keeps its hidden state bit for bit, in both branches.
- It is a `PreTrainedModel`. transformers initialises each module with the `_init_weights` of the nearest
  `PreTrainedModel` above it. Inside a Llama, a plain module would get Llama's `_init_weights`, which does not know
  gates and fills zero-initialised projections with noise.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.activations import ACT2FN

from ..cache.cross_cache import KeyValue
from ..configuration_xattn import CrossAttentionConfig
from ..utils.checkpoint_files import NotesWhatIsMissing, check_class, check_complete
from ..utils.parts import GATES, POSITIONS, ValuesComeLater
from ..utils.projection import to_dtype_of
from ..utils.stub import NamesItsStub
from .attention import GatedCrossAttention, check_text_and_states, zero_init_linear
from .context import CrossAttentionContext, ImageTokens, no_context, plain_context
from .gates import Gate, TokenGate, gated, new_gate
from .norms import NORMS, CrossAttentionLayerNorm, CrossAttentionRMSNorm


if TYPE_CHECKING:
    from typing_extensions import Self


class CrossAttentionMLP(nn.Module):
    """`down(act(gate(x)) * up(x))`, or `down(act(up(x)))` without a gate projection."""

    def __init__(self, config: CrossAttentionConfig):
        super().__init__()
        bias = config.mlp_bias
        self.gate_proj = (
            nn.Linear(config.hidden_size, config.intermediate_size, bias=bias) if config.mlp_type == "gated" else None
        )
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=bias)
        self.down_proj = zero_init_linear(config.intermediate_size, config.hidden_size, bias, config.zero_init)
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        hidden_states = to_dtype_of(self.up_proj, hidden_states)
        if self.gate_proj is None:
            return self.down_proj(self.act_fn(self.up_proj(hidden_states)))
        return self.down_proj(self.act_fn(self.gate_proj(hidden_states)) * self.up_proj(hidden_states))


class GatedCrossAttentionBlock(NamesItsStub, NotesWhatIsMissing, PreTrainedModel):
    """A gated cross-attention block. It works in a decoder layer, and also outside of a model.

    Args:
        config ([`CrossAttentionConfig`]): Sizes and options.
        layer_idx (`int`): Index of this block's keys and values in the cross-attention half of a cache.

    Example:

    ```python
    >>> import torch
    >>> from hf_xattn import CrossAttentionConfig, GatedCrossAttentionBlock

    >>> block = GatedCrossAttentionBlock(CrossAttentionConfig(hidden_size=64, num_attention_heads=4, context_size=32))
    >>> text, images = torch.randn(2, 5, 64), torch.randn(2, 16, 32)
    >>> torch.equal(block(text, cross_attention_states=images), text)  # a fresh block adds nothing
    True
    ```
    """

    config_class = CrossAttentionConfig
    config: CrossAttentionConfig
    attn_gate: Gate
    mlp_gate: Gate
    base_model_prefix = ""
    main_input_name = "hidden_states"
    _no_split_modules = ["GatedCrossAttentionBlock"]
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    # Gates and norms stay float32: bfloat16 would round updates this small to zero.
    _keep_in_fp32_modules_strict = [
        *("attn_gate", "mlp_gate", "attn_norm", "mlp_norm"),
        *("attn.q_norm", "attn.k_norm", "attn.context_norm"),
    ]

    @classmethod
    def _can_set_attn_implementation(cls) -> bool:
        return True  # transformers looks for the attention interface in the text of this file; attention.py calls it

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        return True  # the block has no experts, but transformers sets the decoder's choice on every part

    def __init__(self, config: CrossAttentionConfig, layer_idx: int = 0):
        super().__init__(config)
        self.layer_idx = layer_idx
        norm = NORMS[config.norm_type]
        position = POSITIONS.make(config.position, config)  # outside of `with`: it keeps the values of its constructor
        with ValuesComeLater():
            self.attn_norm = norm(config.hidden_size, config.norm_eps)
            self.attn = GatedCrossAttention(config, layer_idx, position)
            has_mlp = config.mlp_type != "none"
            self.mlp_norm = norm(config.hidden_size, config.norm_eps) if has_mlp else None
            self.mlp = CrossAttentionMLP(config) if has_mlp else None
        self.attn_gate = new_gate(config)
        self.mlp_gate = new_gate(config) if has_mlp else None
        self.post_init()

    @classmethod
    def from_pretrained(cls, *args, allow_missing_weights: bool = False, **kwargs) -> Self:
        """`PreTrainedModel.from_pretrained`.

        Args:
            allow_missing_weights (`bool`, defaults to `False`): Whether to give missing weights first values, with a
                warning, in place of an error.

        Raises:
            ValueError: for a checkpoint with weights missing, and for one of another class.
        """
        loaded: Any = super().from_pretrained(*args, **kwargs)
        block = loaded[0] if isinstance(loaded, tuple) else loaded
        source = args[0] if args else kwargs.get("pretrained_model_name_or_path")
        check_class(cls, block.config.architectures, source, (GatedCrossAttentionBlock.__name__,))
        check_complete(block, source, allow_missing_weights)
        return loaded

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        config = self.config
        gates = (self.attn_gate, self.mlp_gate)
        if any(GATES.write_first_values(config.gate, gate, module, config) for gate in gates):
            return
        if POSITIONS.write_first_values(config.position, self.attn.position, module, config):
            return
        if isinstance(module, nn.Linear):
            if getattr(module, "zero_init", False):
                init.zeros_(module.weight)
            else:
                init.normal_(module.weight, mean=0.0, std=self.config.initializer_range)
            if module.bias is not None:
                init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            init.normal_(module.weight, mean=0.0, std=self.config.initializer_range)
        elif isinstance(module, (CrossAttentionRMSNorm, CrossAttentionLayerNorm)):
            init.ones_(module.weight)
            if isinstance(module, CrossAttentionLayerNorm):
                init.zeros_(module.bias)
        elif isinstance(module, TokenGate):
            init.zeros_(module.weight)
            init.constant_(module.bias, float(config.gate_init))
        elif isinstance(module, GatedCrossAttentionBlock):
            for gate in (module.attn_gate, module.mlp_gate):
                if isinstance(gate, nn.Parameter):
                    init.constant_(gate, float(self.config.gate_init))

    def forward(
        self,
        hidden_states: torch.Tensor,
        cross_attention_states: torch.Tensor | None = None,
        cross_attention_mask: torch.Tensor | None = None,
        cross_attention: CrossAttentionContext | None = None,
    ) -> torch.Tensor:
        """
        Args:
            hidden_states (`torch.Tensor`): `(batch, text_len, hidden_size)`, the text.
            cross_attention_states (`torch.Tensor`): `(batch, num_image_tokens, context_size)`, the image tokens.
            cross_attention_mask (`torch.BoolTensor`, *optional*): True where text may attend to an image token;
                `(batch, num_image_tokens)` or `(batch, text_len, num_image_tokens)`.
            cross_attention ([`CrossAttentionContext`], *optional*): What a model passes to its blocks, in place of the
                two arguments above.

        Returns:
            `torch.Tensor`: `(batch, text_len, hidden_size)`. A text token that may see nothing keeps its hidden state
            bit for bit.

        Raises:
            TypeError: for a mask that is not boolean or states that are not floating point.
            ValueError: for a wrong rank, width or batch, or if neither states nor a context are given.
        """
        if cross_attention is None:
            if cross_attention_states is None:
                raise ValueError(
                    "`cross_attention_states` of shape (batch, num_image_tokens, context_size) are required, got None."
                )
            check_text_and_states(hidden_states, cross_attention_states, self.config)
            images = ImageTokens(states=cross_attention_states, null_key=self.config.quiet_softmax)
            keys_values = self.attn(None, cross_attention=images)[0]
            cross_attention = plain_context(hidden_states, keys_values, cross_attention_mask, self.config)
        elif not isinstance(cross_attention, CrossAttentionContext):
            raise no_context(cross_attention)
        attended, weights = self.attn(self.attn_norm(hidden_states), cross_attention=cross_attention)
        if cross_attention.recorder is not None and not (weights is None and torch.compiler.is_compiling()):
            # Compiled code records only weights that are needed, because `torch.compile` takes no checkpointed layer
            # with a side effect into its graph.
            cross_attention.recorder.weights[self.layer_idx] = weights
        seen = hidden_states + gated(attended, self.attn_gate, hidden_states)
        if self.mlp is not None and self.mlp_norm is not None:
            seen = seen + gated(self.mlp(self.mlp_norm(seen)), self.mlp_gate, seen)
        if cross_attention.visible is None:
            return seen
        # A product with the mask would not do, because NaN * 0 is NaN.
        return torch.where(cross_attention.visible, seen, hidden_states)

    def encode(self, images: ImageTokens) -> tuple[KeyValue, ...]:
        """Returns the keys and values of new images, as a tuple of one pair, that of this block."""
        return (self.attn(None, cross_attention=images)[0],)


def cross_attention_blocks(module: nn.Module) -> list[GatedCrossAttentionBlock]:
    """Returns the blocks that run in a model or a layer, in the order of the layers.

    PEFT keeps each module of `modules_to_save` together with trained copies, and only one of them runs.
    """
    blocks, left = [], [module]
    while left:
        part = left.pop()
        if isinstance(part, GatedCrossAttentionBlock):
            blocks.append(part)
        elif "original_module" in part._modules and isinstance(part._modules.get("modules_to_save"), nn.ModuleDict):
            left.append(_running_copy(part))
        else:
            left.extend(part.children())
    return sorted(blocks, key=operator.attrgetter("layer_idx"))


def _running_copy(wrapper: Any) -> nn.Module:
    active = [] if wrapper.disable_adapters else wrapper.active_adapters
    return next(
        (wrapper.modules_to_save[name] for name in active if name in wrapper.modules_to_save), wrapper.original_module
    )


__all__ = ["GatedCrossAttentionBlock"]
