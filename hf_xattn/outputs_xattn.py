"""What `forward` and `generate` return where transformers has no output with those fields.

Decoder-only models of transformers have no `cross_attentions`, and encoder-decoders no experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers.generation import GenerateBeamDecoderOnlyOutput, GenerateDecoderOnlyOutput
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions, CausalLMOutputWithCrossAttentions


@dataclass
class XAttnMoeModelOutput(BaseModelOutputWithPastAndCrossAttentions):
    """[`BaseModelOutputWithPastAndCrossAttentions`] of a mixture-of-experts decoder.

    Attributes:
        router_logits (`tuple[torch.Tensor]`, *optional*): of every expert layer.
    """

    router_logits: tuple[torch.Tensor, ...] | None = None


@dataclass
class XAttnMoeCausalLMOutput(CausalLMOutputWithCrossAttentions):
    """[`CausalLMOutputWithCrossAttentions`] of a mixture-of-experts decoder.

    Attributes:
        aux_loss (`torch.Tensor`, *optional*): load-balancing loss, part of `loss`.
        router_logits (`tuple[torch.Tensor]`, *optional*): of every expert layer.
    """

    aux_loss: torch.Tensor | None = None
    router_logits: tuple[torch.Tensor, ...] | None = None


@dataclass
class XAttnGenerateOutput(GenerateDecoderOnlyOutput):
    """[`GenerateDecoderOnlyOutput`] with the attention of text to images.

    Attributes:
        cross_attentions (`tuple[tuple[torch.Tensor]]`, *optional*): with `output_attentions=True`, one entry a
            generated token, each with one tensor a block: `(batch, num_attention_heads, text_len of the step,
            num_image_tokens)`. The first step reads the prompt. None where there are no images.
    """

    cross_attentions: tuple[tuple[torch.Tensor, ...], ...] | None = None


@dataclass
class XAttnGenerateBeamOutput(GenerateBeamDecoderOnlyOutput):
    """[`GenerateBeamDecoderOnlyOutput`] with the attention of text to images.

    Attributes:
        cross_attentions (`tuple[tuple[torch.Tensor]]`, *optional*): as in [`XAttnGenerateOutput`], with `batch *
            num_beams` rows. `beam_indices` tells which row of a step belongs to a sequence.
    """

    cross_attentions: tuple[tuple[torch.Tensor, ...], ...] | None = None
