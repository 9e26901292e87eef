"""A LLaVA-style model over a language model and a tower that are there: transformers' own Llava, and its inputs.

Llava puts the projected features of a picture into the prompt, each in the place of an image token. So the language
model reads other embeddings from its first layer on.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from transformers import BatchFeature, LlavaConfig, LlavaForConditionalGeneration, PreTrainedModel

from hf_xattn import XAttnProcessor


def llava_of(base: PreTrainedModel, tower: PreTrainedModel, image_token_id: int) -> LlavaForConditionalGeneration:
    """Joins a language model and a tower, both frozen, by a new projector. Its text-only logits are the language
    model's.

    Args:
        base ([`PreTrainedModel`]): a causal language model. The result uses its modules.
        tower ([`PreTrainedModel`]): its output has `last_hidden_state`.
        image_token_id (`int`): stands for a feature of a picture in the prompt. May be beyond the vocabulary.
    """
    # Llava takes hidden states by their index. The last ones are those behind the tower's last norm, as for the blocks.
    tower.config.tie_last_hidden_states = True
    config = LlavaConfig(
        vision_config=copy.deepcopy(tower.config),
        text_config=copy.deepcopy(base.config),
        image_token_index=image_token_id,
        image_seq_length=num_image_tokens(tower),
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
    )
    model = LlavaForConditionalGeneration(config)
    body: Any = base.get_decoder()
    embedding: Any = body.get_input_embeddings()
    missing = image_token_id + 1 - embedding.num_embeddings
    if missing > 0:  # rows for lookup only, which a feature replaces; the head has none
        mean = embedding.weight.detach().mean(0, keepdim=True)
        body.set_input_embeddings(
            nn.Embedding.from_pretrained(torch.cat([embedding.weight.detach(), mean.expand(missing, -1)]))
        )
    model.model.language_model, model.model.vision_tower = body, tower
    model.lm_head = base.get_output_embeddings()
    model.model.multi_modal_projector.to(base.dtype)
    model.generation_config = base.generation_config
    model.requires_grad_(False)
    model.model.multi_modal_projector.requires_grad_(True)
    return model.eval()


@torch.no_grad()
def num_image_tokens(tower: PreTrainedModel) -> int:
    """Tokens that a tower makes of a picture, the class token among them."""
    size = tower.config.image_size
    height, width = (size, size) if isinstance(size, int) else size
    return tower(pixel_values=torch.zeros(1, 3, height, width, dtype=tower.dtype)).last_hidden_state.shape[1]


class LlavaChats:
    """Makes Llava's inputs of chats: the prompts that the demo's processor renders, with several image tokens for a
    picture.

    Args:
        processor ([`XAttnProcessor`]): renders a picture as one image token.
        num_tokens (`int`): image tokens a picture.
    """

    def __init__(self, processor: XAttnProcessor, num_tokens: int):
        self.processor, self.num_tokens = processor, num_tokens
        self.batch_decode = processor.batch_decode

    def apply_chat_template(self, chats: list, **kwargs) -> BatchFeature:
        inputs = self.processor.apply_chat_template(chats, **kwargs)
        counts = self.counts(inputs["input_ids"])
        made = {
            name: torch.stack([row.repeat_interleave(count) for row, count in zip(inputs[name], counts)])
            for name in ("input_ids", "attention_mask")
        }
        if "pixel_values" in inputs:
            made["pixel_values"] = inputs["pixel_values"].flatten(0, 1)
        return BatchFeature(made)

    def counts(self, ids: torch.Tensor) -> torch.Tensor:
        """How often Llava's prompt holds each token of a prompt."""
        return torch.where(ids == self.processor.image_token_id, self.num_tokens, 1)
