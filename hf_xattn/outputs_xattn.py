"""Output classes of `forward` and `generate`, for combinations of fields that no output class of transformers has.

In transformers, outputs of decoder-only models have no `cross_attentions`, and outputs of encoder-decoder models have
no `router_logits`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers.generation import GenerateBeamDecoderOnlyOutput, GenerateDecoderOnlyOutput
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions, CausalLMOutputWithCrossAttentions


@dataclass
class XAttnMoeModelOutput(BaseModelOutputWithPastAndCrossAttentions):
    """[`BaseModelOutputWithPastAndCrossAttentions`] of a text model with a mixture of experts.

    Attributes:
        router_logits (`tuple[torch.Tensor]`, *optional*): The router logits of each layer with experts.
    """

    router_logits: tuple[torch.Tensor, ...] | None = None


@dataclass
class XAttnMoeCausalLMOutput(CausalLMOutputWithCrossAttentions):
    """[`CausalLMOutputWithCrossAttentions`] of a text model with a mixture of experts.

    Attributes:
        aux_loss (`torch.Tensor`, *optional*): The load-balancing loss, which `loss` contains.
        router_logits (`tuple[torch.Tensor]`, *optional*): The router logits of each layer with experts.
    """

    aux_loss: torch.Tensor | None = None
    router_logits: tuple[torch.Tensor, ...] | None = None


@dataclass
class XAttnGenerateOutput(GenerateDecoderOnlyOutput):
    """[`GenerateDecoderOnlyOutput`] with the attention of text to images.

    Attributes:
        cross_attentions (`tuple[tuple[torch.Tensor]]`, *optional*): The attention weights of the blocks, if
            `output_attentions=True` and there are images. There is one tuple for each generated token, with one tensor
            for each block: `(batch, num_attention_heads, text_len of the step, num_image_tokens)`. The first step reads
            the prompt.
    """

    cross_attentions: tuple[tuple[torch.Tensor, ...], ...] | None = None


@dataclass
class XAttnGenerateBeamOutput(GenerateBeamDecoderOnlyOutput):
    """[`GenerateBeamDecoderOnlyOutput`] with the attention of text to images.

    Attributes:
        cross_attentions (`tuple[tuple[torch.Tensor]]`, *optional*): As in [`XAttnGenerateOutput`], with `batch *
            num_beams` rows. `beam_indices` says which row of a step belongs to which sequence.
    """

    cross_attentions: tuple[tuple[torch.Tensor, ...], ...] | None = None
