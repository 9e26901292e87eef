"""What the models return: transformers' own classes, with one field or two more.

Each class derives from transformers' own, so that code which knows the parent works.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

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


class StepAttentions:
    """Collects the cross-attentions of one `generate`, step by step.

    `prompt_len`: text tokens that the first forward reads, but for candidates of assisted decoding.
    """

    def __init__(self, prompt_len: int):
        self.prompt_len = prompt_len
        self.steps: list[tuple[torch.Tensor, ...]] = []

    def add(self, outputs: Any, accepted: int | None = None) -> None:
        """Takes up one forward.

        `accepted`: how many candidates assisted decoding keeps. The first of them follows the last token of known text.
        """
        weights = outputs.cross_attentions
        if weights is None:
            return
        if accepted is None:
            self.steps.append(weights)
            return
        known = 1 if self.steps else min(self.prompt_len, weights[0].shape[2])
        ends = [known + count for count in range(accepted)]
        starts = [0, *ends[:-1]]
        for start, end in zip(starts, ends):
            self.steps.append(tuple(of_block[:, :, start:end] for of_block in weights))

    def result(self, outputs: Any) -> Any:
        """What `generate` returns, with the field `cross_attentions` where it is one of transformers' outputs."""
        for parent, derived in (
            (GenerateDecoderOnlyOutput, XAttnGenerateOutput),
            (GenerateBeamDecoderOnlyOutput, XAttnGenerateBeamOutput),
        ):
            if type(outputs) is parent:
                # A last step that transformers takes back, or runs for other ranks alone, has left no attentions there.
                steps = self.steps[: len(outputs.attentions)] if outputs.attentions else self.steps
                return derived(**outputs, cross_attentions=tuple(steps) or None)
        return outputs
